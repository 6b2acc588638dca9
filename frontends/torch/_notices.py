"""Why a rank gave up, told to the others through the rendezvous store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_KEY = "abort"
_PATIENCE = 2.0  # seconds; a rank that fails closes its connections just before it can say why
_ANSWER = 1.0  # seconds that the store may take for one request


class Notices:
    """One notice per communicator: the first rank that gives up writes it.

    The store may be out of reach when it is needed (its host may be the rank that died), so no
    call waits for it longer than a few seconds.
    """

    def __init__(self, store: dist.Store):
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
        text: bytes = self._store.get(_KEY)
        return text.decode()


def _bounded(call: Callable[[], Any], seconds: float) -> Any:
    """The result of `call`, or None if it fails or takes too long."""
    result: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            result.append(call())

    thread = threading.Thread(target=run, name="cccl-notice", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None
