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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ._rules import PLAIN
from .errors import DeadlineError, TransportError

SIZES = tuple(1 << bits for bits in (10, 13, 16, 18, 20, 22, 24, 26))  # bytes of a whole tensor
BUDGET = 0.75  # seconds that measuring may take
GAIN = 0.8  # share of plain's time that a codec may take at most: a smaller gain may be noise
DRIFT = 2.0  # observed over predicted, or the inverse, beyond which the times are measured anew
AT_START, SHARE = 1.5, 1 / 400  # seconds and, later, share of all time that measuring may take;
# comparing observed times takes as much again
_ALWAYS = 3  # sizes measured whatever they cost: fewer would tell latency, but no rate
_REPEATS = 20
_MOST_CHOICES = 1024
_MOST_RATIOS = 64
_MOST_FOLLOWED = 8  # calls on a device; timing one costs the host a few microseconds


class Probe(Protocol):
    """What a frontend measures. All ranks call the same methods in the same order."""

    def measure(self, name: str, nbytes: int) -> float:
        """Seconds of one collective on a tensor of that size, plain or with the codec `name`."""

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks."""


class Timed(Protocol):
    """A call on a device, which is under way when the host goes on."""

    def done(self) -> bool:
        """Whether it ended."""

    @property
    def seconds(self) -> float | None:
        """On the device, once done; None if that is not known."""


class Between:
    """A `Timed` from its making to `end()`, by events of a device with the methods of torch's."""

    def __init__(self, record: Callable[[], Any], latest: Timed | None):
        """`record` makes an event where the device's work has come to; `latest`: the one before."""
        self._record, self._first, self._last = record, record(), None
        self._before = latest._last if isinstance(latest, Between) else None

    def end(self, work: Any = None) -> None:
        """Behind all that was submitted, or behind one work of c10d's."""
        if work is None:
            self._last = self._record()
        else:  # on a stream that waits for it
            work.get_future().then(lambda _: self.end())

    def done(self) -> bool:
        """Whether it ended."""
        return self._last is not None and bool(self._last.query())

    @property
    def seconds(self) -> float | None:
        """From the end of the one before, if that was still under way: they share the link."""
        whole, alone = (
            event.elapsed_time(self._last) for event in (self._first, self._before or self._first)
        )
        return 1e-3 * float(min(whole, alone) if alone > 0 else whole)


@dataclasses.dataclass(frozen=True)
class Choice:
    """How to send a tensor: its predicted seconds, undisturbed too, and the best other way's."""

    codec: str
    predicted: float
    undisturbed: float
    alternative: float


Curve = tuple[float, ...]  # seconds at each size


@dataclasses.dataclass(frozen=True)
class Table:
    """Of each way to send, at each size measured: the median, and the lower quartile. Small
    collectives meet pauses of the scheduler that are ten times as long as they are, some ways more
    often than others: the median is with them, the quartile without."""

    sizes: tuple[int, ...]
    medians: dict[str, Curve]
    quartiles: dict[str, Curve]

    @classmethod
    def of(cls, names: tuple[str, ...], rows: list[list[float]]) -> Table:
        """From rows per size: medians of all ways, then quartiles. Noise only ever adds: a size
        that took longer than a larger one took no longer than that."""
        curves = [
            tuple(itertools.accumulate(reversed(c), min))[::-1] for c in zip(*rows, strict=True)
        ]
        medians, quartiles = curves[: len(names)], curves[len(names) :]
        return cls(
            SIZES[: len(rows)],
            dict(zip(names, medians, strict=True)),
            dict(zip(names, quartiles, strict=True)),
        )

    def predict(self, curve: Curve, nbytes: int) -> float:
        """Linear between two sizes; below the first as there. Beyond the last at the last rate, or,
        where that was the largest of all, in proportion: what won there goes on winning."""
        if nbytes <= self.sizes[0]:
            return curve[0]
        if nbytes > self.sizes[-1] == SIZES[-1]:
            return curve[-1] * nbytes / self.sizes[-1]
        at = min(bisect_left(self.sizes, nbytes), len(self.sizes) - 1)
        rate = (curve[at] - curve[at - 1]) / (self.sizes[at] - self.sizes[at - 1])
        return curve[at] + (nbytes - self.sizes[at]) * rate

    def choose(self, nbytes: int) -> Choice:
        """The fastest codec that clearly beats plain as a rule, and does not lose undisturbed."""
        medians = {name: self.predict(curve, nbytes) for name, curve in self.medians.items()}
        quartiles = {name: self.predict(curve, nbytes) for name, curve in self.quartiles.items()}
        plain = medians.pop(PLAIN)
        winners = [
            name
            for name, seconds in medians.items()
            if seconds <= GAIN * plain and quartiles[name] <= quartiles[PLAIN]
        ]
        if not winners:
            return Choice(PLAIN, plain, quartiles[PLAIN], min(medians.values()))
        codec = min(winners, key=medians.__getitem__)
        return Choice(codec, medians[codec], quartiles[codec], plain)


def poll(stream: Any, seconds: float) -> None:
    """Until a device's stream, which has torch's methods, is done: looks all the time. None: done.
    Raises `DeadlineError`."""
    until = time.perf_counter() + seconds
    while stream is not None and not stream.query():
        if time.perf_counter() > until:
            raise DeadlineError(f"timed out after {seconds:g} s")


def lost_while_measuring(error: Exception) -> TransportError:
    """What a plain collective raised that was measured."""
    late = isinstance(error, DeadlineError) or "imed out" in str(error) or "imeout" in str(error)
    kind = DeadlineError if late else TransportError
    return kind(f"measuring for compression_type 'auto': {error}")


