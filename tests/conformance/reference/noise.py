"""How values differ from rank to rank, as a header's `statistics` has it."""

from __future__ import annotations

import numpy as np

STRIDE, PIECE = 16384, 1024


def _folded(values: np.ndarray) -> float:
    sums = np.zeros(PIECE)
    sums[: values.size] = values
    half = sums.size // 2
    while half:
        sums = sums[:half] + sums[half:]
        half //= 2
    return float(sums[0])


def _upper(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 8


def statistics(ranks: list[np.ndarray]) -> int:
    """Of all ranks' values, in the accumulators' type."""
    count, world = ranks[0].size, float(len(ranks))
    deviations = squares = 0.0
    zeros = looked_at = 0
    with np.errstate(all="ignore"):
        for at in range(0, count, STRIDE):
            first, *others = (r[at : at + PIECE].astype(np.float64) for r in ranks)
            n = first.size
            total, total_squares = np.zeros(n), np.zeros(n)
            for values in others:
                difference = values - first
                total += difference
                total_squares += difference * difference
            mean = first + total / world
            deviations += _folded(total_squares - total * (total / world))
            squares += _folded(mean * mean)
            zeros += int((mean == 0).sum())
            looked_at += n
        if not looked_at:
            return 0
        of_ranks = looked_at * max(world - 1, 1)
        both = np.array([deviations / of_ranks, squares / looked_at])
        roots = np.sqrt(both).astype(np.float32)
    low, middle = map(_upper, roots) if np.isfinite(roots).all() else (0x7FC000, 0x7FC000)
    return low | middle << 24 | (zeros * 65535 // looked_at) << 48
