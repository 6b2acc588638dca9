"""Tables and the picture of the demo's runs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.table import Table

Run = dict[str, Any]

# Of a link's rate, what TCP payload gets at an MTU of 1500: the rest is headers.
PAYLOAD_SHARE = 0.95
FORMULA = (
    "predicted step = computation + max(bytes sent x 8 / (0.95 x rate), communication on loopback)"
)
PLAIN_COLOUR, COLOURS = "#222222", ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]
SMOOTHED_STEPS = 10


def compute_seconds(runs: list[Run]) -> float:
    """Of a step that sends nothing, as measured at the end of each run."""
    return statistics.median(run["compute_seconds"] for run in runs)


def predicted_seconds(runs: list[Run], rate: float) -> list[float]:
    """Step time of each run on a link of `rate` bits per second, by `FORMULA`."""
    found = []
    for run in runs:
        on_loopback = run["step_seconds"] - run["compute_seconds"]
        link = run["sent_bytes_per_step"] * 8 / (PAYLOAD_SHARE * rate)
        found.append(compute_seconds(runs) + max(link, on_loopback))
    return found


def loss_table(runs: list[Run]) -> Table:
    """What compression does to the training, and the bytes that it sends."""
    first = runs[0]
    table = Table(
        title=f"On loopback: {first['ranks']} ranks, GPT of {first['parameters'] / 1e6:.1f} M "
        f"parameters, {first['gradient_bytes'] / 1e6:.1f} MB of gradients, "
        f"{len(first['losses'])} steps"
    )
    table.add_column("run", no_wrap=True)
    for title in ("validation\nloss", "against\nplain", "step\ntime", "sent\nper step", "ratio"):
        table.add_column(title, justify="right")
    table.add_column("replicas\nbitwise equal")
    for run in runs:
        table.add_row(
            run["run"],
            f"{_final(run):.4f}",
            "-" if run is first else f"{_final(run) - _final(first):+.4f}",
            _ms(run["step_seconds"]),
            _mb(run["sent_bytes_per_step"]),
            f"{run['ratio']:.2f}x",
            _equal(run),
        )
    return table


def link_table(runs: list[Run], lab: list[Run], rates: list[float]) -> Table:
    """Step times behind a limited link: measured if there are lab runs, predicted for `rates`."""
    table = Table(title="Step times behind a limited link")
    table.add_column("run", no_wrap=True)
    if lab:
        measured = f"measured at\n{rate_name(lab[0]['netlab']['rate_bps'])}"
        table.add_column(measured, justify="right")
    for rate in rates:
        table.add_column(f"predicted at\n{rate_name(rate)}", justify="right")
    if lab:
        table.add_column("on the wire\n(ratio)", justify="right")
        table.add_column("replicas\nbitwise equal")
    for i, run in enumerate(runs):
        cells = [run["run"]]
        if lab:
            cells.append(_with_gain(lab[i]["step_seconds"], lab[0]["step_seconds"]))
        for rate in rates:
            predicted = predicted_seconds(runs, rate)
            cells.append(_with_gain(predicted[i], predicted[0]))
        if lab:
            gain = wire_bytes(lab[0]) / wire_bytes(lab[i])
            cells += [f"{_mb(wire_bytes(lab[i]))} ({gain:.2f}x)", _equal(lab[i])]
        table.add_row(*cells)
    return table


def wire_bytes(run: Run) -> float:
    """What the lab counted per rank: every header, and DDP's first broadcast of the weights."""
    return float(run["netlab"]["wire_bytes_total"] / run["ranks"])


