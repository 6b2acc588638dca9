"""A bucket of parameters that go different ways, cut into few tensors. Knows no framework.

A run is what lies side by side and goes the same way. A large run is sent where it lies, with the
runs of its own way beyond small gaps: what others have in such a gap is set to zero, goes along,
and is overwritten by its own result. All other runs of a way are copied into one tensor. So a way
costs one collective for its small runs together, and one for each large stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

SMALL = 1 << 16  # values: copying a run costs less than a collective of its own
CALL_BYTES = 1 << 16  # what a collective more is worth on the wire, about 0.5 ms at 1 Gbit/s

W = TypeVar("W", bound=Hashable)


class Piece(NamedTuple):
    """What goes as one tensor: parameters by their numbers in the bucket, in order."""

    parameters: tuple[int, ...]
    apart: tuple[int, ...]  # others' among them, which go as zeros
    in_place: bool  # a stretch of the bucket; else copied together


class _Run(NamedTuple):
    first: int
    last: int  # behind it
    values: int


def cut(
    counts: Sequence[int],
    ways: Sequence[W],
    bits: Mapping[W, float],
    finer: Callable[[W, W], bool],
) -> list[tuple[W, Piece]]:
    """The pieces of a bucket whose parameters have so many values and go these ways.

    `bits`: per value of each way. `finer(a, b)`: whether way a is surely the more exact one. A way
    with small runs only goes as a finer one that the bucket has, where that costs fewer bytes than
    a collective more is worth.
    """
    ways = _merged(counts, ways, bits, finer)
    runs = _runs(counts, ways)
    way_of = [ways[run.first] for run in runs]
    taken = [False] * len(runs)
    pieces: list[tuple[W, Piece]] = []
    totals: dict[W, int] = {}
    for run, way in zip(runs, way_of, strict=True):
        totals[way] = totals.get(way, 0) + run.values
    for way in sorted(totals, key=lambda w: -totals[w]):
        rest = [i for i, run_way in enumerate(way_of) if run_way == way and taken[i]]
        for stretch in _stretches(runs, way_of, taken, way, bits[way]):
            own = [i for i in stretch if way_of[i] == way]
            if not any(runs[i].values >= SMALL for i in own):
                rest += own
                continue
            for i in stretch:
                taken[i] = True
            others = [i for i in stretch if way_of[i] != way]
            pieces.append((way, Piece(_numbers(runs, stretch), _numbers(runs, others), True)))
        if rest:
            pieces.append((way, Piece(_numbers(runs, sorted(rest)), (), False)))
    apart = {number for _, piece in pieces for number in piece.apart}
    return sorted(
        ((way, _in_place(piece, apart)) for way, piece in pieces), key=lambda p: p[1].parameters
    )


def _merged(
    counts: Sequence[int],
    ways: Sequence[W],
    bits: Mapping[W, float],
    finer: Callable[[W, W], bool],
) -> list[W]:
    merged = list(ways)
    for way in sorted(set(ways), key=lambda w: (bits[w], merged.index(w))):
        runs = [run for run in _runs(counts, merged) if merged[run.first] == way]
        if any(run.values >= SMALL for run in runs):
            continue
        more = {other: bits[other] for other in merged if finer(other, way)}
        if not more:
            continue
        other = min(more, key=more.__getitem__)
        if sum(run.values for run in runs) * (more[other] - bits[way]) / 8 <= CALL_BYTES:
            merged = [other if found == way else found for found in merged]
    return merged


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
) -> list[list[int]]:
    """Runs of a way, each with those before it where the gap between them can go along."""
    found: list[list[int]] = []
    for i in range(len(runs)):
        if way_of[i] != way or taken[i]:
            continue
        gap = list(range(found[-1][-1] + 1, i)) if found else []
        small = all(runs[g].values < SMALL and not taken[g] for g in gap)
        if found and small and sum(runs[g].values for g in gap) * bits / 8 <= CALL_BYTES:
            found[-1] += [*gap, i]
        else:
            found.append([i])
    return found


def _numbers(runs: Sequence[_Run], chosen: Sequence[int]) -> tuple[int, ...]:
    return tuple(n for i in chosen for n in range(runs[i].first, runs[i].last))


def _in_place(piece: Piece, apart: set[int]) -> Piece:
    """A single run that is in nobody's gap needs no copy either."""
    first, last = piece.parameters[0], piece.parameters[-1]
    whole = last - first + 1 == len(piece.parameters)
    return piece._replace(in_place=piece.in_place or (whole and first not in apart))
