"""Plain or a codec: decided from measured times, equal on every rank. Knows no device or network.

Ranks measure the plain collective and each codec at a few sizes, take the slowest rank's times, and
so hold the same table. docs/auto.md explains it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from ._config import PLAIN

SIZES = tuple(1 << bits for bits in (10, 13, 16, 19, 22, 24))  # bytes of a whole tensor
BUDGET = 0.5  # seconds that measuring may take
GAIN = 0.95  # a codec must need less than this share of plain's time: a smaller gain is noise
DRIFT = 1.5  # observed over predicted, or the inverse, beyond which the times are measured anew
SHARE = 1 / 200  # of the time since, that measuring anew may take
_ALWAYS = 3  # sizes measured whatever they cost: fewer would tell latency, but no rate
_REPEATS = 20


class Probe(Protocol):
    """What a frontend measures. All ranks call the same methods in the same order."""

    def measure(self, name: str, nbytes: int) -> float:
        """Seconds of one collective on a tensor of that size, plain or with the codec `name`."""

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """How to send a tensor: its predicted seconds, and those of the best other way."""

    codec: str
    predicted: float
    alternative: float


@dataclasses.dataclass(frozen=True)
class Table:
    """Seconds of each way to send, at each size measured."""

    sizes: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]

    def predict(self, name: str, nbytes: int) -> float:
        """Linear between two sizes; below the first as there, beyond the last at the last rate."""
        sizes, times = self.sizes, tuple(itertools.accumulate(self.seconds[name], max))
        if nbytes <= sizes[0]:
            return times[0]
        at = min(bisect_left(sizes, nbytes), len(sizes) - 1)
        rate = (times[at] - times[at - 1]) / (sizes[at] - sizes[at - 1])
        return times[at] + (nbytes - sizes[at]) * rate

    def choose(self, nbytes: int) -> Choice:
        """The codec predicted fastest, if it clearly beats plain."""
        plain = self.predict(PLAIN, nbytes)
        times = {name: self.predict(name, nbytes) for name in self.seconds if name != PLAIN}
        codec = min(times, key=times.__getitem__)
        if times[codec] <= GAIN * plain:
            return Choice(codec, times[codec], plain)
        return Choice(PLAIN, plain, times[codec])


def calibrate(codecs: tuple[str, ...], probe: Probe) -> Table:
    """Measures plain and `codecs` at growing sizes, as far as the budget goes.

    What ends it is the slowest rank's time, so that all ranks stop at the same size.
    """
    begun, spent = time.perf_counter(), 0.0
    names = (PLAIN, *codecs)
    rows: list[list[float]] = []

    def table() -> Table:
        return Table(SIZES[: len(rows)], dict(zip(names, zip(*rows, strict=True), strict=True)))

    for nbytes in SIZES:
        if len(rows) >= _ALWAYS:
            expected = table()
            if spent + sum(expected.predict(name, nbytes) for name in names) > BUDGET:
                break
        # The first round of a size pays for memory and agreement: it counts only if it must.
        *times, spent = probe.slowest([*_round(names, nbytes, probe), time.perf_counter() - begun])
        repeats = min(_REPEATS, int((BUDGET - spent) / 3 / max(sum(times), 1e-6)))
        if repeats > 0:
            rounds = [_round(names, nbytes, probe) for _ in range(repeats)]
            plain, *coded = zip(*rounds, strict=True)
            typical = [_quantile(plain, 0.25), *(_quantile(column, 0.5) for column in coded)]
            *times, spent = probe.slowest([*typical, time.perf_counter() - begun])
        rows.append(times)
    return table()


def _round(names: tuple[str, ...], nbytes: int, probe: Probe) -> list[float]:
    return [probe.measure(name, nbytes) for name in names]


def _quantile(times: Sequence[float], share: float) -> float:
    """Plain's lower quartile stands against a codec's median: in doubt, plain. Small collectives
    meet pauses of the scheduler that are ten times as long as they are."""
    return sorted(times)[int((len(times) - 1) * share)]


class Policy:
    """The choices of one group, collective and dtype, as its ranks make their calls."""

    def __init__(self, codecs: tuple[str, ...], probe: Probe):
        self._codecs = codecs
        self._calls, self._planned = 0, 0.0  # since the last review, and what they should take
        self._fastest = math.inf  # the least of observed over predicted
        self._measure(probe)

    @property
    def due(self) -> bool:
        """Whether all ranks must `review` before the next call."""
        return self._calls >= self._due

    def choose(self, nbytes: int) -> Choice:
        """For the next call."""
        choice = self.table.choose(nbytes)
        self._count(choice)
        return choice

    def again(self, choice: Choice, table: Table) -> bool:
        """Counts a call like an earlier one; False if it must be chosen anew."""
        if table is not self.table or self.due:
            return False
        self._count(choice)
        return True

    def observe(self, choice: Choice, seconds: float) -> None:
        """What a call really took on this rank, waiting for other ranks included."""
        self._fastest = min(self._fastest, seconds / choice.predicted)

    def _count(self, choice: Choice) -> None:
        self._calls += 1
        self._planned += choice.predicted

    def _measure(self, probe: Probe) -> None:
        begun = time.perf_counter()
        self.table = calibrate(self._codecs, probe)
        self._measured = time.perf_counter()
        (self._cost,) = probe.slowest([self._measured - begun])
        self._due = 16

    def review(self, probe: Probe) -> None:
        """Ranks compare what they observed. Times are measured anew if even the fastest call, on
        the rank that waited least for others, is far from what was predicted."""
        slowest, since = probe.slowest([-self._fastest, time.perf_counter() - self._measured])
        # An exchange takes about as long as the smallest call: one in a thousand of them.
        latency = self.table.predict(PLAIN, SIZES[0])
        self._due = max(16, math.ceil(1000 * latency * self._calls / max(self._planned, latency)))
        self._calls, self._planned, self._fastest = 0, 0.0, math.inf
        drifted = math.isfinite(slowest) and not 1 / DRIFT <= -slowest <= DRIFT
        if drifted and since * SHARE >= self._cost:
            self._measure(probe)
