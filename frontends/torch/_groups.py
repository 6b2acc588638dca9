"""One communicator per process group, made when it is first used."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _core
from .._config import Config, current_config
from .._policy import Policy
from ..errors import ClosedError, UnsupportedError

if TYPE_CHECKING:
    from ._hierarchy import Hierarchy
    from ._plain import PlainCall

_MOST_KEPT = 1024
_LAST_SECONDS = 10.0  # at exit, for what is still under way on a GPU
_STREAMS = 2  # of a communicator on a GPU: one collective begins while the one before ends


class GroupCommunicator:
    """The core's communicator of a process group on one device, and how often it was made anew."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        generation: int,
        deadline: float,
        config: Config,
    ):
        self.generation, self.device = generation, device
        self.policies: dict[Any, Policy] = {}  # of compression_type "auto"
        self.plain: dict[Any, PlainCall] = {}  # calls that went plain, as `remember` was told
        self.hierarchies: dict[Any, Hierarchy] = {}  # by their setting
        self._agreed: set[Any] = set()  # their kinds, which all ranks have compared
        self._failure: Exception | None = None  # of a hierarchical collective
        self._reported = False  # the failure, to a later caller
        self.streams: dict[int, torch.cuda.Stream] = {}
        self.deadline = deadline
        self.core = self.core_of(group, config)

    def core_of(
        self,
        group: dist.ProcessGroup,
        config: Config,
        members: Sequence[int] | None = None,
        name: str = "",
    ) -> Any:
        """The core's communicator of the group, or of some of its members; `name`: theirs alone."""
        if self.device.type == "cuda":
            from . import _nccl

            number = self.device.index or 0
            channel = _nccl.store_channel(group, self.generation, members, name)
            transport = _nccl.transport(channel, number, config, self.deadline)
            streams = self.new_streams()
            return _core.Communicator(transport, self.deadline, number, streams)
        from ._gloo import GlooTransport  # needs a torch built with distributed support

        gloo = GlooTransport(group, self.generation, self.deadline, members, name)
        return _core.Communicator(
            _core.external_transport(gloo.rank, gloo.size, gloo), self.deadline
        )

    def new_streams(self) -> list[int]:
        """torch's own: its allocator may ask for them long after this is gone."""
        made = [torch.cuda.Stream(self.device, priority=-1) for _ in range(_STREAMS)]
        self.streams |= {stream.cuda_stream: stream for stream in made}
        return [stream.cuda_stream for stream in made]

    @property
    def cores(self) -> list[Any]:
        """All communicators, in the order in which collectives pass them."""
        inner = [core for hierarchy in self.hierarchies.values() for core in hierarchy.cores]
        return [*dict.fromkeys(filter(None, inner)), self.core]

    def give_up(self, error: Exception) -> None:
        """After a failure between some of the ranks: ends what all communicators do."""
        if self._failure is None:
            self._failure = error
            for core in self.cores:
                core.abort(str(error))

    def check_open(self) -> None:
        """Raises `ClosedError` after a failure; on a GPU, where a failure is seen after the call
        returned, first the error itself."""
        closed = self.core.closed
        if not closed:
            return
        failure: Any = self._failure or self.core.failure
        if failure is not None and self.device.type != "cpu" and not self._reported:
            self._reported = True
            raise failure
        raise ClosedError(
            f"an earlier collective of this group failed: {closed}. Ranks may have failed at "
            "different calls: have all of them go back to one place (a checkpoint) and call "
            "cccl.torch.recover(group), or start them anew"
        )

    def agree(self, fields: dict[str, str]) -> None:
        """Compares what this rank is about to do with all ranks; `MismatchError`."""
        self.core.agree(fields).wait()

    def has_agreed(self, kind: Any) -> bool:
        """Whether `agree_once` has compared that kind."""
        return kind in self._agreed

    def agree_once(self, kind: Any, fields: Callable[[], dict[str, str]]) -> None:
        """Compares a call that goes plain at the first use of its kind. Ranks make the same calls,
        so they forget kinds, where there are too many, at the same one."""
        if kind in self._agreed:
            return
        self.agree(fields())
        if len(self._agreed) == _MOST_KEPT:
            self._agreed.clear()
            self.plain.clear()
        self._agreed.add(kind)

    def remember(self, key: Any, call: PlainCall) -> None:
        """Keeps a call whose kind was agreed."""
        if len(self.plain) == _MOST_KEPT:
            self.plain.clear()
        self.plain[key] = call


