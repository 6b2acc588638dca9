"""Bytes over NCCL: its ranks reach each other beside it through the group's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from .. import _core
from .._channel import Notices, StoreChannel
from .._config import Config


def store_channel(
    group: dist.ProcessGroup, generation: int, members: Sequence[int] | None = None, name: str = ""
) -> StoreChannel:
    """Of a group's members, or some of them, beside NCCL; `name` is theirs alone."""
    names = range(group.size()) if members is None else members
    store = dist.PrefixStore(f"cccl/{generation}/nccl", group.get_group_store())
    own = dist.PrefixStore(name, store) if name else store
    return StoreChannel(own, names.index(group.rank()), len(names), names, Notices(store))


def transport(channel: StoreChannel, device: int, config: Config, seconds: float) -> Any:
    """The NCCL transport of a channel's ranks, which connects when it is first used."""
    return _core.nccl_transport(
        channel.rank, channel.size, device, config.nccl_lanes, config.nccl_max_ctas, seconds,
        channel,
    )  # fmt: skip
