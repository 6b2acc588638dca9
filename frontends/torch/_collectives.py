"""all_reduce, reduce_scatter, all_gather and broadcast of tensors, compressed or plain."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import _core
from .._arrays import DTYPES, DType
from .._config import Config, current_config
from .._stats import plain_bytes
from ..errors import ConfigError, NotCompressedError, UnsupportedError
from ._groups import communicator, resolve
from ._work import Work

_DTYPES: dict[torch.dtype, DType] = {
    getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)
}
_OPS = {"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM} if dist.is_available() else {}


def all_reduce(
    tensor: torch.Tensor,
    op: Any = "avg",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: Config | dict[str, Any] | None = None,
    label: str = "all_reduce",
) -> Any:
    """Reduces `tensor` over all ranks, in place; every rank gets the same bits.

    Args:
        tensor: CPU tensor of any shape. float32, float16, bfloat16, float64 and complex are
            compressed as `config` says; integers and bools go plain.
        op: "avg", "sum", or a `torch.distributed.ReduceOp` (those other than AVG and SUM go plain).
        group: process group; None for the default one.
        async_op: return a `Work` at once instead of waiting.
        config: settings of this call; None for those of `cccl.configure`.
        label: the row of `cccl.stats()` that counts it.

    Returns None, or a `Work` if `async_op`; None for a rank outside the group, as in c10d.

    Raises:
        UnsupportedError: device, layout or dtype that cannot be sent, before anything is.
        MismatchError, DeadlineError, PeerAbortedError, TransportError: the collective failed, on
            every rank; the tensor is then NaN.
        NotCompressedError: strict mode, and it would have gone plain.
    """
    call = Call("all_reduce", tensor, tensor, op, group, config, label)
    return call.run(async_op, lambda: dist.all_reduce(tensor, call.op, call.group, async_op))


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = "avg",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    config: Config | dict[str, Any] | None = None,
    label: str = "reduce_scatter",
) -> Any:
    """Reduces `input` over all ranks and leaves each rank its part in `output`.

    `input` has world_size times the values of `output`. Else as `all_reduce`.
    """
    call = Call("reduce_scatter", input, output, op, group, config, label)
    plain = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call.run(async_op, lambda: plain(output, input, call.op, call.group, async_op))


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

    Plain unless `collective_filter` names it: weights should not lose bits unasked. `output` has
    world_size times the values of `input`. Else as `all_reduce`.
    """
    call = Call("all_gather", input, output, "sum", group, config, label)
    plain = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call.run(async_op, lambda: plain(output, input, call.group, async_op))


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
    the decoded values. Plain unless `collective_filter` names it. Else as `all_reduce`.
    """
    call = Call("broadcast", tensor, tensor, "sum", group, config, label, src)
    return call.run(async_op, lambda: dist.broadcast(tensor, src, call.group, async_op))


class Call:
    """One collective: what is known before it is sent either way."""

    def __init__(
        self,
        collective: str,
        input: torch.Tensor,
        output: torch.Tensor,
        op: Any,
        group: dist.ProcessGroup | None,
        config: Any,
        label: str,
        src: int = 0,
    ):
        self.collective, self.label = collective, label
        self.input, self.output = input.detach(), output.detach()
        self.config = current_config() if config is None else Config.load(config)
        self.group = resolve(group)
        self.op = _reduce_op(op)
        if self.group is None:
            return
        self.size = self.group.size()
        self.root = dist.get_group_rank(self.group, src) if collective == "broadcast" else 0
        self._check()

    def run(self, async_op: bool, plain: Callable[[], Any]) -> Any:
        """Sends it compressed or, for a reason that is counted, with `plain`."""
        if self.group is None:
            return None
        expected, reason = self.why_plain()
        if reason:
            self.permit_plain(expected, reason)
            begun = time.perf_counter()
            result = plain()
            self.record_plain(reason, time.perf_counter() - begun)
            return result
        work = self.submit()
        if async_op:
            return work
        work.wait()
        return None

    def submit(self, *, future_raises: bool = True) -> Work:
        """Sends it compressed. After a failure the work's future raises, or holds the NaN."""
        assert self.group is not None
        codecs = self.config.codecs
        assert codecs is not None
        work = Work(self.output)
        source, target = _real(self.input), _real(self.output)
        sent = source if source.is_contiguous() else source.contiguous()
        received = target
        if target.data_ptr() == source.data_ptr() and target.shape == source.shape:
            received = sent  # in place
        elif not target.is_contiguous():
            received = torch.empty_like(target, memory_format=torch.contiguous_format)
        dtype = _DTYPES[sent.dtype]
        gathered = self.collective in ("reduce_scatter", "all_gather")
        part = min(sent.numel(), received.numel())

        def finish(error: Exception | None) -> None:
            if received.data_ptr() != target.data_ptr():
                target.copy_(received)
            if error is not None and future_raises:
                work._future.set_exception(error)
            else:
                work._future.set_result(self.output)

        work._core = communicator(self.group, self.config).core.submit(
            self.collective, sent.data_ptr(), sent.numel(), received.data_ptr(), received.numel(),
            dtype.number, *codecs, average=self.op == dist.ReduceOp.AVG, root=self.root,
            counts=[part] * self.size if gathered else [],
            chunk_bytes=self.config.chunk_bytes, window=self.config.window_chunks,
            algorithm=self.config.algorithm, seed=self.config.seed,
            checksum=self.config.checksum, raise_non_finite=self.config.non_finite == "raise",
            label=self.label, on_done=finish,
        )  # fmt: skip
        return work

    def permit_plain(self, expected: bool, reason: str) -> None:
        """Before the backend carries it: strict mode, and whether all ranks do the same."""
        if not expected and self.config.strict:
            raise NotCompressedError(f"{self.collective} {self.label!r}: {reason}")
        if self.size > 1 and self.group is not None:
            communicator(self.group, self.config).agree({
                "collective": self.collective,
                "dtype": str(self.input.dtype).removeprefix("torch."),
                "count": str(self.input.numel()),
                "op": str(self.op),
                "root": str(self.root),
                "codecs": "plain",
            })  # fmt: skip

    def record_plain(self, reason: str, seconds: float) -> None:
        """Counts a call that the backend carried."""
        nbytes = self.input.numel() * self.input.element_size()
        _core.record_plain(
            self.label, self.collective, str(self.input.dtype).removeprefix("torch."), reason,
            self.size, self.input.numel(), nbytes,
            plain_bytes(self.collective, nbytes, self.size), seconds,
        )  # fmt: skip

    def why_plain(self) -> tuple[bool, str]:
        """Whether that is what the configuration asks for, and the reason; "" to compress."""
        if self.size == 1:
            return True, "world size 1"
        if self.config.codecs is None:
            return True, "compression_type none"
        if self.config.codecs[0].name == "identity" and self.config.codecs[1].name == "identity":
            return True, "identity"
        if self.collective not in self.config.collective_filter:
            return True, "not in collective_filter"
        if self.input.dtype not in _DTYPES and not self.input.is_complex():
            return False, f"dtype {self.input.dtype} has no codec"
        if not (self.input.is_floating_point() or self.input.is_complex()):
            return True, "integers are never lossy"
        if self.input.layout is not torch.strided:
            return False, f"layout {self.input.layout} has no codec"
        if self.op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            return False, "only avg and sum are compressed"
        return True, ""

    def _check(self) -> None:
        """Refuses before anything is sent what could not be sent right."""
        for tensor in (self.input, self.output):
            if tensor.device.type != "cpu":
                raise UnsupportedError(
                    f"{self.collective} {self.label!r}: a tensor is on {tensor.device}; this "
                    "version compresses CPU tensors only. Use torch.distributed for it."
                )
        if self.input.dtype != self.output.dtype:
            raise UnsupportedError(
                f"{self.collective} {self.label!r}: input is {self.input.dtype}, output "
                f"{self.output.dtype}; they must be the same"
            )
        if self.output.layout is torch.strided and _overlaps(self.output):
            raise UnsupportedError(
                f"{self.collective} {self.label!r}: elements of the output share memory (an "
                "expanded tensor?); pass output.contiguous()"
            )
        values, other = self.input.numel(), self.output.numel()
        if self.collective == "all_gather":
            values, other = other, values
        if self.collective in ("reduce_scatter", "all_gather") and values != other * self.size:
            whole = "input" if self.collective == "reduce_scatter" else "output"
            raise ConfigError(
                f"{self.collective} {self.label!r}: the {whole} has {values} values; for "
                f"{self.size} ranks with {other} each it must have {self.size * other}"
            )


def _reduce_op(op: Any) -> Any:
    if isinstance(op, str):
        if op not in _OPS:
            raise ConfigError(f"op = {op!r}; allowed: 'avg', 'sum' or a torch.distributed.ReduceOp")
        return _OPS[op]
    return op


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex values as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
