"""`watch`: live statistics of a job that `cccl.monitor.Monitor` publishes."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from . import _show, monitor
from .errors import ConfigError

HEAD = ("rank", "label", "collective", "codec", "calls/s", "MB/s sent", "ratio", "ms/call",
        "waiting", "error", "failures")  # fmt: skip


def add_command(commands: Any) -> None:
    """Adds `watch` to the command line."""
    command = commands.add_parser(
        "watch",
        help="live statistics of a running job, from the files or ports of cccl.monitor.Monitor",
        epilog="example: python -m cccl watch 9400 9401     or: python -m cccl watch stats.*.prom",
    )
    add = command.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="a file, a port of this machine, or a URL")
    add("--interval", type=_show.seconds, default=2.0, metavar="TIME", help="(default: 2s)")
    add("--count", type=int, help="of looks, then end (default: until Ctrl-C)")
    add("--json", action="store_true", help="one JSON object per look")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Until Ctrl-C, or as often as asked."""
    if options.interval <= 0 or (options.count is not None and options.count < 1):
        raise ConfigError("watch takes an interval above 0, and a count from 1")
    try:
        _watch(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


def _watch(options: argparse.Namespace) -> None:
    live = None
    rich = _show._rich("live") if sys.stdout.isatty() and not options.json else None
    before, at = look(options.sources), time.monotonic()
    if rich is not None:
        live = rich.Live(_table(rows(before, before, 0.0)), auto_refresh=False)
        live.start()
    looked = 0
    try:
        while options.count is None or looked < options.count:
            time.sleep(options.interval)
            now, then = look(options.sources), time.monotonic()
            shown = rows(before, now, then - at)
            before, at, looked = now, then, looked + 1
            if live is not None:
                live.update(_table(shown), refresh=True)
            elif options.json:
                print(json.dumps({"seconds": options.interval, "rows": shown}), flush=True)
            else:
                print("\n".join(_show.aligned(HEAD, [_cells(row) for row in shown])), flush=True)
    finally:
        if live is not None:
            live.stop()


Sample = dict[tuple[str, ...], dict[str, float]]


def look(sources: list[str]) -> Sample:
    """The counters of all sources, by their labels. Raises `ConfigError` for one that cannot be
    read or holds something else."""
    parse = monitor.client(".parser").text_string_to_metric_families
    found: Sample = {}
    for source in sources:
        try:
            families = list(parse(_read(source)))
        except ValueError as error:
            raise ConfigError(f"{source!r} is no Prometheus text: {error}") from error
        if not any(family.name.startswith("cccl_") for family in families):
            raise ConfigError(f"{source!r} holds no statistics of cccl")
        for family in families:
            name = family.name.removeprefix("cccl_")
            if name in monitor.COUNTERS or name in monitor.GAUGES:
                for sample in family.samples:
                    key = tuple(sample.labels[label] for label in monitor.LABELS)
                    found.setdefault(key, {})[name] = sample.value
    return found


def rows(before: Sample, now: Sample, seconds: float) -> list[dict[str, Any]]:
    """Per second and per call since `before`; where nothing happened, since the job began."""
    shown = []
    per_second = 1 / seconds if seconds else 0.0
    for key, values in sorted(now.items()):
        labels = dict(zip(monitor.LABELS, key, strict=True))
        base = before.get(key, {})
        passed = values["calls"] - base.get("calls", 0)
        base = base if passed > 0 else {}
        new = {name: values[name] - base.get(name, 0) for name in monitor.COUNTERS}
        busy, calls = new["total_seconds"], new["calls"]
        shown.append({
            **labels,
            "calls_per_second": max(0.0, passed) * per_second,
            "sent_mb_per_second": new["bytes_sent"] / 1e6 * per_second if passed > 0 else 0.0,
            "ratio": new["plain_bytes"] / new["bytes_sent"] if new["bytes_sent"] else 1.0,
            "ms_per_call": 1e3 * new["latency_seconds"] / calls if calls else 0.0,
            "waiting_share": new["exposed_seconds"] / busy if busy else None,
            "relative_error": values["relative_error"],
            "failures": int(values["failures"]),
        })  # fmt: skip
    return shown


def _read(source: str) -> str:
    if source.isdigit():
        source = f"http://{monitor.LOOPBACK}:{source}/metrics"
    try:
        if source.startswith(("http://", "https://")):
            with urllib.request.urlopen(source, timeout=10) as reply:
                return str(reply.read().decode())
        return Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        hint = "is the job running, with cccl.monitor.Monitor?"
        raise ConfigError(f"cannot read {source!r}: {error}; {hint}") from error


def _cells(row: dict[str, Any]) -> list[str]:
    waiting = row["waiting_share"]
    plain = f"plain ({row['reason']})" if row["reason"] else row["codec"].partition("(")[0]
    return [
        row["rank"], row["label"], row["collective"], plain,
        f"{row['calls_per_second']:.1f}", f"{row['sent_mb_per_second']:.2f}",
        f"{row['ratio']:.2f}x", f"{row['ms_per_call']:.2f}",
        "-" if waiting is None else f"{waiting:.0%}", f"{row['relative_error']:.1e}",
        str(row["failures"]),
    ]  # fmt: skip


def _table(shown: list[dict[str, Any]]) -> Any:
    table = importlib.import_module("rich.table").Table(*HEAD)
    for row in shown:
        table.add_row(*_cells(row))
    return table
