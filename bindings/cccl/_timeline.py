"""Spans of computation, communication and codec work in a step: arithmetic and a picture."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UnsupportedError

Span = tuple[float, float]  # begin and end, in seconds
KINDS = ("compute", "communication", "codec")
COLOURS = {"compute": "#4c78a8", "communication": "#e45756", "codec": "#f2a541"}


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that a row (a thread or a stream) was busy with."""

    kind: str
    row: str
    span: Span


def merged(spans: Iterable[Span]) -> list[Span]:
    """In order, without overlaps."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> float:
    """Of merged spans."""
    return sum(end - begin for begin, end in spans)


def common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Where both are, of merged spans."""
    found, at = [], 0
    for begin, end in some:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        for other in others[at:]:
            if other[0] >= end:
                break
            found.append((max(begin, other[0]), min(end, other[1])))
    return found


def parts(events: Iterable[Event], steps: Sequence[Span]) -> dict[str, float]:
    """Seconds per step. Communication is exposed where nothing computes, codec work where nothing
    computes or communicates; `other` is where none of the three is under way."""
    windows = merged(steps)
    spans: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for event in events:
        spans[event.kind].append(event.span)
    compute, sent, codec = (common(merged(spans[kind]), windows) for kind in KINDS)
    hidden = length(common(sent, compute))
    beside = length(common(codec, merged([*compute, *sent])))
    busy = length(merged([*compute, *sent, *codec]))
    seconds = {
        "step": length(windows),
        "compute": length(compute),
        "communication": length(sent),
        "communication_exposed": length(sent) - hidden,
        "communication_hidden": hidden,
        "codec": length(codec),
        "codec_exposed": length(codec) - beside,
        "codec_hidden": beside,
        "other": length(windows) - busy,
    }
    return {name: value / len(steps) for name, value in seconds.items()}


def matplotlib() -> Any:
    """The module; `UnsupportedError` where it is not installed."""
    try:
        return importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "a picture needs matplotlib: pip install 'cccl[tools]', or leave the output out"
        ) from error


def draw(path: Path, ways: Mapping[str, tuple[Sequence[Event], Span]]) -> None:
    """One step of each way below the other, on one scale; a row for each thread or stream."""
    matplotlib().use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    rows = {
        name: list(dict.fromkeys(e.row for e in sorted(events, key=_rank)))
        for name, (events, _) in ways.items()
    }
    heights = [max(1, len(found)) for found in rows.values()]
    figure, axes = plt.subplots(
        len(ways), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(12, 1.2 + 0.45 * sum(heights)), height_ratios=heights,
    )  # fmt: skip
    for axis, (name, (events, (begin, end))) in zip(axes[:, 0], ways.items(), strict=True):
        for at, row in enumerate(rows[name]):
            for kind, colour in COLOURS.items():
                spans = merged(e.span for e in events if e.row == row and e.kind == kind)
                spans = common(spans, [(begin, end)])
                bars = [(1e3 * (a - begin), 1e3 * (b - a)) for a, b in spans]
                axis.broken_barh(bars, (at - 0.4, 0.8), color=colour, label=kind)
        axis.set_yticks(range(len(rows[name])), rows[name])
        axis.invert_yaxis()
        axis.axvline(1e3 * (end - begin), color="black", lw=1, ls=":")
        axis.set_title(f"{name}: {1e3 * (end - begin):.1f} ms", loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms of one step")
    patches = importlib.import_module("matplotlib.patches")
    seen = {event.kind for events, _ in ways.values() for event in events}
    handles = [patches.Patch(color=COLOURS[kind], label=kind) for kind in KINDS if kind in seen]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(KINDS), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _rank(event: Event) -> tuple[int, str]:
    return KINDS.index(event.kind), event.row
