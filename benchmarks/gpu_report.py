"""Tables and figures of what gpu_collectives.sh and cuda_codecs.sh measured.

    OUT=gpu-results benchmarks/gpu_collectives.sh build bench cast sockets overlap hierarchy ddp
    OUT=gpu-results benchmarks/cuda_codecs.sh bench
    python benchmarks/gpu_report.py gpu-results [--figures docs/figures]

Prints Markdown; every speed-up is against plain NCCL in the same run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Row = dict[str, Any]
BITS = {"block_float8": "8 bits", "block_float4": "4 bits", "cast_bf16": "bf16"}
RATES = {
    "100mbit": "100 Mbit/s",
    "1gbit": "1 Gbit/s",
    "10gbit": "10 Gbit/s",
    "20gbit": "20 Gbit/s",
    "none": "no limit",
}
SOCKETS_BYTES = 64 << 20
COLOURS = {"block_float8": "#4c78a8", "block_float4": "#e45756", "auto": "#54a24b"}
NAMES = BITS | {
    "none": "no communication",
    "fp32": "float32",
    "bf16": "bf16 hook",
    "powersgd": "PowerSGD, rank 4",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="the folder OUT of the scripts")
    parser.add_argument("--figures", type=Path, help="write PNG files here")
    options = parser.parse_args()
    links = read(options.results, "bench-")
    tables: list[tuple[str, Iterable[str]]] = [
        ("All-reduce of bfloat16 beside plain NCCL", speeds(links)),
        ("64 MiB of float32 at 10 Gbit/s", others(read(options.results, "cast"))),
        ("64 MiB without a limit, by NCCL's threads and sockets of each", sockets(options.results)),
        ("Two hosts with two ranks each, 10 Gbit/s", legs(read(options.results, "hierarchy"))),
        ("Codec work that no transfer hides", overlaps(read(options.results, "overlap"))),
        ("A step of the GPT with 86 million parameters", steps(read(options.results, "ddp"))),
        ("Codecs, share of a device copy", codecs(read(options.results, "bench.json"))),
    ]
    for title, lines in tables:
        found = list(lines)
        if len(found) > 2:  # more than a table's head
            print(f"## {title}\n", *found, "", sep="\n")
    if options.figures:
        draw(links, options.figures / "gpu-collectives.png")


def read(folder: Path, step: str) -> list[Row]:
    """Rows of a step; its files' names say where: STEP-HOSTS-RATE-SETTINGS.json."""
    rows = []
    for path in sorted(folder.glob(f"{step}*")):
        _, *parts = path.stem.split("-")
        if path.suffix != ".json" or (parts and not parts[0].isdigit()):
            continue
        where: Row = dict(zip(("hosts", "rate", "settings"), parts, strict=False))
        if where:
            where["hosts"] = int(parts[0])
        rows += [json.loads(line) | where for line in path.read_text().splitlines()]
    return rows


def table(*head: str) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]


def size(nbytes: int) -> str:
    kib = nbytes / 1024
    return f"{kib / 1024:g} MiB" if kib >= 1024 else f"{kib:g} KiB"


def speeds(rows: Sequence[Row]) -> Iterable[str]:
    """Fixed codecs and auto in every place, and auto beside the best of what it may choose."""
    yield from table("hosts", "link", "size", "plain", "8 bits", "4 bits", "auto", "of the best",
                     "plain, of itself")  # fmt: skip
    order = sorted(rows, key=lambda r: (r["hosts"], list(RATES).index(r["rate"]), r["bytes"]))
    for row in order:
        codecs = [f"{name}_over_plain" for name in ("block_float8", "block_float4")]
        cells = [f"{row[name]:.2f}x" if name in row else "" for name in codecs]
        auto = f"{row['auto_over_plain']:.2f}x{' c' if row['went'] == 'compressed' else ''}"
        yield (f"| {row['hosts']} | {RATES[row['rate']]} | {size(row['bytes'])} | "
               f"{row['plain_ms']:.3g} ms | {' | '.join(cells)} | {auto} | "
               f"{row['auto_over_best']:.2f} | {row['noise']:.2f} |")  # fmt: skip


