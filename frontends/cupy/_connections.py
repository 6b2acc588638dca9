"""The core's communicators: one of all ranks, and one for each way between two of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import _core, _nccl
from .._calls import check_built_for_gpu
from .._channel import StoreChannel
from .._config import Config
from .._members import Members
from ..errors import MismatchError, UnsupportedError
from ._arrays import cupy
from ._meeting import Meeting
from ._sockets import SocketTransport

Way = tuple[int, int] | None  # from a rank to another; None: all ranks together

_KIND = 64  # bytes
_STREAMS = 2  # on a GPU: one collective begins while the one before ends
_streams: list[Any] = []  # of all connections: the core's memory goes back on them at its end


class Connection(Members):
    """Some ranks on one kind of device, over NCCL on GPUs and over sockets on CPUs."""

    def __init__(
        self, channel: StoreChannel, host: str, device: int | None, config: Config, deadline: float
    ):
        super().__init__(on_gpu=device is not None)
        self.device = device
        self._sockets: SocketTransport | None = None
        if device is None:
            self._sockets = SocketTransport(channel, host, deadline)
            transport = _core.external_transport(channel.rank, channel.size, self._sockets)
            self.core = _core.Communicator(transport, deadline)
            return
        _nccl.load_wheel()
        transport = channel.nccl(device, config, deadline)
        with cupy().cuda.Device(device):
            make = cupy().cuda.Stream
            streams = [make(non_blocking=True, priority=-1) for _ in range(_STREAMS)]
        _streams.extend(streams)
        handles = [stream.ptr for stream in streams]
        self.core = _core.Communicator(transport, deadline, device, handles)

    def close(self) -> None:
        """Finishes what was submitted; after a failure it has failed by now."""
        self.core.close()
        if self._sockets is not None:
            self._sockets.close()


class Connections:
    """Of one communicator, made when they are first used: that waits for the other ranks."""

    def __init__(self, meeting: Meeting, deadline: float):
        self._meeting, self._deadline = meeting, deadline
        self._made: dict[tuple[Way, bool], Connection] = {}
        self._device: int | None = None

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._made.values()))

    def get(self, way: Way, device: int | None, config: Config) -> Connection:
        """Of all ranks, or from one to another, for arrays on a GPU or, if it is None, on the CPU.

        Raises `UnsupportedError` for a second GPU.
        """
        found = self._made.get((way, device is not None))
        if found is None:
            return self._make(way, device, config)
        if found.device != device:
            self._refuse(device)
        return found

    def _make(self, way: Way, device: int | None, config: Config) -> Connection:
        if device is not None:
            check_built_for_gpu(f"an array is on GPU {device}")
            if self._device not in (None, device):
                self._refuse(device)
            self._device = device
        members = way or tuple(range(self._meeting.world_size))
        name = "-".join(map(str, way)) if way else "all"
        turn = sum(known == way for known, _ in self._made)
        kind = "NumPy" if device is None else "CuPy"
        self._compare(self._meeting.channel(f"{name}/{turn}/kind", members), kind)
        channel = self._meeting.channel(f"{name}/{turn}", members)
        made = Connection(channel, self._meeting.host, device, config, self._deadline)
        self._made[way, device is not None] = made
        return made

    def _compare(self, channel: StoreChannel, kind: str) -> None:
        found = channel.exchange(kind.encode().ljust(_KIND), 0, self._deadline)
        kinds = [found[i : i + _KIND].decode().strip() for i in range(0, len(found), _KIND)]
        if len(set(kinds)) > 1:
            held = ", ".join(
                f"rank {name} has {kind}'s" for name, kind in zip(channel.names, kinds, strict=True)
            )
            raise MismatchError(
                f"ranks called a first collective with arrays of different libraries: {held}. "
                "Make it equal on all ranks."
            )

    def _refuse(self, device: int | None) -> None:
        raise UnsupportedError(
            f"an array is on GPU {device}, and this communicator began on GPU {self._device}: a "
            "rank has one GPU. Copy the array there, or make a communicator of its own"
        )
