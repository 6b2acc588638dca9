"""`compression_type: auto` over a process group: measures for the policy, keeps one per kind."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._policy import Policy, lost_while_measuring, poll
from .._rules import PLAIN
from ..errors import DeadlineError
from ._groups import communicator, timeout_of
from ._plain import BACKEND
from ._streams import current_stream
from ._work import is_capturing

if TYPE_CHECKING:
    from ._call import Call

_LABEL = "auto: measuring"


class Probe:
    """Times collectives like one call's on scratch tensors; see `cccl._policy.Probe`."""

    def __init__(self, call: Call):
        self._call = call
        self._seconds = call.config.deadline or timeout_of(call.group)
        self._numel, self._stream = 0, None
        self._limit = [timedelta(seconds=self._seconds)]
        if call.input.is_cuda:  # where NCCL's wait with a limit looks once in a millisecond
            self._limit, self._stream = [], current_stream(call.input.device)

    def measure(self, name: str, nbytes: int) -> float:
        """Seconds of one collective of `nbytes`, plain or with the codec `name`."""
        self._prepare(nbytes)
        poll(self._stream, self._seconds)
        begun = time.perf_counter()
        if name == PLAIN:
            self._plain(self._call.collective, self._input, self._output, self._call.op)
        else:
            config = self._call.config.candidates[name]
            self._call.like(self._input, self._output, config, _LABEL).perform()
        poll(self._stream, self._seconds)
        return time.perf_counter() - begun

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._call.input.device)
        self._plain("all_reduce", tensor, tensor, dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def _plain(self, collective: str, input: torch.Tensor, output: torch.Tensor, op: Any) -> None:
        try:
            work = BACKEND[collective](input, output, op, self._call.src, self._call.group, True)
            work.wait(*self._limit)
            poll(self._stream, self._seconds)
        except (RuntimeError, DeadlineError) as error:
            lost = lost_while_measuring(error)
            found = communicator(self._call.group, self._call.input.device, self._call.config)
            found.core.abort(str(lost))
            raise lost from error

    def _prepare(self, nbytes: int) -> None:
        """Tensors with the same values for every measurement: a sum in place would grow. What is
        only moved has the call's own, as far as they go: how short they get is theirs."""
        size, dtype, collective = self._call.size, self._call.input.dtype, self._call.collective
        numel = max(1, nbytes // dtype.itemsize // size) * size
        if numel != self._numel:
            self._numel = numel
            own = self._call.input.reshape(-1)[:numel]
            if collective in ("all_gather", "broadcast") and own.numel():
                self._values = own.repeat(-(-numel // own.numel()))[:numel]
            else:
                self._values = torch.linspace(-1, 1, numel).to(self._call.input.device, dtype)
            whole = self._values.clone()
            part = whole[: numel // size]
            self._input = part.clone() if collective == "all_gather" else whole
            self._output = part.clone() if collective == "reduce_scatter" else whole
        self._input.copy_(self._values[: self._input.numel()])


def policy_of(call: Call) -> Policy:
    """Of a call's kind; all ranks of the group measure at its first use."""
    assert call.group is not None
    found = communicator(call.group, call.input.device, call.config)
    return found.policy(
        call.collective, call.input.dtype, call.config, lambda: Probe(call),
        lambda: is_capturing(call.input),
    )  # fmt: skip