def sockets(folder: Path) -> Iterable[str]:
    """Beside plain NCCL with the same settings, and with the fastest of all. `bench` has those that
    NCCL takes by itself."""
    rows = read(folder, "sockets")
    for row in read(folder, "bench-"):
        if (row["rate"], row["bytes"]) == ("none", SOCKETS_BYTES):
            for codec in ("block_float8", "block_float4"):
                ms = {"baseline_ms": row["plain_ms"], "ms": row[f"{codec}_ms"]}
                rows.append(row | ms | {"codec": codec, "settings": "NCCL's own"})
    rows.sort(key=lambda row: row["hosts"])
    best: dict[int, float] = {}
    for row in rows:
        best[row["hosts"]] = min(row["baseline_ms"], best.get(row["hosts"], row["baseline_ms"]))
    yield from table("hosts", "threads x sockets", "codec", "plain", "ours", "the same settings",
                     "plain's best")  # fmt: skip
    for row in rows:
        yield (f"| {row['hosts']} | {row['settings']} | {BITS[row['codec']]} | "
               f"{row['baseline_ms']:.1f} ms | {row['ms']:.1f} ms | "
               f"{row['baseline_ms'] / row['ms']:.2f}x | "
               f"{best[row['hosts']] / row['ms']:.2f}x |")  # fmt: skip


def legs(rows: Sequence[Row]) -> Iterable[str]:
    yield from table("", "time", "a host's link carries")
    for row in rows:
        yield f"| {row['way']} | {row['ms']:.1f} ms | {row['host_link_mb']:.1f} MB |"


def others(rows: Sequence[Row]) -> Iterable[str]:
    yield from table("hosts", "codec", "plain", "ours", "")
    for row in rows:
        yield (f"| {row['hosts']} | {BITS[row['codec']]} | {row['baseline_ms']:.1f} ms | "
               f"{row['ms']:.1f} ms | {row['speedup']:.2f}x |")  # fmt: skip


def overlaps(rows: Sequence[Row]) -> Iterable[str]:
    yield from table("hosts", "codec", "beyond the first encode and the last decode")
    for row in rows:
        share = 100 * row["exposed_beyond_share"]
        yield f"| {row['world_size']} | {BITS[row['codec']]} | {share:.1f} % of the time |"


def steps(rows: Sequence[Row]) -> Iterable[str]:
    yield from table("", "step", "backward", "hook's host time")
    for row in rows:
        host = f"{row['hook_host_us']:.0f} us" if row["hook_host_us"] else ""
        yield (f"| {NAMES[row['way']]} {row['settings']} | {row['step_ms']:.0f} ms | "
               f"{row['backward_ms']:.0f} ms | {host} |")  # fmt: skip


def codecs(rows: Sequence[Row]) -> Iterable[str]:
    yield from table("codec", "values", "encode", "decode", "sum, re-encoded", "sum")
    for row in rows:
        if not row.get("encode_of_copy"):
            continue
        kind = [row["codec"], row["level"] if row["level"] != "fast" else "",
                "rotated" if row.get("rotation", "none") != "none" else ""]  # fmt: skip
        shares = (row[f"{name}_of_copy"] for name in ("encode", "decode", "reduce", "accumulate"))
        nbytes = row["numel"] * (4 if row["dtype"] == "float32" else 2)
        yield (f"| {' '.join(filter(None, kind))} | {size(nbytes)} of {row['dtype']} | "
               + " | ".join(f"{share:.2f}" for share in shares) + " |")  # fmt: skip


def draw(rows: Sequence[Row], to: Path) -> None:
    """Speed-ups over sizes: a panel for each number of hosts and each link."""
    hosts = sorted({row["hosts"] for row in rows})
    rates = [rate for rate in RATES if any(row["rate"] == rate for row in rows)]
    figure, axes = pyplot.subplots(len(hosts), len(rates), sharex=True, sharey=True, squeeze=False,
                                   figsize=(3 * len(rates), 2.6 * len(hosts)))  # fmt: skip
    for i, count in enumerate(hosts):
        for j, rate in enumerate(rates):
            panel = axes[i][j]
            panel.axhline(1, color="grey", linewidth=0.8)
            for codec, colour in COLOURS.items():
                here = [r for r in rows if (r["hosts"], r["rate"]) == (count, rate)]
                found = [r for r in here if f"{codec}_over_plain" in r]
                line = sorted((r["bytes"], r[f"{codec}_over_plain"]) for r in found)
                if line:
                    panel.plot(*zip(*line, strict=True), color=colour, marker=".",
                               label=BITS.get(codec, codec))  # fmt: skip
            panel.set_title(f"{count} hosts, {RATES[rate]}")
            panel.set_xscale("log", base=2)
    for panel in axes[-1]:
        panel.set_xlabel("bytes")
    for row in axes:
        row[0].set_ylabel("of plain NCCL")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(to, dpi=110)


if __name__ == "__main__":
    main()
