"""How ranks reach each other beside their transport: through a rendezvous store of any frontend."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from . import _core
from .errors import ClosedError, DeadlineError, Error, PeerAbortedError, TransportError

if TYPE_CHECKING:
    from ._config import Config

_KEY = "abort"
_PATIENCE = 2.0  # seconds; a rank that fails closes its connections just before it can say why
_ANSWER = 1.0  # seconds that the store may take for one request
_LONGEST_PAUSE = 0.02  # seconds between two questions to the store
_LISTEN_EVERY = 2.0  # seconds between two looks for a rank that gave up
_OUT_OF_REACH = (RuntimeError, OSError)  # what a store raises that cannot be asked


class Store(Protocol):
    """What is asked of a store: the part of torch.distributed.Store that is used. Values are text,
    and come back as text or bytes."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> Any: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> Any: ...
    def delete_key(self, key: str, /) -> Any: ...


class Notices:
    """Why a rank gave up. One notice per communicator: the first that gives up writes it.

    The store may be out of reach when it is needed (its host may be the rank that died), so no
    call waits for it longer than a few seconds.
    """

    def __init__(self, store: Store):
        self._store = store

    def publish(self, text: str) -> None:
        """Tells all ranks, unless another has already."""
        _bounded(lambda: self._store.compare_set(_KEY, "", text), _ANSWER)

    def read(self, *, wait: bool) -> str:
        """What another rank told; "" if nothing. `wait`: one is expected any moment."""
        patience = _PATIENCE if wait else 0.0
        return _bounded(lambda: self._poll(patience), patience + _ANSWER) or ""

    def _poll(self, patience: float) -> str:
        until = time.monotonic() + patience
        while not self._store.check([_KEY]):
            if time.monotonic() >= until:
                return ""
            time.sleep(0.02)
        return _text(self._store.get(_KEY))


class StoreChannel:
    """What `_core.nccl_transport` needs of a frontend. Its methods are called from any thread."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        names: Sequence[int] | None = None,
        notices: Notices | None = None,
    ):
        """`names`: what ranks are called in messages; `notices`: shared with other channels."""
        self.rank, self.size = rank, size
        self.names = range(size) if names is None else names
        self._store = store
        self._notices = notices or Notices(store)
        self._mine: deque[str] = deque()

    def nccl(self, device: int, config: Config, seconds: float) -> Any:
        """The NCCL transport of its ranks, which connects when it is first used."""
        return _core.nccl_transport(
            self.rank, self.size, device, config.nccl_lanes, config.nccl_max_ctas,
            config.peer_memory == "auto", seconds, self,
        )  # fmt: skip

    def exchange(self, mine: bytes, number: int, seconds: float) -> bytes:
        """What all ranks pass, in their order."""
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            # As strings of digits: a store's values in Python are text or bytes by version.
            self._store.set(keys[self.rank], mine.hex())
            self._await(keys, seconds)
            found = [bytes.fromhex(_text(self._store.get(key))) for key in keys]
            # Who has this exchange's keys has read those of the last, so all read the one before.
            self._mine.append(keys[self.rank])
            if len(self._mine) > 2:
                self._store.delete_key(self._mine.popleft())
        except Error:
            raise
        except _OUT_OF_REACH as error:
            raise TransportError(
                f"rank {self.names[self.rank]} lost the rendezvous store of its group: {error}"
            ) from error
        return b"".join(found)

    def tell(self, reason: str) -> None:
        """Why this rank gives up, for the others to hear."""
        self._notices.publish(f"rank {self.names[self.rank]} gave up: {reason}")

    def heard(self, wait: bool) -> str:
        """Why another rank gave up; "" if none did. `wait`: one is expected any moment."""
        notice = self._notices.read(wait=wait)
        return "" if notice.startswith(f"rank {self.names[self.rank]} ") else notice

    def _await(self, keys: list[str], seconds: float) -> None:
        until, pause, listens = time.monotonic() + seconds, 1e-4, time.monotonic() + _LISTEN_EVERY
        while not self._store.check(keys):
            now = time.monotonic()
            if now > min(until, listens):
                listens = now + _LISTEN_EVERY
                if notice := self._notices.read(wait=False):
                    raise (PeerAbortedError if self.heard(False) else ClosedError)(notice)
            if now > until:
                late = [
                    str(name)
                    for name, key in zip(self.names, keys, strict=True)
                    if not self._store.check([key])
                ]
                raise DeadlineError(
                    f"rank {self.names[self.rank]} waited {seconds:g} s for rank "
                    f"{', '.join(late)} of its group: each must make the same call"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else bytes(value).decode()


def _bounded(call: Callable[[], Any], seconds: float) -> Any:
    """The result of `call`, or None if it fails or takes too long."""
    result: list[Any] = []

    def run() -> None:
        with contextlib.suppress(*_OUT_OF_REACH):
            result.append(call())

    thread = threading.Thread(target=run, name="cccl-notice", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
