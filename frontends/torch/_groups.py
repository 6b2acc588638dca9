"""One communicator per process group, made when it is first used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _core
from .._channel import Notices, StoreChannel
from .._config import Config, current_config
from .._members import Members, Registry
from ..errors import UnsupportedError

_AVAILABLE = dist.is_available()
_STREAMS = 2  # of a communicator on a GPU: one collective begins while the one before ends


class GroupCommunicator(Members):
    """The core's communicator of a process group on one device, and how often it was made anew."""

    way_back = (
        "have all of them go back to one place (a checkpoint) and call cccl.torch.recover(group), "
        "or start them anew"
    )

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        generation: int,
        deadline: float,
        config: Config,
    ):
        super().__init__(on_gpu=device.type != "cpu")
        self.generation, self.device = generation, device
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
            number = self.device.index or 0
            channel = store_channel(group, self.generation, members, name)
            transport = channel.nccl(number, config, self.deadline)
            return _core.Communicator(transport, self.deadline, number, self.new_streams())
        from ._gloo import GlooTransport  # needs a torch built with distributed support

        gloo = GlooTransport(group, self.generation, self.deadline, members, name)
        return _core.Communicator(
            _core.external_transport(gloo.rank, gloo.size, gloo), self.deadline
        )

    def forget_kinds(self) -> None:
        super().forget_kinds()
        plain_calls.forget(self.core)

    def new_streams(self) -> list[int]:
        """torch's own: its allocator may ask for them long after this is gone."""
        made = [torch.cuda.Stream(self.device, priority=-1) for _ in range(_STREAMS)]
        self.streams |= {stream.cuda_stream: stream for stream in made}
        return [stream.cuda_stream for stream in made]


_groups: Registry[GroupCommunicator] = Registry()
plain_calls: Any = None  # of a kind that their group's ranks have compared
if _AVAILABLE:
    plain_calls = _core.PlainCalls(torch.Tensor, torch.strided, dist.group)
    os.register_at_fork(after_in_child=plain_calls.clear)
find_plain = plain_calls.find if _AVAILABLE else lambda *_: None


def store_channel(
    group: dist.ProcessGroup, generation: int, members: Sequence[int] | None = None, name: str = ""
) -> StoreChannel:
    """Of a group's members, or some of them, beside NCCL; `name` is theirs alone."""
    names = range(group.size()) if members is None else members
    store = dist.PrefixStore(f"cccl/{generation}/nccl", group.get_group_store())
    own = dist.PrefixStore(name, store) if name else store
    return StoreChannel(own, names.index(group.rank()), len(names), names, Notices(store))


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


def existing(group: Any, device: torch.device) -> tuple[GroupCommunicator | None, Any]:
    """The open communicator of a group that has one on that device, and the plain group."""
    if not _AVAILABLE:
        return None, None
    group = dist.group.WORLD if group is None else group
    if (recalled := _groups.recall(group, device)) is not None:
        return recalled
    plain = inside(group)
    found = _groups.find(plain, device) if isinstance(plain, dist.ProcessGroup) else None
    if found is not None:
        _groups.remember(group, device, found, plain)
    return found, plain


def communicator(
    group: dist.ProcessGroup, device: torch.device, config: Config
) -> GroupCommunicator:
    """Of `group` on a device. After a failure it raises, until `recover` is called."""
    found, _ = existing(group, device)
    if found is not None:
        return found

    def make() -> GroupCommunicator:
        return GroupCommunicator(group, device, 0, config.deadline or timeout_of(group), config)

    return _groups.get(group, device, make)


def recover(group: dist.ProcessGroup | None = None, *, deadline: float | None = None) -> None:
    """Makes a group usable again after a failed collective. All its ranks must call it.

    It returns once all have; what they call next is matched from there. `deadline`: seconds to
    wait for them, by default the group's timeout. Raises `TransportError` if one does not come.
    """
    group = resolve(group)
    if group is None:
        return
    limit = deadline or timeout_of(group)

    def make(device: torch.device, old: GroupCommunicator | None) -> GroupCommunicator:
        generation = old.generation + 1 if old else 1
        return GroupCommunicator(group, device, generation, limit, current_config())

    plain_calls.clear()  # of a healthy group too, whose old communicator may still be open
    _groups.renew(group, _device_of(group), make)


def generation_of(group: Any) -> int:
    """How often `recover` made it anew."""
    found = _groups.by_group.get(inside(group), {})
    return max((one.generation for one in found.values()), default=0)


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
