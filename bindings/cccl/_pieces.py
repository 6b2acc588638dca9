"""A bucket of parameters that go different ways, cut into few tensors. Knows no framework.

A run is what lies side by side and goes the same way. A large run is sent where it lies, with the
runs of its own way beyond small gaps: what others have in such a gap is set to zero, goes along,
and is overwritten by its own result. All other runs are small ones: of all buckets together, those
of a way are copied into one tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

SMALL = 1 << 16  # values: copying a run costs less than a collective of its own
CALL_BYTES = 1 << 16  # what a collective more is worth on the wire, about 0.5 ms at 1 Gbit/s

W = TypeVar("W", bound=Hashable)


class Stretch(NamedTuple, Generic[W]):
    """A part of the bucket that goes where it lies: parameters by their numbers."""

    way: W
    first: int
    last: int  # behind it
    apart: tuple[int, ...]  # others' among them, which go as zeros


class _Run(NamedTuple):
    first: int
    last: int  # behind it
    values: int


def cut(
    counts: Sequence[int], ways: Sequence[W], bits: Mapping[W, float]
) -> tuple[list[Stretch[W]], list[int]]:
    """The stretches of a bucket whose parameters have so many values and go these ways, and the
    numbers of the small ones. `bits`: per value of each way."""
    runs = _runs(counts, ways)
    if len(runs) == 1:
        return [Stretch(ways[0], 0, len(counts), ())], []
    way_of = [ways[run.first] for run in runs]
    taken = [False] * len(runs)
    totals: dict[W, int] = {}
    for run, way in zip(runs, way_of, strict=True):
        totals[way] = totals.get(way, 0) + run.values
    found: list[Stretch[W]] = []
    for way in sorted(totals, key=lambda w: -totals[w]):
        for first, last in _stretches(runs, way_of, taken, way, bits[way]):
            chosen = range(first, last + 1)
            if all(runs[i].values < SMALL for i in chosen):
                continue
            for i in chosen:
                taken[i] = True
            others = [runs[i] for i in chosen if way_of[i] != way]
            apart = tuple(n for run in others for n in range(run.first, run.last))
            found.append(Stretch(way, runs[first].first, runs[last].last, apart))
    sent = {n for s in found for n in range(s.first, s.last)} - {n for s in found for n in s.apart}
    return sorted(found, key=lambda s: s.first), [n for n in range(len(counts)) if n not in sent]


def _runs(counts: Sequence[int], ways: Sequence[W]) -> list[_Run]:
    runs: list[_Run] = []
    for i, (count, way) in enumerate(zip(counts, ways, strict=True)):
        if runs and ways[runs[-1].first] == way:
            runs[-1] = _Run(runs[-1].first, i + 1, runs[-1].values + count)
        else:
            runs.append(_Run(i, i + 1, count))
    return runs


def _stretches(
    runs: Sequence[_Run], way_of: Sequence[W], taken: Sequence[bool], way: W, bits: float
) -> list[tuple[int, int]]:
    """First and last runs of a way that go together, as the gaps between them can go along."""
    found: list[tuple[int, int]] = []
    for i in range(len(runs)):
        if way_of[i] != way or taken[i]:
            continue
        gap = range(found[-1][1] + 1, i) if found else range(0)
        small = all(runs[g].values < SMALL and not taken[g] for g in gap)
        if found and small and sum(runs[g].values for g in gap) * bits / 8 <= CALL_BYTES:
            found[-1] = found[-1][0], i
        else:
            found.append((i, i))
    return found
