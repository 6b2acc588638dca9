"""How the ranks of a communicator come together, talk beside their transports, and part."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .. import _core
from .._channel import Notices, StoreChannel
from ..errors import ConfigError, MismatchError, TransportError
from ._stores import FileStore, PrefixStore, StoreServer, TcpStore, default_host, serve

_PARTING = 10.0  # seconds that rank 0 keeps the rendezvous for ranks that are not done yet
_HEARING = 3.0  # the same, for ranks that are to hear why this one gives up
_GREETING = 256  # bytes
_FORMS = (
    "'tcp://host:port', 'file:///folder', a pathlib.Path of a folder, or an mpi4py communicator"
)


class Meeting:
    """All ranks of one communicator, once each has come with its own rank and the same size."""

    def __init__(
        self, rank: int, world_size: int, rendezvous: Any, host: str | None, deadline: float
    ):
        self.rank, self.world_size = rank, world_size
        self._server: StoreServer | None = None
        self._store = self._open(rendezvous, deadline)
        own = self._store.own_host if isinstance(self._store, TcpStore) else default_host()
        self.host = host or own  # by which the other ranks reach this one
        self._notices = Notices(PrefixStore("notice", self._store))
        try:
            self._claim()
        except BaseException:
            self._close()
            raise
        try:
            self._compare(deadline)
        except BaseException as error:
            self.tell(str(error))
            self.leave(_HEARING)
            raise

    def channel(self, name: str, members: tuple[int, ...]) -> StoreChannel:
        """Of some ranks, this one among them. They hear of every rank that gives up."""
        store = PrefixStore(name, self._store)
        return StoreChannel(store, members.index(self.rank), len(members), members, self._notices)

    def tell(self, reason: str) -> None:
        """Why this rank gives up, for the others to hear."""
        self._notices.publish(f"rank {self.rank} gave up: {reason}")

    def leave(self, seconds: float = _PARTING) -> None:
        """Nothing is asked of it any more. Rank 0, which may keep it, waits for the others."""
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"left/{self.rank}", "")
            all_left = [f"left/{rank}" for rank in range(self.world_size)]
            until = time.monotonic() + seconds
            while self._server and not self._store.check(all_left) and time.monotonic() < until:
                time.sleep(0.01)
            if isinstance(self._store, FileStore) and self._store.check(all_left):
                self._store.remove()
        self._close()

    def _close(self) -> None:
        if isinstance(self._store, TcpStore):
            self._store.close()
        if self._server:
            self._server.stop()

    def _open(self, rendezvous: Any, deadline: float) -> FileStore | TcpStore:
        if hasattr(rendezvous, "Get_rank") and hasattr(rendezvous, "bcast"):
            return self._open_over_mpi(rendezvous, deadline)
        if isinstance(rendezvous, Path):
            return _folder(rendezvous)
        parts = urlsplit(rendezvous) if isinstance(rendezvous, str) else None
        if parts and parts.scheme == "file" and parts.path and not parts.netloc:
            return _folder(Path(parts.path))
        try:
            if parts and parts.scheme == "tcp" and parts.hostname and parts.port:
                return self._open_over_tcp(parts.hostname, parts.port, deadline)
        except ValueError:  # no port's number
            pass
        raise ConfigError(f"rendezvous = {rendezvous!r}; allowed: {_FORMS}")

    def _open_over_tcp(self, host: str, port: int, deadline: float) -> TcpStore:
        if self.rank == 0:
            self._server = serve(host, port)
        return TcpStore(host, port, deadline)

    def _open_over_mpi(self, comm: Any, deadline: float) -> TcpStore:
        found = comm.Get_rank(), comm.Get_size()
        if found != (self.rank, self.world_size):
            raise ConfigError(
                f"rank {self.rank} of {self.world_size}, but the MPI communicator has this process "
                f"as rank {found[0]} of {found[1]}: pass comm.Get_rank() and comm.Get_size()"
            )
        if self.rank == 0:
            self._server = serve(default_host(), 0)
        port = self._server.port if self._server else 0
        host, port = comm.bcast((default_host(), port), root=0)
        return TcpStore(host, port, deadline)

    def _claim(self) -> None:
        mine = f"{os.uname().nodename}:{os.getpid()}:{time.time_ns()}"
        try:
            kept = self._store.compare_set(f"rank/{self.rank}", "", mine)
        except (RuntimeError, OSError) as error:
            raise TransportError(f"rank {self.rank} lost the rendezvous: {error}") from error
        if kept != mine:
            raise ConfigError(
                f"rank {self.rank} came to this rendezvous already, as {kept} (host:process:time): "
                "each rank comes once, and each communicator needs a rendezvous of its own, as a "
                "fresh folder or a port"
            )

    def _compare(self, deadline: float) -> None:
        """Whether all ranks were told the same, once all have come."""
        mine = {"world_size": self.world_size, "version": _core.version.partition("+")[0]}
        everyone = self.channel("meeting", tuple(range(self.world_size)))
        found = everyone.exchange(json.dumps(mine).encode().ljust(_GREETING), 0, deadline)
        for rank in range(self.world_size):
            theirs = json.loads(found[rank * _GREETING :][:_GREETING])
            for field, value in mine.items():
                if theirs[field] != value:
                    raise MismatchError(
                        f"ranks were told a different {field}: rank {rank} has {theirs[field]}, "
                        f"rank {self.rank} has {value}. Make it equal on all ranks."
                    )


def _folder(path: Path) -> FileStore:
    try:
        return FileStore(path)
    except OSError as error:
        raise ConfigError(f"the rendezvous folder {path} cannot be made: {error}") from error