def calibrate(codecs: tuple[str, ...], probe: Probe, budget: float = BUDGET) -> Table:
    """Measures plain and `codecs` at growing sizes, as far as the budget in seconds goes.

    What ends it is the slowest rank's time, so that all ranks stop at the same size.
    """
    begun, spent = time.perf_counter(), 0.0
    names = (PLAIN, *codecs)
    rows: list[list[float]] = []
    for nbytes in SIZES:
        if len(rows) >= _ALWAYS:
            table = Table.of(names, rows)
            expected = sum(table.predict(curve, nbytes) for curve in table.medians.values())
            if spent + 2 * expected > budget:
                break
        _round(names, nbytes, probe)  # pays for memory and agreement
        rounds = [_round(names, nbytes, probe)]
        *once, spent = probe.slowest([*rounds[0], time.perf_counter() - begun])
        left = (budget - spent) / (1 if nbytes == SIZES[-1] else 3)
        repeats = min(_REPEATS, int(left / max(sum(once), 1e-6)))
        rounds += [_round(names, nbytes, probe) for _ in range(repeats)]
        columns = list(zip(*rounds, strict=True))
        row = [_quantile(column, share) for share in (0.5, 0.25) for column in columns]
        *row, spent = probe.slowest([*row, time.perf_counter() - begun])
        rows.append(row)
    return Table.of(names, rows)


def _round(names: tuple[str, ...], nbytes: int, probe: Probe) -> list[float]:
    return [probe.measure(name, nbytes) for name in names]


def _quantile(times: Sequence[float], share: float) -> float:
    return sorted(times)[int((len(times) - 1) * share)]


class Policy:
    """The choices of one group, collective and dtype, as its ranks make their calls."""

    def __init__(self, codecs: tuple[str, ...], probe: Probe):
        self._codecs = codecs
        self._begun, self._spent = time.perf_counter(), 0.0
        self._followed: list[tuple[Choice, Timed, float]] = []  # on a device, with the host's time
        self.latest: Timed | None = None  # of them
        self.watches = True  # whether `follow` takes one more call before the next review
        self._measure(probe)

    @property
    def due(self) -> bool:
        """Whether all ranks must `review` before the next call."""
        return self._calls >= self._due

    def choose(self, nbytes: int) -> Choice:
        """For the next call."""
        choice = self._choices.get(nbytes)
        if choice is None:
            if len(self._choices) == _MOST_CHOICES:
                self._choices.clear()
            choice = self._choices[nbytes] = self.table.choose(nbytes)
        self._count(choice)
        return choice

    def again(self, choice: Choice, table: Table) -> bool:
        """Counts a call like an earlier one; False if it must be chosen anew. Written out, like all
        that a small call does: Python that runs cold takes a microsecond for each function."""
        if table is not self.table or self._calls >= self._due:
            return False
        self._calls += 1
        self._planned += choice.predicted
        return True

    def observe(self, choice: Choice, seconds: float) -> None:
        """What a call really took on this rank, waiting for other ranks included."""
        if len(self._ratios) < _MOST_RATIOS:
            self._ratios.append(seconds / choice.undisturbed)

    def follow(self, choice: Choice, call: Timed, host: float) -> None:
        """A call on a device, observed at a review once done. `host`: seconds to submit it."""
        if self.watches:
            self._followed.append((choice, call, host))
            self.latest = call
            self.watches = len(self._followed) < _MOST_FOLLOWED

    def review(self, probe: Probe) -> None:
        """Ranks compare what they observed. Times are measured anew if they are far from what was
        predicted even on the rank that waited least for others, and if time enough has passed."""
        self._harvest()
        since = time.perf_counter() - self._begun
        inverse = 1 / _quantile(self._ratios, 0.25) if self._ratios else 0.0
        since, inverse = probe.slowest([since, inverse])
        drifted = inverse > 0 and not 1 / DRIFT <= inverse <= DRIFT
        if drifted and self._spent + BUDGET <= AT_START + SHARE * since:
            self._measure(probe)
            return
        # An exchange takes about as long as the smallest call.
        latency = self.table.medians[PLAIN][0]
        self._watch(math.ceil(latency / SHARE * self._calls / max(self._planned, latency)))

    def _count(self, choice: Choice) -> None:
        self._calls += 1
        self._planned += choice.predicted

    def _harvest(self) -> None:
        """Observes the calls on a device that are done by now. One alone would take about the
        longer of both times: where the host is ahead, the device does not wait for it."""
        followed, self._followed = self._followed, []
        for choice, call, host in followed:
            if not call.done():
                self._followed.append((choice, call, host))
            elif (seconds := call.seconds) is not None:
                self.observe(choice, max(seconds, host))
        self.watches = len(self._followed) < _MOST_FOLLOWED

    def _measure(self, probe: Probe) -> None:
        begun = time.perf_counter()
        self.table = calibrate(self._codecs, probe)
        self._spent += probe.slowest([time.perf_counter() - begun])[0]
        self._choices: dict[int, Choice] = {}
        # They were predicted otherwise.
        self._followed, self.latest, self.watches = [], None, True
        self._watch(0)

    def _watch(self, calls: int) -> None:
        """Until the next review."""
        self._due = max(16, calls)
        self._calls, self._planned = 0, 0.0  # since the last one, and what they should take
        self._ratios: list[float] = []  # observed over predicted, undisturbed
