"""A picture of what a budget chose, step by step. Knows no framework."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._budget import Chosen
from ._timeline import matplotlib

_MOST_NAMED = 16  # buckets that a legend has room for


def draw(path: Path, history: Sequence[Chosen], steps: int) -> None:
    """Of so many steps: the bits per value of each bucket and, where noise was measured, the
    squared error over that of the noise."""
    matplotlib().use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    buckets: dict[tuple[int, str], list[Chosen]] = {}
    for chosen in history:
        buckets.setdefault((chosen.bucket, chosen.parameter), []).append(chosen)
    measured = sorted({chosen.step for chosen in history})
    with_noise = any(chosen.noise for chosen in history)
    figure, axes = plt.subplots(
        1 + with_noise, 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(9, 3 + 3 * with_noise),
    )  # fmt: skip
    for (bucket, parameter), found in sorted(buckets.items()):
        last = found[-1].step  # a bucket that was measured no more is no more
        at = [chosen.step for chosen in found]
        at.append(next((step for step in measured if step > last), max(steps, last)))
        bits = [chosen.bits for chosen in found]
        label = f"bucket {bucket}: {parameter}"
        axes[0, 0].step(at, [*bits, bits[-1]], where="post", lw=1.2, label=label)
        if with_noise:
            known = [chosen for chosen in found if chosen.noise]
            shares = [(chosen.error / chosen.noise) ** 2 for chosen in known if chosen.noise]
            axes[1, 0].plot([chosen.step for chosen in known], shares, ".-", lw=0.8)
    axes[0, 0].set_ylabel("bits per value")
    most = max((chosen.bits for chosen in history), default=1.0)
    axes[0, 0].set_ylim(0, 1.1 * most)
    if with_noise:
        axes[1, 0].set_ylabel("squared error / noise")
        axes[1, 0].set_yscale("log")
    axes[-1, 0].set_xlabel("step")
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    if 0 < len(buckets) <= _MOST_NAMED:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
