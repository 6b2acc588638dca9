"""What ranks keep of tensors between steps, and which tensor is which."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import _state
from ..errors import ConfigError, UnsupportedError
from ._groups import resolve


class StateStore(_state.StateStore):
    __doc__ = _state.StateStore.__doc__

    def __init__(self, group: Callable[[], dist.ProcessGroup | None]):
        super().__init__(lambda: _place(group()))

    @staticmethod
    def _pack(held: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(held or b"-"), dtype=torch.uint8)[: len(held)]

    @staticmethod
    def _unpack(packed: torch.Tensor) -> bytes:
        held: bytes = packed.cpu().numpy().tobytes()
        return held


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    group = resolve(group)
    if group is None:
        raise UnsupportedError("this process is no member of the group whose state this is")
    return group.rank(), group.size()


_stores: weakref.WeakKeyDictionary[Any, StateStore] = weakref.WeakKeyDictionary()


def keep_for(model: torch.nn.Module, store: StateStore) -> None:
    """`state_of(model)` from now on."""
    _stores[model] = store


def state_of(owner: torch.nn.Module | dist.ProcessGroup | None = None) -> StateStore:
    """The `StateStore` of a model that `compress`, `compress_fsdp` or `cccl.configure` compresses;
    of a process group, that of collectives with a label; None: of the default group.

    Raises `ConfigError` for a model that is not compressed.
    """
    if isinstance(owner, torch.nn.Module):
        if owner not in _stores:
            raise ConfigError(
                f"this {type(owner).__name__} is not compressed (yet): a model that cccl.configure "
                "compresses is from its first forward pass on"
            )
        return _stores[owner]
    group = resolve(owner)
    if group is None:
        raise UnsupportedError("this process is no member of that group")
    store = _stores.get(group)
    if store is None:
        reference = weakref.ref(group)
        store = _stores[group] = StateStore(lambda: reference())
    return store
