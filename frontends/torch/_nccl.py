"""Bytes over NCCL: its ranks reach each other beside it through the group's store."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .. import _core
from .._channel import StoreChannel
from .._config import Config


def store_channel(group: dist.ProcessGroup, generation: int) -> StoreChannel:
    """Of a group's members, beside NCCL."""
    store = dist.PrefixStore(f"cccl/{generation}/nccl", group.get_group_store())
    return StoreChannel(store, group.rank(), group.size())


def transport(
    group: dist.ProcessGroup, generation: int, device: int, config: Config, seconds: float
) -> Any:
    """The NCCL transport of a group, which connects when it is first used."""
    channel = store_channel(group, generation)
    return _core.nccl_transport(
        channel.rank, channel.size, device, config.nccl_lanes, config.nccl_max_ctas, seconds,
        channel,
    )  # fmt: skip