def rate_name(rate: float) -> str:
    """1e9 as "1 Gbit/s"."""
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def draw(runs: list[Run], lab: list[Run], rate: float, path: Path) -> None:
    """Writes the picture: loss curves, their distance, and step times at `rate`."""
    figure, ((training, steps), (validation, differences)) = plt.subplots(
        2, 2, figsize=(13, 8), width_ratios=[3, 2], layout="constrained"
    )
    _draw_training(training, runs)
    _draw_validation(validation, runs)
    _draw_differences(differences, runs)
    _draw_steps(steps, runs, lab, rate)
    first = runs[0]
    figure.suptitle(
        f"GPT, {first['parameters'] / 1e6:.1f} M parameters, DDP over gloo, {first['ranks']} ranks:"
        " plain and compressed gradients",
        fontsize=13,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_training(axes: Any, runs: list[Run]) -> None:
    for run, style in zip(runs, _styles(runs), strict=True):
        smooth = _moving_mean(run["losses"])
        axes.plot(range(1, len(smooth) + 1), smooth, label=run["run"], **style)
    title = f"Training loss, all ranks, mean of {SMOOTHED_STEPS} steps"
    axes.set(xlabel="step", ylabel="nats per byte", title=title)
    axes.legend(frameon=False)
    _tidy(axes)


def _draw_validation(axes: Any, runs: list[Run]) -> None:
    for run, style in zip(runs, _styles(runs), strict=True):
        label = f"{run['run']}: {_final(run):.4f}"
        axes.plot(*zip(*run["validation"], strict=True), "o-", label=label, **style)
    axes.set(xlabel="step", ylabel="nats per byte", title="Validation loss, files held out")
    axes.legend(title="after the last step", frameon=False)
    _tidy(axes)


def _draw_differences(axes: Any, runs: list[Run]) -> None:
    steps, plain = zip(*runs[0]["validation"], strict=True)
    axes.axhline(0, color=PLAIN_COLOUR, lw=3)
    for run, colour in list(zip(runs, _colours(runs), strict=True))[1:]:
        found = [loss - base for (_, loss), base in zip(run["validation"], plain, strict=True)]
        axes.plot(steps, found, "o-", color=colour, ms=4, label=run["run"])
    axes.set(xlabel="step", ylabel="nats per byte", title="Validation loss minus that of plain")
    axes.legend(frameon=False)
    _tidy(axes)


def _draw_steps(axes: Any, runs: list[Run], lab: list[Run], rate: float) -> None:
    predicted = predicted_seconds(runs, rate)
    seconds = [run["step_seconds"] for run in lab] or predicted
    names = [run["run"] for run in runs]
    bars = axes.barh(names, [1e3 * s for s in seconds], color=_colours(runs), height=0.6)
    texts = [_with_gain(s, seconds[0]) for s in seconds]
    axes.bar_label(bars, texts, label_type="center", color="white", weight="bold")
    if lab:
        marker = {"color": "white", "mec": "black", "ms": 8}
        axes.plot([1e3 * s for s in predicted], names, "D", label="predicted", **marker)
        axes.legend(loc="lower right")
    axes.invert_yaxis()
    how = "measured" if lab else "predicted"
    axes.set(xlabel="ms, median", title=f"Step time behind {rate_name(rate)} links, {how}")
    _tidy(axes)
    axes.grid(visible=False, axis="y")


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _colours(runs: list[Run]) -> list[str]:
    return [PLAIN_COLOUR, *(COLOURS[i % len(COLOURS)] for i in range(len(runs) - 1))]


def _styles(runs: list[Run]) -> list[dict[str, Any]]:
    """Of lines: each narrower than the one below, so that curves that coincide all show."""
    widths = [max(7.0 - 2.5 * i, 1.5) for i in range(len(runs))]
    return [{"color": c, "lw": w, "ms": w + 4} for c, w in zip(_colours(runs), widths, strict=True)]


def _moving_mean(values: list[float]) -> list[float]:
    windows = (values[max(0, i - SMOOTHED_STEPS + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _final(run: Run) -> float:
    return float(run["validation"][-1][1])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def _with_gain(seconds: float, plain: float) -> str:
    return f"{_ms(seconds)} ({plain / seconds:.2f}x)"


def _equal(run: Run) -> str:
    return f"yes, all {run['ranks']}" if run["replicas_equal"] else "NO"
