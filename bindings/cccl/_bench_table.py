"""`bench table`: every codec and collective over a range of sizes; table, JSON, CSV and a figure.

Sizes and bandwidths are defined as in nccl-tests: of reduce_scatter and all_gather the size is the
whole tensor's; the algorithm bandwidth is size over time; the bus bandwidth is that times a factor
of the collective, so that what plain reaches is comparable with the link's rate. A compressed
collective's bus bandwidth counts uncompressed values: above the link's rate, it is a gain.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _show, _timeline
from ._rules import COLLECTIVES, PLAIN, parse_bytes
from .errors import ConfigError, UnsupportedError

LEAST, MOST = 1 << 10, 1 << 30  # bytes
FEWEST = 3  # calls that a percentile is taken of
COLUMNS = ("collective", "way", "bytes", "dtype", "world_size", "device", "calls", "first_ms",
           "p50_ms", "p90_ms", "p99_ms", "least_ms", "algorithm_gbps", "bus_gbps",
           "plain_bus_gbps", "ratio", "skipped")  # fmt: skip


def add_command(kinds: Any) -> None:
    """Adds `bench table`."""
    command = kinds.add_parser(
        "table",
        help="one process per rank: every codec and collective from 1 KiB to 1 GiB, beside plain "
        "and PyTorch's own hooks",
        epilog="example: torchrun --nproc-per-node 2 -m cccl bench table --output bench",
    )
    add = command.add_argument
    add("--collective", nargs="+", default=list(COLLECTIVES), choices=COLLECTIVES)
    add("--codec", nargs="+", default=["all"], help="names or aliases, or 'all' (default)")
    add("--no-peers", action="store_true", help="leave PyTorch's bf16, fp16 and PowerSGD hooks out")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add("--dtype", default="float32", help="of the values (default: float32)")
    add("--least", type=parse_bytes, default=LEAST, metavar="SIZE", help="(default: 1KiB)")
    add("--most", type=parse_bytes, default=MOST, metavar="SIZE", help="(default: 1GiB)")
    add("--factor", type=int, default=4, help="between sizes (default: %(default)s)")
    add("--repeats", type=int, default=20, help="calls of each, at most (default: %(default)s)")
    add("--seconds", type=float, default=3.0, metavar="S",
        help="for the calls of each; left out if 3 take longer (default: %(default)s)")  # fmt: skip
    add("--deadline", type=float, default=300.0, help="seconds per wait (default: %(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="for bench.json, bench.csv and bench.png")
    add("--json", action="store_true", help="one JSON object per line, from rank 0")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """In each rank's process; 0 once it has measured."""
    if options.factor < 2 or options.repeats < FEWEST or not options.seconds > 0:
        raise ConfigError(f"table takes a factor from 2, repeats from {FEWEST}, seconds above 0")
    if not 0 < options.least <= options.most:
        raise ConfigError(f"least = {options.least}, most = {options.most}; allowed: 1 or more, "
                          "and the least not above the most")  # fmt: skip
    if options.output is not None:
        _timeline.matplotlib()  # missed now rather than after all has been measured
    try:
        module = importlib.import_module("cccl.torch._bench_table")
        launched = importlib.import_module("cccl.torch._launched").launched
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"bench table needs {error.name}: pip install 'cccl[torch]'"
        ) from error
    with launched("bench table", options.device, options.deadline) as device:
        rows = module.measure(options, device)
        first = importlib.import_module("torch.distributed").get_rank() == 0
    if first:
        show(rows, options)
    return 0


def sizes(least: int, most: int, factor: int) -> list[int]:
    """From the least, each `factor` times the one before."""
    found = [least]
    while found[-1] * factor <= most:
        found.append(found[-1] * factor)
    return found


def bus_factor(collective: str, world: int) -> float:
    """Bus over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""
    others = world - 1
    return {
        "all_reduce": 2 * others / world,
        "reduce_scatter": others / world,
        "all_gather": others / world,
        "broadcast": 1.0,
    }[collective]


def timed(collective: str, nbytes: int, world: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Columns of a row, from the slowest rank's times."""
    ordered = sorted(seconds)
    cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    algorithm = nbytes / cuts[49] / 1e9
    return {
        "calls": len(ordered),
        "p50_ms": 1e3 * cuts[49],
        "p90_ms": 1e3 * cuts[89],
        "p99_ms": 1e3 * cuts[98],
        "least_ms": 1e3 * ordered[0],
        "algorithm_gbps": algorithm,
        "bus_gbps": algorithm * bus_factor(collective, world),
    }


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Prints the rows, and writes files if asked."""
    plain = {(row["collective"], row["bytes"]): row.get("bus_gbps") for row in rows
             if row["way"] == PLAIN}  # fmt: skip
    for row in rows:
        row["plain_bus_gbps"] = plain.get((row["collective"], row["bytes"]))
    if options.output is not None:
        write(rows, options.output)
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return
    head = ["collective", "way", "bytes", "p50 ms", "p90 ms", "p99 ms", "alg GB/s", "bus GB/s",
            "of plain", "ratio"]  # fmt: skip
    _show.table(head, [_cells(row) for row in rows])
    if options.output is not None:
        print(f"files: {options.output}")


def write(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """bench.json, bench.csv, bench.png."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(list(rows), indent=1))
        with (folder / "bench.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(rows)
        _draw(rows, folder / "bench.png")
    except OSError as error:
        raise ConfigError(f"cannot write to {str(folder)!r}: {error}") from error


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [row["collective"], row["way"], str(row["bytes"])]
    if "skipped" in row:
        return [*cells, f"left out: {row['skipped']}", "", "", "", "", "", ""]
    cells += [f"{row[key]:.4g}" for key in ("p50_ms", "p90_ms", "p99_ms", "algorithm_gbps")]
    plain = row["plain_bus_gbps"]
    cells += [f"{row['bus_gbps']:.4g}", f"{row['bus_gbps'] / plain:.2f}x" if plain else "-"]
    return [*cells, f"{row['ratio']:.2f}x" if row.get("ratio") else "-"]


def _draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Bus bandwidth by size, an axis for each collective."""
    _timeline.matplotlib().use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    collectives = list(dict.fromkeys(row["collective"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    figure, axes = pyplot.subplots(
        1, len(collectives), figsize=(6 * len(collectives), 5), layout="constrained", squeeze=False
    )
    colours = pyplot.get_cmap("tab20")
    for axis, collective in zip(axes[0], collectives, strict=True):
        for number, way in enumerate(ways):
            of = [row for row in rows if (row["collective"], row["way"]) == (collective, way)]
            points = [(row["bytes"], row["bus_gbps"]) for row in of if "bus_gbps" in row]
            if points:
                style = {"color": "black", "lw": 3} if way == PLAIN else {"color": colours(number)}
                axis.plot(*zip(*points, strict=True), marker=".", label=way, **style)
        axis.set(title=collective, xscale="log", yscale="log", xlabel="bytes")
    axes[0][0].set_ylabel("bus bandwidth of values, GB/s")
    fullest = max(axes[0], key=lambda axis: len(axis.lines))
    figure.legend(*fullest.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
