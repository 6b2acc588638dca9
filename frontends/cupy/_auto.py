"""`compression_type: auto` for arrays: measures for the policy, keeps one per kind."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from .._policy import Policy
from .._rules import PLAIN
from ._arrays import empty, moved, repeated, stream_of
from ._connections import Connection

if TYPE_CHECKING:
    from ._call import Call

_LABEL = "auto: measuring"


class Probe:
    """Times collectives like one call's on scratch arrays; see `cccl._policy.Probe`."""

    def __init__(self, call: Call, found: Connection):
        self._call, self._found = call, found
        self._like = call.array.real  # arrays of complex values are pairs of these
        self._numel = 0

    def measure(self, name: str, nbytes: int) -> float:
        """Seconds of one collective of `nbytes`, plain or with the codec `name`."""
        call = self._prepare(name, nbytes)
        self._finish()
        begun = time.perf_counter()
        call.start(self._found).wait()
        self._finish()
        return time.perf_counter() - begun

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""
        mine = moved(np.array(values), self._like)
        found = empty((self._found.core.size, len(values)), mine)
        call = dataclasses.replace(
            self._call, collective="all_gather", array=mine, out=found, label=_LABEL, exact=True
        )
        call.start(self._found).wait()
        largest: list[float] = found.max(axis=0).tolist()
        return largest

    def _prepare(self, name: str, nbytes: int) -> Call:
        """With the same values in every measurement: a sum in place would grow. What is only moved
        has the call's own: how short they get is theirs."""
        call, size = self._call, self._found.core.size
        numel = max(1, nbytes // call.source.dtype.size // size) * size
        if numel != self._numel:
            self._numel = numel
            own = call.array.reshape(-1).view(self._like.dtype)
            if call.reduces or own.size == 0:
                ramp = np.linspace(-1, 1, numel).astype(self._like.dtype)
                self._values = moved(ramp, self._like)
            else:
                self._values = repeated(own, numel)
            self._whole, self._part = (empty((n,), self._like) for n in (numel, numel // size))
        array = self._part if call.collective == "all_gather" else self._whole
        out = self._part if call.collective == "reduce_scatter" else self._whole
        array[...] = self._values[: array.size]
        exact = name == PLAIN
        return dataclasses.replace(
            call, array=array, out=None if call.out is None else out, label=_LABEL, exact=exact,
            config=call.config if exact else call.config.candidates[name],
        )  # fmt: skip

    def _finish(self) -> None:
        stream = stream_of(self._call.device)
        if stream is not None:
            stream.synchronize()


def policy_of(call: Call, found: Connection) -> Policy:
    """Of a call's kind; all ranks measure at its first use."""
    stream = stream_of(call.device)
    return found.policy(
        call.collective, call.source.dtype.name, call.config, lambda: Probe(call, found),
        lambda: stream is not None and stream.is_capturing(),
    )  # fmt: skip
