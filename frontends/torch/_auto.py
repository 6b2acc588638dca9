"""`compression_type: auto` over a process group: measures for the policy, keeps one per kind."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._config import PLAIN, Config
from .._policy import Policy
from ..errors import DeadlineError, TransportError
from ._groups import communicator, timeout_of
from ._plain import BACKEND

_LABEL = "auto: measuring"


class Probe:
    """Times collectives of one kind on scratch tensors; see `cccl._policy.Probe`."""

    def __init__(self, collective: str, dtype: torch.dtype, op: Any, group: Any, config: Config):
        self.collective, self.dtype, self.op = collective, dtype, op
        self._group, self._config = group, config
        self._seconds = config.deadline or timeout_of(group)
        self._src = dist.get_global_rank(group, 0)
        self._numel = 0

    def measure(self, name: str, nbytes: int) -> float:
        """Seconds of one collective of `nbytes`, plain or with the codec `name`."""
        self._prepare(nbytes)
        begun = time.perf_counter()
        if name == PLAIN:
            self._plain(self.collective, self._input, self._output, self.op)
        else:
            from ._call import Call  # which asks this module

            config = self._config.candidates[name]
            Call(
                self.collective, self._input, self._output, self.op, self._group, config, _LABEL,
                self._src,
            ).submit().wait()  # fmt: skip
        return time.perf_counter() - begun

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self._plain("all_reduce", tensor, tensor, dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def _plain(self, collective: str, input: torch.Tensor, output: torch.Tensor, op: Any) -> None:
        try:
            work = BACKEND[collective](input, output, op, self._src, self._group, True)
            work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            late = "imed out" in str(error) or "imeout" in str(error)
            kind = DeadlineError if late else TransportError
            text = f"measuring for compression_type 'auto': {error}"
            communicator(self._group, self._config).core.abort(text)
            raise kind(text) from error

    def _prepare(self, nbytes: int) -> None:
        """Tensors with the same values for every measurement: a sum in place would grow."""
        size = self._group.size()
        numel = max(1, nbytes // self.dtype.itemsize // size) * size
        if numel != self._numel:
            self._numel = numel
            self._values = torch.linspace(-1, 1, numel).to(self.dtype)
            whole = self._values.clone()
            part = whole[: numel // size]
            self._input = part.clone() if self.collective == "all_gather" else whole
            self._output = part.clone() if self.collective == "reduce_scatter" else whole
        self._input.copy_(self._values[: self._input.numel()])


def policy_of(probe: Probe, group: Any, config: Config) -> Policy:
    """Of a kind of collective; measured at its first use by all ranks of the group."""
    found = communicator(group, config)
    codecs = [str(legs) for name in config.candidates for legs in [_specs(config, name)]]
    key = (probe.collective, probe.dtype, *codecs, config.checksum, config.chunk_size,
           config.window, config.algorithm)  # fmt: skip
    policy = found.policies.get(key)
    if policy is None:
        found.agree({
            "collective": probe.collective,
            "dtype": str(probe.dtype).removeprefix("torch."),
            "plan": f"auto, chunk {config.chunk_size}, window {config.window}, {config.algorithm}",
            "codecs": ", ".join(codecs),
            "checks": str(config.checksum),
        })  # fmt: skip
        policy = found.policies[key] = Policy(tuple(config.candidates), probe)
    return policy


def _specs(config: Config, name: str) -> str:
    legs = config.candidates[name].codecs
    assert legs is not None
    return " -> ".join(dict.fromkeys(codec.spec for codec in legs))
