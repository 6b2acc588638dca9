"""CCCL for PyTorch: a process-group backend, hooks for DDP and FSDP, collectives on tensors."""

from typing import Any

try:
    import torch.distributed as _dist
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(
        f"cccl.torch needs {_error.name}: pip install 'cccl[torch]'", name=_error.name
    ) from _error

from .._config import current_config as _current_config
from .._config import is_configured as _is_configured
from ..errors import UnsupportedError as _UnsupportedError
from ._collectives import all_gather, all_reduce, broadcast, reduce_scatter
from ._groups import recover
from ._state import StateStore, state_of
from ._work import Work

if _dist.is_available():
    from ._backend import register as _register
    from ._ddp import CompressionState, attach, compress, compression_hook
    from ._explain import explain
    from ._fsdp import compress_fsdp
    from ._replicas import check_replicas

    _register()

    if _is_configured():  # before torch was imported
        attach(_current_config())
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise _UnsupportedError(f"cccl.torch.{name}: this torch has no distributed support")
        raise AttributeError(name)


__all__ = [
    "CompressionState",
    "StateStore",
    "Work",
    "all_gather",
    "all_reduce",
    "attach",
    "broadcast",
    "check_replicas",
    "compress",
    "compress_fsdp",
    "compression_hook",
    "explain",
    "recover",
    "reduce_scatter",
    "state_of",
]