_communicators: weakref.WeakKeyDictionary[Any, dict[torch.device, GroupCommunicator]] = (
    weakref.WeakKeyDictionary()
)
_left_behind: weakref.WeakSet[Any] = weakref.WeakSet()  # groups from before a fork
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
    if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(f"group is a {type(group).__name__}, not a process group")
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else inside(group)


def inside(group: Any) -> Any:
    """The plain group inside one of backend "cccl", any other as it is; None: the default one."""
    group = dist.group.WORLD if group is None else group
    return getattr(group, "plain_group", group)


def existing(group: Any, device: torch.device) -> GroupCommunicator | None:
    """The open communicator of a group that has one on that device."""
    if not _communicators:
        return None
    group = inside(group)
    if not isinstance(group, dist.ProcessGroup):
        return None
    found = _communicators.get(group, {}).get(device)
    return None if found is None or found.core.closed else found


def communicator(
    group: dist.ProcessGroup, device: torch.device, config: Config
) -> GroupCommunicator:
    """Of `group` on a device. After a failure it raises, until `recover` is called."""
    if group in _left_behind:
        raise ClosedError(
            "this process group was made before a fork, and its connections are the parent's: use "
            "collectives in the parent, or call init_process_group in the child"
        )
    with _lock:
        devices = _communicators.setdefault(group, {})
        found = devices.get(device)
        if found is None:
            deadline = config.deadline or timeout_of(group)
            found = devices[device] = GroupCommunicator(group, device, 0, deadline, config)
    found.check_open()
    return found


def recover(group: dist.ProcessGroup | None = None, *, deadline: float | None = None) -> None:
    """Makes a group usable again after a failed collective. All its ranks must call it.

    It returns once all have; what they call next is matched from there. `deadline`: seconds to
    wait for them, by default the group's timeout. Raises `TransportError` if one does not come.
    """
    group = resolve(group)
    if group is None:
        return
    limit = deadline or timeout_of(group)
    with _lock:
        old = dict(_communicators.get(group, {})) or {_device_of(group): None}
        fresh = {
            device: GroupCommunicator(
                group, device, found.generation + 1 if found else 1, limit, current_config()
            )
            for device, found in old.items()
        }
        _communicators[group] = fresh
    del old  # outside the lock: its thread may be waiting for it
    for device in sorted(fresh, key=str):
        fresh[device].agree({"collective": "recover"})


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where its collectives are, if only one kind of device has a backend; else the CPU."""
    kinds = {device.type for device in getattr(group, "_device_types", [])}
    if kinds == {"cuda"}:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that its collectives may take."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
            return float(options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return 1800.0


def _forget_in_fork() -> None:
    """A fork has none of the threads that communicators and gloo need: they are never touched."""
    global _lock
    _lock = threading.Lock()
    for group, devices in list(_communicators.items()):
        _left_behind.add(group)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(devices))
    _communicators.clear()


os.register_at_fork(after_in_child=_forget_in_fork)


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: the communicators' threads call into Python."""
    for found in [one for devices in _communicators.values() for one in devices.values()]:
        for core in found.cores:
            if found.device.type != "cpu":  # where the last collective's end is seen a little later
                until = time.monotonic() + _LAST_SECONDS
                while core.busy and time.monotonic() < until:
                    time.sleep(0.001)
            if core.busy:
                core.abort("its process is exiting")
            core.close()
    _communicators.clear()
