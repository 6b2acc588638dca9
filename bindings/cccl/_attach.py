"""`cccl.configure(...)` and then plain DDP: compress it, or say once that nothing was."""

from __future__ import annotations

import atexit
import importlib
import sys
import warnings
from typing import TYPE_CHECKING

from . import _core

if TYPE_CHECKING:
    from ._config import Config

_UNUSED = (
    "cccl.configure() was called before torch was imported, and nothing was compressed. Call it "
    "after `import torch`, or add after DDP is made: "
    "ddp.register_comm_hook(None, cccl.torch.compression_hook)"
)


def attach(config: Config) -> None:
    """Tells the frontend of a framework that is loaded; of one that is not, a warning at exit."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        importlib.import_module("cccl.torch").attach(config)
    elif torch is None:
        atexit.register(_warn_if_unused)


def _warn_if_unused() -> None:
    atexit.unregister(_warn_if_unused)
    if "torch" in sys.modules and "cccl.torch" not in sys.modules and not _core.stats_rows():
        warnings.warn(_UNUSED, stacklevel=1)
