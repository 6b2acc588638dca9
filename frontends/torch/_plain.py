"""Collectives that go plain: the backend's own calls, and what is known of those made before."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._calls import PlainRow
from .._policy import Between
from ..errors import ConfigError
from ._streams import current_stream
from ._work import is_capturing

if TYPE_CHECKING:
    from ._call import Call

OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM} if dist.is_available() else {}
_RedOpType = dist.ReduceOp.RedOpType if dist.is_available() else None
# Dtypes that gloo moves only as bytes.
_BYTES_TO_GLOO = {
    getattr(torch, name)
    for name in ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
    if hasattr(torch, name)
}


def is_known(op: Any) -> bool:
    """Whether it tells all by itself: a PREMUL_SUM is equal to one with another factor."""
    return type(op) is _RedOpType


def reduce_op(op: Any) -> Any:
    """c10d's, of a name or of any way to write it; raises `ConfigError`."""
    if isinstance(op, str) and op in OPS:
        return OPS[op]
    if is_known(op):
        return op
    if not isinstance(op, dist.ReduceOp):
        raise ConfigError(f"op = {op!r}; allowed: 'avg', 'sum' or a torch.distributed.ReduceOp")
    kind, factor = parts_of(op)
    return kind if factor is None else op


def parts_of(op: Any) -> tuple[Any, Any]:
    """Kind and factor of a ReduceOp, which tells that of PREMUL_SUM to pickle only."""
    kind, factor = op.__getstate__()
    return kind, factor


def name_of(op: Any) -> str:
    """The same on all ranks, whose factors may differ."""
    return str((op if is_known(op) else parts_of(op)[0]).name).lower()


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes where gloo does not know the dtype; for collectives that only move values."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.dtype in _BYTES_TO_GLOO else tensor


def _all_reduce(_: Any, output: torch.Tensor, op: Any, __: int, group: Any, later: bool) -> Any:
    if output.is_complex():
        return dist.all_reduce(output, op, group, later)
    return _reduce(output, _options(op, later), group or dist.group.WORLD)


def _reduce(output: torch.Tensor, options: Any, group: Any) -> Any:
    """What dist.all_reduce does for tensors that are not complex, in half of the time."""
    work = group.allreduce([output], options)
    if options.asyncOp:
        return work
    if work is not None:  # NCCL has made the current stream wait already
        work.wait()
    return None


def _options(op: Any, later: bool) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, later
    return options


def _reduce_scatter(
    input: torch.Tensor, output: torch.Tensor, op: Any, _: int, group: Any, later: bool
) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(output, input, op, group, later)


def _all_gather(
    input: torch.Tensor, output: torch.Tensor, _: Any, __: int, group: Any, later: bool
) -> Any:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(_movable(output), _movable(input), group, later)


def _broadcast(_: Any, output: torch.Tensor, __: Any, src: int, group: Any, later: bool) -> Any:
    return dist.broadcast(_movable(output), src, group, later)


# (input, output, op, src, group, async_op) -> what c10d returns; flat or sparse tensors.
BACKEND = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
}


class PlainCall(PlainRow):
    """How a call goes plain: all but its tensors and its group, which it must not keep alive."""

    def __init__(self, call: Call, reason: str):
        numel, nbytes = call.input.numel(), call.input.numel() * call.input.element_size()
        dtype = str(call.input.dtype).removeprefix("torch.")
        super().__init__(
            call.label, call.collective, dtype, reason, call.size, numel, nbytes, call.choice,
            call.policy,
        )  # fmt: skip
        self._op, self._src = call.op, call.src
        self._backend = BACKEND[call.collective]
        reduces = call.collective == "all_reduce" and not call.input.is_complex()
        self._options = _options(call.op, False) if reduces else None

    def send(self, input: torch.Tensor, output: torch.Tensor, group: Any, async_op: bool) -> Any:
        """Has the backend carry it; returns what c10d returns."""
        policy = self._policy  # asked here too: most calls then need no clock, nor a call for one
        clock = self.clock(input) if policy is not None and policy.watches else None
        begun = time.perf_counter()
        try:
            if self._options is None or async_op:
                result = self._backend(input, output, self._op, self._src, group, async_op)
            else:
                result = _reduce(output, self._options, group)
        except RuntimeError as error:
            raise self.refusal(error, f"{input.dtype} with {self._op}") from error
        # On a GPU the host knows only that it began.
        self.record(time.perf_counter() - begun, whole=not (async_op or input.is_cuda),
                    clock=clock, work=result if async_op else None)  # fmt: skip
        return result

    def clock(self, tensor: torch.Tensor) -> Between | None:
        """For `record`, of a call that begins now, where its time on a GPU is wanted."""
        policy, device = self._policy, tensor.device
        if policy is None or not (tensor.is_cuda and policy.watches) or is_capturing(tensor):
            return None
        return Between(lambda: _event_on(device), policy.latest)


def _event_on(device: torch.device) -> torch.cuda.Event:
    event: Any = torch.cuda.Event(enable_timing=True)
    return current_stream(device).record_event(event)
