"""One collective on tensors: checked, then sent compressed or, for a counted reason, plain."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .._arrays import DTYPES, DType, may_overlap
from .._calls import (
    GATHERED,
    REDUCING,
    check_built_for_gpu,
    check_pair,
    check_parts,
    fields_of_plain,
    settings_of,
    why_plain,
)
from .._config import Config, current_config, loaded
from .._policy import Choice, Policy
from .._rules import AUTO, OFF, PLAIN
from .._state import Memory
from ..errors import Error, NotCompressedError, UnsupportedError
from ._auto import policy_of
from ._groups import GroupCommunicator, communicator, find_plain, plain_calls, resolve
from ._hierarchy import route
from ._plain import PlainCall, is_known, name_of, reduce_op
from ._state import state_of
from ._streams import current_stream
from ._tensors import check_kind, copy_back, detached, reach, real
from ._work import Work, profiler_ranges

DTYPES_OF_TORCH: dict[torch.dtype, DType] = {
    getattr(torch, name): dtype for name, dtype in DTYPES.items() if hasattr(torch, name)
}
_abandoned: list[Any] = []  # tensors of calls that were interrupted, which may still be written


def send(
    collective: str,
    input: torch.Tensor,
    output: torch.Tensor,
    op: Any,
    group: dist.ProcessGroup | None,
    async_op: bool,
    config: Any,
    label: str,
    src: int = 0,
    memory: Memory | None = None,
) -> Any:
    """A collective, compressed or plain; returns a work if `async_op`. `memory`: of what error
    feedback keeps, None where nothing tells which tensor it is."""
    if type(config) is not Config:
        config = current_config() if config is None else loaded(config)
    known = find_plain(collective, input, output, op, group, src, label, config)
    if known is not None:
        plain, inner = known
        if plain.again():
            if input is not output:
                input, output = input.view(-1), output.view(-1)
            return plain.send(input, output, inner, async_op)
    call = Call(collective, input, output, op, group, config, label, src)
    call.memory = memory
    return call.run(async_op)


class Call:
    """What is known of a collective before it is sent either way."""

    def __init__(
        self,
        collective: str,
        input: torch.Tensor,
        output: torch.Tensor,
        op: Any,
        group: dist.ProcessGroup | None,
        config: Config,
        label: str,
        src: int = 0,
    ):
        self.collective, self.label = collective, str(label)
        for tensor in (input, output):
            check_kind(tensor, f"{collective} {label!r}")
        self.in_place = input is output
        self.input = detached(input)
        self.output = self.input if self.in_place else detached(output)
        self.asked, self.config = config, config.of(collective)
        self.memory: Memory | None = None
        self.group = resolve(group)
        if self.group is None:
            return
        self.op, self.asked_op = reduce_op(op), op
        self.asked_group = dist.group.WORLD if group is None else group
        self.size = self.group.size()
        self.src = src
        self.root = dist.get_group_rank(self.group, src) if collective == "broadcast" else 0
        self.choice: Choice | None = None  # of compression_type auto
        self.policy: Policy | None = None
        self.measures_noise = False
        self._check()

    def like(self, input: torch.Tensor, output: torch.Tensor, config: Config, label: str) -> Call:
        """The same collective of other tensors."""
        return Call(self.collective, input, output, self.op, self.group, config, label, self.src)

    def again(self, tensor: torch.Tensor | None, group: dist.ProcessGroup | None) -> Call:
        """This one, in place, of another tensor like its own."""
        call = object.__new__(Call)
        call.__dict__.update(self.__dict__, post=self.post)
        call.input = call.output = tensor
        call.group = call.asked_group = group
        return call

    def run(self, async_op: bool) -> Any:
        """Sends it compressed or plain; as c10d, returns a work if `async_op`."""
        if self.group is None:
            return None
        reason = self.decide()
        if not reason:
            return self.submit() if async_op else self.perform()
        if self.size > 1:
            return self._run_plain(reason, async_op)
        if not self.in_place:
            self.output.copy_(self.input.reshape(self.output.shape))
        self.plainly(reason).record(0.0)
        return Work.finished(self.output) if async_op else None

    def perform(self) -> None:
        """Sends it compressed and waits: the host on a CPU, the current stream on a GPU."""
        if self.input.is_cuda:
            self._submit_to_stream(has_future=False).wait()
            return
        # Without a callback, for which the core's thread would have to take the GIL before this
        # one is woken.
        sent, received = self._staged()
        begun = time.perf_counter()
        work = self._start(self._communicator(), sent, received)
        try:
            work.wait()
        except Error:
            copy_back(received, self.output)  # NaN
            raise
        except BaseException:  # Ctrl-C: the core goes on
            _abandoned.append((sent, received))
            raise
        copy_back(received, self.output)
        if self.policy is not None and self.choice is not None:
            self.policy.observe(self.choice, time.perf_counter() - begun)

    def submit(self, *, future_raises: bool = True) -> Work:
        """Sends it compressed. After a failure the work's future raises, or holds the NaN."""
        if self.input.is_cuda:
            return self._submit_to_stream()
        if torch.autograd._profiler_enabled():  # a range until the result is there, as gloo's own
            with torch.profiler.record_function(f"cccl:{self.collective}") as span:
                work = self._submit_from_host(future_raises)
                span._call_end_callbacks_on_future(work.get_future())
            return work
        return self._submit_from_host(future_raises)

    def _submit_from_host(self, future_raises: bool) -> Work:
        output, work = self.output, Work(self.output)
        sent, received = work._kept = self._staged()
        choice, policy, begun = self.choice, self.policy, time.perf_counter()

        # No reference to `self`: the group must not live as long as its last collective's thread.
        def finish(error: Exception | None) -> None:
            try:
                copy_back(received, output)
            except RuntimeError as failure:
                error = work._failure = error or failure
            work._kept = None
            if policy is not None and choice is not None and error is None:
                policy.observe(choice, time.perf_counter() - begun)
            if error is not None and future_raises:
                work._future.set_exception(error)
            else:
                work._future.set_result(output)

        work._core = self._start(self._communicator(), sent, received, on_done=finish)
        return work

    def _submit_to_stream(self, *, has_future: bool = True) -> Work:
        """Behind the current stream's work. The future is complete at once, for streams to wait;
        without one, the current stream waits."""
        device = self.input.device
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return self._submit_to_stream(has_future=has_future)
        capturing = torch.cuda.is_current_stream_capturing()
        host_waits = self.config.non_finite == "raise" and not capturing
        work = Work(self.output, host_waits=host_waits, has_future=has_future)
        found = self._communicator()
        sent, received = self._staged()
        current = current_stream(device)
        # Before anything is submitted: whatever goes wrong then, their memory is not given away.
        used = {id(tensor): tensor for tensor in (sent, received, self.output)}.values()
        for tensor in used if not capturing else ():
            for stream in found.streams.values():
                tensor.record_stream(stream)
        observer = profiler_ranges() if torch.autograd._profiler_enabled() else None
        begun = time.perf_counter()
        work._core = self._start(
            found, sent, received, stream=current.cuda_stream, debug=self.config.debug,
            observer=observer,
        )  # fmt: skip
        if self.policy is not None and self.choice is not None and not capturing:
            self.policy.follow(self.choice, work._core, time.perf_counter() - begun)
        # The stream that made the output has the future complete. One of our own beside it would be
        # in the way: streams share the device's few queues, where one that waits blocks others.
        ends = found.streams.get(work._core.stream)
        if not has_future:
            if ends is None or self.config.hierarchy == OFF:
                work._core.precede(device.index, current.cuda_stream)
            else:  # what comes behind the legs is there, too
                current.wait_stream(ends)
            copy_back(received, self.output)
            return work
        if ends is None:  # a capture must come back to the stream that it began with
            work._core.precede(device.index, current.cuda_stream)
            ends = current
        # As `with torch.cuda.stream(ends)`, which asks for the current stream once more.
        torch.cuda.set_stream(ends)
        try:
            copy_back(received, self.output)
            work._future.set_result(self.output)
        finally:
            torch.cuda.set_stream(current)
        return work

    def _communicator(self) -> GroupCommunicator:
        assert self.group is not None
        return communicator(self.group, self.input.device, self.config)

    def _start(
        self, found: GroupCommunicator, sent: torch.Tensor, received: torch.Tensor, **more: Any
    ) -> Any:
        """The core's work. It has the tensors' addresses only: they must live until it is done."""
        config, choice = self.config, self.choice
        if config.hierarchy != OFF:
            legs = route(self, found, sent, received, more)
            if legs is not None:
                return legs
        source, target = real(sent), real(received)
        part = min(source.numel(), target.numel())
        return self.post(
            found.core, self.collective, source, target, codecs=config.codecs, root=self.root,
            counts=[part] * self.size if self.collective in GATHERED else [],
            raise_non_finite=config.non_finite == "raise",
            predicted=choice.predicted if choice else 0.0,
            alternative=choice.alternative if choice else 0.0,
            measure_noise=self.measures_noise, **more,
            **self.remembered(source.numel()),
        )  # fmt: skip

    def remembered(self, count: int, ranges: list[tuple[int, int]] | None = None) -> dict[str, Any]:
        """For `submit`: where what ranks keep of the values is, or of some of them, `count`."""
        if self.memory is None or not self.config.remembers:
            return {}
        memory, group = self.memory, self.group
        if ranges is not None:
            memory = memory.cut(self.label, self.input.numel(), ranges)
        return memory.arguments(lambda: state_of(group), self.label, count, self.config.feedback)

    @functools.cached_property
    def post(self) -> Callable[..., Any]:
        """Submits a collective, or a leg of it, with the settings of this one, which is decided.
        Knows of no group."""
        settings = settings_of(self.config) | {
            "average": self.op == dist.ReduceOp.AVG, "label": self.label
        }  # fmt: skip

        def post(
            core: Any, collective: str, source: torch.Tensor, target: torch.Tensor, *, codecs: Any,
            **more: Any,
        ) -> Any:  # fmt: skip
            return core.submit(
                collective, source.data_ptr(), source.numel(), target.data_ptr(), target.numel(),
                DTYPES_OF_TORCH[source.dtype].number, *codecs, **settings, **more,
            )  # fmt: skip

        return post

    def _staged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and output as plain memory: themselves where they are, else copies."""
        output = self.output
        sent = self.input.resolve_conj().resolve_neg().contiguous()
        if self.in_place:
            return sent, sent
        if output.is_contiguous() and not (output.is_conj() or output.is_neg()):
            return sent, output
        return sent, torch.empty(output.shape, dtype=output.dtype, device=output.device)

    def _run_plain(self, reason: str, async_op: bool) -> Any:
        plain = self.plainly(reason)
        self._remember(plain)
        sent, received, direct = self.input, self.output, True
        if self.input.layout is torch.strided:
            # The backend reads memory, not strides: what must be copied back is waited for.
            sent, received = (staged.reshape(-1) for staged in self._staged())
            direct = received.data_ptr() == self.output.data_ptr()
        result = plain.send(sent, received, self.group, async_op and direct)
        if direct:
            return result
        copy_back(received.view(self.output.shape), self.output)
        return Work.finished(self.output) if async_op else None

    def plainly(self, reason: str) -> PlainCall:
        """Before the backend carries it: whether all ranks do the same."""
        call = PlainCall(self, reason)
        if self.size > 1 and self.group is not None:
            kind = self.collective, self.input.dtype, self.input.numel(), self.op, self.src
            self._communicator().agree_once(kind, self.plain_fields)
        return call

    def _remember(self, plain: PlainCall) -> None:
        """How it goes plain, for `send` to find."""
        tells = type(self.asked_op) is str or is_known(self.asked_op)
        if not tells or not (self.input.layout is self.output.layout is torch.strided):
            return
        inner = None if self.group is self.asked_group else self.group
        plain_calls.remember(
            self.collective, self.input, self.output, self.asked_op, self.asked_group, self.src,
            self.label, self.asked, inner, self._communicator().core, plain,
        )  # fmt: skip

    def plain_fields(self) -> dict[str, str]:
        """What ranks compare of it, where it goes plain."""
        dtype = str(self.input.dtype).removeprefix("torch.")
        op = name_of(self.op)
        return fields_of_plain(self.collective, dtype, self.input.numel(), op, self.root)

    def decide(self) -> str:
        """Why it goes plain; "" to compress it. Strict mode raises `NotCompressedError`."""
        expected, reason = self._why_plain()
        if reason and not expected and self.config.strict:
            raise NotCompressedError(f"{self.collective} {self.label!r}: {reason}")
        if not reason and self.config.compression_type == AUTO:
            self.policy = policy_of(self)
            self.choice = self.policy.choose(max(self.input.nbytes, self.output.nbytes))
            if self.choice.codec == PLAIN:
                return "auto: plain is faster"
            self.config = self.config.candidates[self.choice.codec]
        return reason

    def _why_plain(self) -> tuple[bool, str]:
        """Whether that is what the configuration asks for, and the reason; "" to compress."""
        if reason := why_plain(self.config, self.collective, self.size):
            return True, reason
        if self.input.layout is not torch.strided:
            return False, f"layout {self.input.layout} has no codec"
        if not (self.input.is_floating_point() or self.input.is_complex()):
            return True, "integers are never lossy"
        if self.input.dtype not in DTYPES_OF_TORCH and self.input.dtype not in (
            torch.complex64,
            torch.complex128,
        ):
            return False, f"dtype {self.input.dtype} has no codec"
        if self.op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            return False, "only avg and sum are compressed"
        return True, ""

    def _check(self) -> None:
        """Refuses before anything is sent what could not be sent right."""
        where = f"{self.collective} {self.label!r}"
        for tensor in (self.input, self.output):
            if tensor.device.type not in ("cpu", "cuda"):
                raise UnsupportedError(
                    f"{where}: a tensor is on {tensor.device}; CPU and CUDA tensors are "
                    "compressed. Use torch.distributed for it."
                )
            if tensor.layout is torch.strided and tensor.numel() and not tensor.data_ptr():
                raise UnsupportedError(f"{where}: a tensor has no memory behind it")
        input, output = self.input, self.output
        check_pair(where, (input.device, output.device), (input.dtype, output.dtype))
        if input.is_cuda:
            check_built_for_gpu(f"{where}: a tensor is on {input.device}")
        if self.output.layout is torch.strided and may_overlap(output.shape, output.stride()):
            raise UnsupportedError(
                f"{where}: elements of the output share memory (an expanded tensor?); pass "
                "output.contiguous()"
            )
        if not self.in_place and self._inputs_overlap():
            raise UnsupportedError(
                f"{where}: input and output share memory other than this rank's own part; pass a "
                "copy of the input"
            )
        exact = not (self.input.is_floating_point() or self.input.is_complex())
        if exact and self.collective in REDUCING and self.op == dist.ReduceOp.AVG:
            raise UnsupportedError(
                f"{where}: the mean of {self.input.dtype} would be rounded, and integers are never "
                "lossy; use op='sum'"
            )
        small, large = sorted((self.input.numel(), self.output.numel()))
        check_parts(where, self.collective, self.size, large, small)

    def _inputs_overlap(self) -> bool:
        """Whether writing the output would change input that is still to be read."""
        if not (self.input.layout is self.output.layout is torch.strided):
            return False
        whole, part = self.input, self.output
        if self.collective == "all_gather":
            whole, part = part, whole
        own = whole.data_ptr() + dist.get_rank(self.group) * part.nbytes
        if whole.is_contiguous() and part.is_contiguous() and part.data_ptr() == own:
            return False
        (a, b), (c, d) = reach(whole), reach(part)
        return a < d and c < b
