"""What commands print: tables and progress, for a terminal (with rich, if installed) or a pipe."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Advance = Callable[[str], None]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """To standard output."""
    rich = _rich("table") if sys.stdout.isatty() else None
    if rich is None:
        print("\n".join([*([title] if title else []), *aligned(head, rows)]))
        return
    shown = rich.Table(*head, title=title or None, title_justify="left")
    for row in rows:
        shown.add_row(*row)
    importlib.import_module("rich.console").Console(highlight=False).print(shown)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


@contextlib.contextmanager
def progress(total: int, name: str, *, shown: bool = True) -> Iterator[Advance]:
    """On standard error: a bar on a terminal, in a pipe a line for each step. The function that it
    gives is called with what was just done."""
    if not shown:
        yield lambda done: None
        return
    rich = _rich("progress") if sys.stderr.isatty() else None
    if rich is None:
        count = 0

        def line(done: str) -> None:
            nonlocal count
            count += 1
            print(f"{name} {count}/{total}: {done}", file=sys.stderr, flush=True)

        yield line
        return
    console = importlib.import_module("rich.console").Console(stderr=True)
    columns = "{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), "{task.fields[at]}"
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=total, at="")
        yield lambda done: bar.update(task, advance=1, at=done)


def seconds(text: str) -> float:
    """An argparse type: 0.2, "208ms" or "5us" in seconds."""
    return _quantity(text, {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}, "time", "208ms")


def gbit(text: str) -> float:
    """An argparse type: 10, "10gbit" or "100mbit" in Gbit/s."""
    return _quantity(text, {"": 1.0, "gbit": 1.0, "mbit": 1e-3, "tbit": 1e3}, "rate", "10gbit")


def count(text: str) -> float:
    """An argparse type: "7e9" or "7B"."""
    return _quantity(text, {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}, "number", "7B")


def _quantity(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        assert match is not None
        return float(match[1]) * units[match[2]]
    except (AssertionError, KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}; write it as {example}") from None


def _rich(part: str) -> Any:
    try:
        return importlib.import_module(f"rich.{part}")
    except ModuleNotFoundError:
        return None
