"""Bytes over gloo: a private process group on the caller's store, for sends and receives only."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .._channel import Notices
from .._host import haste, memory_at
from ..errors import DeadlineError, PeerAbortedError, TransportError


class GlooTransport:
    """The `external` transport of one group. All methods but `abort` run on one thread.

    It is no part of the caller's group: connections of its own, made when all members first use
    it, so that its messages and failures never mix with theirs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        generation: int,
        seconds: float,
        members: Sequence[int] | None = None,
        name: str = "",
    ):
        """`members`: the ranks of the group that it joins, all if None; `name`: theirs alone."""
        self._names = range(group.size()) if members is None else members
        self.rank, self.size = self._names.index(group.rank()), len(self._names)
        self._seconds = seconds
        self._store = dist.PrefixStore(f"cccl/{generation}", group.get_group_store())
        self._notices = Notices(self._store)  # the whole group's
        if name:
            self._store = dist.PrefixStore(name, self._store)
        self._gloo: Any = None
        self._works: dict[int, tuple[Any, int]] = {}
        self._last = 0

    def post(self, transfers: list[tuple[bool, int, int, int, int]]) -> list[int]:
        """Starts transfers (sends, address, bytes, peer, tag); returns a number for each."""
        gloo, numbers = self._connected(), []
        haste.begin(self)
        for sends, address, nbytes, peer, tag in transfers:
            start = gloo.send if sends else gloo.recv
            try:
                work = start([_view(address, nbytes)], peer, tag)
            except RuntimeError as error:
                raise self._failure(error, peer) from error
            self._last += 1
            self._works[self._last] = (work, peer)
            numbers.append(self._last)
        return numbers

    def wait(self, requests: list[int], seconds: float) -> None:
        """Until all are done; each may take `seconds`."""
        limit = timedelta(seconds=seconds)
        for request in requests:
            work, peer = self._works.pop(request)
            try:
                work.wait(limit)
            except RuntimeError as error:
                raise self._failure(error, peer, seconds) from error
        if not self._works:
            haste.end(self)

    def abort(self, reason: str) -> None:
        """Tells the other ranks why, then closes all connections: every wait there fails."""
        haste.end(self)
        self._notices.publish(f"rank {self._names[self.rank]} gave up: {reason}")
        if self._gloo is None:
            return
        # gloo closes every pair of a context in which a wait times out; its abort() does not. On a
        # pair that is closed already a wait fails at once and closes nothing: try the next peer.
        byte = torch.empty(1, dtype=torch.uint8)
        for d in range(1, self.size):
            with contextlib.suppress(RuntimeError):
                peer = (self.rank + d) % self.size
                self._gloo.recv([byte], peer, 0).wait(timedelta(milliseconds=1))

    def _connected(self) -> Any:
        if self._gloo is None:
            limit = timedelta(seconds=self._seconds)
            try:
                self._gloo = c10d.ProcessGroupGloo(self._store, self.rank, self.size, limit)
            except RuntimeError as error:
                late = "imed out" in str(error) or "imeout" in str(error)
                kind = DeadlineError if late else TransportError
                raise kind(
                    f"rank {self._names[self.rank]} could not connect to the other "
                    f"{self.size - 1} ranks of its group (limit {self._seconds:g} s): each must "
                    f"make the same call. {error}"
                ) from error
        return self._gloo

    def _failure(
        self, error: RuntimeError, peer: int, seconds: float | None = None
    ) -> TransportError:
        me, other = self._names[self.rank], self._names[peer]
        timed_out = seconds is not None and "Timed out waiting" in str(error)
        notice = self._notices.read(wait=not timed_out)
        if notice:
            return PeerAbortedError(notice)
        if timed_out:
            return DeadlineError(f"rank {me} waited {seconds:g} s for rank {other}")
        return TransportError(f"rank {me} lost its connection to rank {other}: {error}")


def _view(address: int, nbytes: int) -> torch.Tensor:
    """Pool memory as a tensor."""
    return torch.frombuffer(memory_at(address, nbytes), dtype=torch.uint8)
