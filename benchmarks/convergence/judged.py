"""Tables and figures of a survey."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from survey import load
from variants import PLAIN, VARIANTS

import cccl
from cccl.converge import judge

Run = Mapping[str, Any]
_SMOOTHED = 20  # steps of a training loss
_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b")


_NAMED = ("fixed", "noise budget", "sparse", "PyTorch's hooks")  # in the figure; others crowd there


def report(file: Path, figures: Path | None, margin: float) -> str:
    """Tables in Markdown, of each workload; its figures go into a folder."""
    runs = load(file)
    if not runs:
        raise cccl.ConfigError(f"{str(file)!r} holds no runs: `run` makes them")
    parts = []
    for workload in dict.fromkeys(run["workload"] for run in runs if "error" not in run):
        of_it = [run for run in runs if run["workload"] == workload]
        rows = rows_of(of_it, margin)
        parts.append(_text(workload, of_it, rows, margin))
        if figures is not None:
            figures.mkdir(parents=True, exist_ok=True)
            _draw(figures / f"convergence-{workload}.png", of_it, rows, margin)
    return "\n\n".join(parts)


def rows_of(runs: Sequence[Run], margin: float) -> list[dict[str, Any]]:
    """A variant each, in the order of the table, judged by `cccl converge`'s rule."""
    plain = [run for run in runs if run["way"] == PLAIN and "error" not in run]
    found = []
    for way in VARIANTS:
        own = [run for run in runs if run["way"] == way]
        if not own:
            continue
        errors = [run["error"] for run in own if "error" in run]
        if errors:
            found.append({"way": way, "error": errors[0]})
            continue
        row = {
            "way": way,
            "group": VARIANTS[way].group,
            "bits": statistics.mean(run["bits_per_value"] for run in own),
            "loss": statistics.mean(run["final"] for run in own),
            "norm": statistics.mean(_last(run["norms"]) for run in own),
        }
        if way != PLAIN:
            verdict = judge([*map(_as_judged, plain), *map(_as_judged, own)], margin)
            differences = [pair["difference"] for pair in verdict["pairs"]]
            row |= {
                "verdict": verdict["verdict"],
                "interval": verdict["interval"],
                "difference": statistics.mean(differences) if differences else None,
                "pairs": len(differences),
            }
        found.append(row)
    return found


def _as_judged(run: Run) -> dict[str, Any]:
    """The judge's own names for plain runs, and the one model of all simulated ranks."""
    way = "none" if run["way"] == PLAIN else run["way"]
    return {"way": way, "seed": run["seed"], "final": run["final"], "replicas_equal": True,
            "scores": {}}  # fmt: skip


def _last(values: Sequence[float]) -> float:
    """Mean of the last tenth."""
    return statistics.mean(values[-max(1, len(values) // 10) :])


def _text(
    workload: str, runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], margin: float
) -> str:
    first = next(run for run in runs if "error" not in run)
    settings = first["settings"]
    lines = [
        f"{workload}: {first['parameters']:,} parameters in {first['buckets']} buckets, "
        f"{settings['world']} ranks, {settings['steps']} steps, on {settings['device']}.",
        "",
        "| | bits per value | validation loss | difference to plain, 90 % | seeds | verdict "
        "| gradient norm |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['way']} | | | {row['error']} | | left out | |")
            continue
        between = verdict = seeds = ""
        if row["way"] != PLAIN:
            verdict, seeds = row["verdict"], str(row["pairs"])
            if row["difference"] is not None:
                between = f"{100 * row['difference']:+.2f} %"
            if row["interval"]:
                low, high = (f"{100 * end:+.2f}" for end in row["interval"])
                between += f" ({low} to {high})"
        lines.append(
            f"| {row['way']} | {row['bits']:.2f} | {row['loss']:.4f} | {between} | {seeds} "
            f"| {verdict} | {row['norm']:.3g} |"
        )
    lines += ["", *_fewest(rows, margin)]
    return "\n".join(lines)


def _fewest(rows: Sequence[Mapping[str, Any]], margin: float) -> list[str]:
    """What sent least without a loss that is worse, of fixed codecs and of noise budgets."""
    found = []
    for group in ("fixed", "noise budget"):
        good = [row for row in rows if row.get("group") == group and row["verdict"] in
                ("same", "better")]  # fmt: skip
        if good:
            least = min(good, key=lambda row: row["bits"])
            found.append(f"{group}: {least['way']}, {least['bits']:.2f} bits")
    if not found:
        return []
    return [f"Fewest bits with a loss within {100 * margin:g} % or better: {'; '.join(found)}."]


def _draw(
    file: Path, runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], margin: float
) -> None:
    """Loss over bits; losses over steps; bits over steps where they change."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise cccl.UnsupportedError("figures need matplotlib: pip install 'cccl[tools]'") from error
    figure, (over_bits, losses, bits) = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained")
    _draw_over_bits(over_bits, rows, margin)
    by_way: dict[str, list[Run]] = {}
    for run in runs:
        if "error" not in run:
            by_way.setdefault(run["way"], []).append(run)
    for way, own in by_way.items():
        group = VARIANTS[way].group
        if group in (PLAIN, "fixed", "sparse") or way == "PowerSGD rank 4":
            style = {"color": "black", "lw": 2.5} if way == PLAIN else {"lw": 1}
            losses.plot(_smooth(_mean(own, "losses")), label=way, **style)
        if "budget" in group:
            bits.plot(_mean(own, "bits"), label=way, lw=1)
    losses.set(title="training loss, mean of seeds", xlabel="step", yscale="log")
    bits.set(title="bits per value, mean of seeds (budgets)", xlabel="step")
    for axis in (losses, bits):
        if axis.lines:
            axis.legend(fontsize=8)
    figure.savefig(file, dpi=90)
    pyplot.close(figure)


def _draw_over_bits(axis: Any, rows: Sequence[Mapping[str, Any]], margin: float) -> None:
    """Differences to plain, with their intervals."""
    shown = [row for row in rows if row.get("interval")]
    groups = list(dict.fromkeys(row["group"] for row in shown))
    axis.axhspan(-100 * margin, 100 * margin, color="#eeeeee")
    for group, color in zip(groups, _COLORS, strict=False):
        own = [row for row in shown if row["group"] == group]
        middle = [100 * row["difference"] for row in own]
        half = [50 * (row["interval"][1] - row["interval"][0]) for row in own]
        axis.errorbar([row["bits"] for row in own], middle, yerr=half, fmt="o", ms=4,
                      color=color, label=group)  # fmt: skip
        for row, height in zip(own, middle, strict=True) if group in _NAMED else ():
            axis.annotate(row["way"], (row["bits"], height), fontsize=6, xytext=(3, 3),
                          textcoords="offset points")  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=200 * margin)
    axis.set(title=f"loss beside plain, 90 % intervals; grey: ±{100 * margin:g} %",
             xlabel="bits per value", ylabel="%")  # fmt: skip
    if groups:
        axis.legend(fontsize=8)


def _mean(runs: Sequence[Run], name: str) -> list[float]:
    return [statistics.mean(values) for values in zip(*(run[name] for run in runs), strict=True)]


def _smooth(values: Sequence[float]) -> list[float]:
    return [statistics.mean(values[max(0, i + 1 - _SMOOTHED) : i + 1]) for i in range(len(values))]
