"""all_reduce, reduce_scatter, all_gather and broadcast of tensors, compressed or plain."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._config import Config
from .._state import Memory
from ._call import send

_BY_LABEL = Memory()  # what error feedback keeps


def all_reduce(
    tensor: torch.Tensor,
    op: Any = "avg",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: Config | dict[str, Any] | None = None,
    label: str | None = None,
) -> Any:
    """Reduces `tensor` over all ranks, in place; every rank gets the same bits.

    Args:
        tensor: CPU tensor of any shape. float32, float16, bfloat16, float64 and complex are
            compressed as `config` says; integers and bools go plain.
        op: "avg", "sum", or a `torch.distributed.ReduceOp` (those other than AVG and SUM go plain).
        group: process group; None for the default one.
        async_op: return a `Work` at once instead of waiting.
        config: settings of this call; None for those of `cccl.configure`.
        label: the row of `cccl.stats()` that counts it, and the tensor's name: error feedback adds
            to it what earlier calls with this label lost. Without one there is no feedback.

    Returns None, or a `Work` if `async_op`; None for a rank outside the group, as in c10d.

    Raises:
        UnsupportedError: device, layout or dtype that cannot be sent, before anything is.
        MismatchError, DeadlineError, PeerAbortedError, TransportError: the collective failed, on
            every rank; the tensor is then NaN, or as it was if the error says that the call did
            not begin, since an earlier one had failed.
        NotCompressedError: strict mode, and it would have gone plain.
    """
    return send(
        "all_reduce", tensor, tensor, op, group, async_op, config, label or "all_reduce",
        memory=_BY_LABEL if label else None,
    )  # fmt: skip


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = "avg",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: Config | dict[str, Any] | None = None,
    label: str | None = None,
) -> Any:
    """Reduces `input` over all ranks and leaves each rank its part in `output`.

    `input` has world_size times the values of `output`. Else as `all_reduce`.
    """
    return send(
        "reduce_scatter", input, output, op, group, async_op, config, label or "reduce_scatter",
        memory=_BY_LABEL if label else None,
    )  # fmt: skip


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: Config | dict[str, Any] | None = None,
    label: str = "all_gather",
) -> Any:
    """Concatenates every rank's `input` in `output`, in rank order.

    Plain or lossless, as `weights_type` says, unless `collective_filter` names it: weights should
    not lose bits unasked. `output` has world_size times the values of `input`. Else as
    `all_reduce`.
    """
    return send("all_gather", input, output, "sum", group, async_op, config, label)


def broadcast(
    tensor: torch.Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: Config | dict[str, Any] | None = None,
    label: str = "broadcast",
) -> Any:
    """Sends `tensor` of the global rank `src` to all, in place; compressed, the source too gets
    the decoded values. Plain or lossless, as `weights_type` says, unless `collective_filter` names
    it. Else as `all_reduce`.
    """
    return send("broadcast", tensor, tensor, "sum", group, async_op, config, label, src)
