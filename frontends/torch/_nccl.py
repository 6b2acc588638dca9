"""Bytes over NCCL: how its ranks reach each other beside it, through the group's store."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import _core
from .._config import Config
from ..errors import DeadlineError, PeerAbortedError, TransportError
from ._notices import Notices

_LONGEST_PAUSE = 0.02  # seconds between two questions to the store


class StoreChannel:
    """What `_core.nccl_transport` needs of a frontend. Its methods are called from any thread."""

    def __init__(self, group: dist.ProcessGroup, generation: int):
        self.rank, self.size = group.rank(), group.size()
        store = c10d._get_process_group_store(group)
        self._store = dist.PrefixStore(f"cccl/{generation}/nccl", store)
        self._notices = Notices(self._store)
        self._mine: deque[str] = deque()

    def exchange(self, mine: bytes, number: int, seconds: float) -> bytes:
        """What all ranks pass, in their order."""
        keys = [f"{number}/{rank}" for rank in range(self.size)]
        try:
            # As strings of digits: a store's values in Python are text or bytes by version.
            self._store.set(keys[self.rank], mine.hex())
            self._await(keys, seconds)
            found = [bytes.fromhex(bytes(self._store.get(key)).decode()) for key in keys]
            # Who has this exchange's keys has read those of the last, so all read the one before.
            self._mine.append(keys[self.rank])
            if len(self._mine) > 2:
                self._store.delete_key(self._mine.popleft())
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank} lost the rendezvous store of its group: {error}"
            ) from error
        return b"".join(found)

    def tell(self, reason: str) -> None:
        """Why this rank gives up, for the others to hear."""
        self._notices.publish(f"rank {self.rank} gave up: {reason}")

    def heard(self, wait: bool) -> str:
        """Why another rank gave up; "" if none did. `wait`: one is expected any moment."""
        notice = self._notices.read(wait=wait)
        return "" if notice.startswith(f"rank {self.rank} ") else notice

    def _await(self, keys: list[str], seconds: float) -> None:
        until, pause = time.monotonic() + seconds, 1e-4
        while not self._store.check(keys):
            if time.monotonic() > until:
                notice = self.heard(False)
                if notice:
                    raise PeerAbortedError(notice)
                late = [str(r) for r, key in enumerate(keys) if not self._store.check([key])]
                raise DeadlineError(
                    f"rank {self.rank} waited {seconds:g} s for rank {', '.join(late)} of its "
                    "group: each must make the same call"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def transport(
    group: dist.ProcessGroup, generation: int, device: int, config: Config, seconds: float
) -> Any:
    """The NCCL transport of a group, which connects when it is first used."""
    channel = StoreChannel(group, generation)
    return _core.nccl_transport(
        channel.rank, channel.size, device, config.nccl_lanes, config.nccl_max_ctas, seconds,
        channel,
    )  # fmt: skip
