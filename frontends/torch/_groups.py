"""One communicator per process group, made when it is first used."""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any

import torch.distributed as dist

from .. import _core
from .._config import Config
from ..errors import UnsupportedError


class GroupCommunicator:
    """The core's communicator of a process group, and how often it had to be made anew."""

    def __init__(self, group: dist.ProcessGroup, generation: int, config: Config):
        from ._gloo import GlooTransport  # needs a torch that is built with distributed support

        self.generation = generation
        self._agreed: set[tuple[str, ...]] = set()
        self.deadline = config.deadline or _timeout_of(group)
        transport = GlooTransport(group, generation, self.deadline)
        self.core = _core.Communicator(
            _core.external_transport(transport.rank, transport.size, transport), self.deadline
        )

    def agree(self, fields: dict[str, str]) -> None:
        """Compares a call that goes plain with all ranks, at its first use; `MismatchError`."""
        key = tuple(fields.values())
        if key not in self._agreed:
            self.core.agree(fields).wait()
            self._agreed.add(key)


_communicators: weakref.WeakKeyDictionary[Any, GroupCommunicator] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group meant, or None if this process is no member of it."""
    if not dist.is_available():
        raise UnsupportedError("this torch was built without distributed support")
    if group is None:
        if not dist.is_initialized():
            raise UnsupportedError(
                "there is no process group: call torch.distributed.init_process_group() first"
            )
        group = dist.group.WORLD
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else group


def communicator(group: dist.ProcessGroup, config: Config) -> GroupCommunicator:
    """Of `group`. After a failure, which every member sees, the next call makes a new one."""
    with _lock:
        found = _communicators.get(group)
        if found and not found.core.closed and config.deadline in (None, found.deadline):
            return found
        generation = found.generation + 1 if found else 0
        found = _communicators[group] = GroupCommunicator(group, generation, config)
        return found


def _timeout_of(group: dist.ProcessGroup) -> float:
    import torch

    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
            return float(options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return 1800.0


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: the communicators' threads call into Python."""
    for found in list(_communicators.values()):
        if found.core.busy:
            found.core.abort("its process is exiting")
        found.core.close()
    _communicators.clear()
