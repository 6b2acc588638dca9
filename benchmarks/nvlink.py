#!/usr/bin/env python3
"""Collectives between the GPUs of one host, beside plain NCCL in the same run.

    torchrun --standalone --nproc-per-node gpu benchmarks/nvlink.py [--json]
    python benchmarks/nvlink.py --report FILE [--figure PNG]

Of bfloat16, as nccl-tests: calls follow each other, the time is their mean. "call" has the host
launch them; "device" gives it a head start, as training does, so that only the GPU's time counts.
Every round times each way once, in an order that changes; speed-ups are medians of the rounds' own
ratios; that of "again" is of plain to itself. Results are compared with plain NCCL's, and bit by
bit between ranks. GB/s are nccl-tests' bus bandwidth. Rank 0 prints a line per size, and with
--json an object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cccl
import cccl.torch
from cccl._rules import parse_bytes

SIZES = ["1KiB", "16KiB", "256KiB", "1MiB", "4MiB", "16MiB", "25MiB", "64MiB", "256MiB", "1GiB"]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")
CODECS = {"8": "block_float8", "4": "block_float4"}
HEAD_START = 400_000  # clock cycles for each call, more than the host takes to launch it
MOST_BYTES = 1 << 29  # that the calls of one time move


class Case:
    """One collective of one size: the whole tensor of every rank, and a part."""

    def __init__(self, collective: str, nbytes: int, device: torch.device):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.collective, self.nbytes = collective, nbytes
        count = max(world, nbytes // 2 // world * world)
        generator = torch.Generator(device).manual_seed(rank)
        self.values = torch.randn(count, generator=generator, device=device).to(torch.bfloat16)
        self.whole = self.values.clone()
        self.part = self.values[: count // world].clone()

    def restore(self) -> None:
        self.whole.copy_(self.values)
        self.part.copy_(self.values[: self.part.numel()])

    def plain(self) -> None:
        if self.collective == "all_reduce":
            dist.all_reduce(self.whole, dist.ReduceOp.AVG)
        elif self.collective == "reduce_scatter":
            dist.reduce_scatter_tensor(self.part, self.whole, dist.ReduceOp.AVG)
        else:
            dist.all_gather_into_tensor(self.whole, self.part)

    def ours(self, config: cccl.Config, label: str) -> None:
        if self.collective == "all_reduce":
            cccl.torch.all_reduce(self.whole, config=config, label=label)
        elif self.collective == "reduce_scatter":
            cccl.torch.reduce_scatter(self.part, self.whole, config=config, label=label)
        else:
            cccl.torch.all_gather(self.whole, self.part, config=config, label=label)

    @property
    def result(self) -> torch.Tensor:
        return self.part if self.collective == "reduce_scatter" else self.whole

    def bus_bytes(self) -> float:
        """What nccl-tests count as moved over the slowest link."""
        world = dist.get_world_size()
        return self.nbytes * (world - 1) / world * (2 if self.collective == "all_reduce" else 1)

    def check(self, call: Callable[[], None]) -> tuple[float, bool]:
        """The difference to plain NCCL's result, relative, and whether all ranks have the same."""
        self.restore()
        self.plain()
        exact = self.result.clone()
        self.restore()
        call()
        found = self.result
        error = (found.float() - exact.float()).norm() / exact.float().norm()
        bits = found.view(torch.int16).to(torch.int32)
        least, most = bits.clone(), bits.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        same = self.collective == "reduce_scatter" or torch.equal(least, most)
        return float(error), bool(same)


def timed(call: Callable[[], None], calls: int, head_start: bool) -> float:
    """Milliseconds of a call, of the slowest rank."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    if head_start:
        torch.cuda._sleep(HEAD_START * calls)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    found = torch.tensor(begin.elapsed_time(end) / calls, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def measure(case: Case, configs: dict[str, cccl.Config], rounds: int) -> dict[str, Any]:
    ways: dict[str, Callable[[], None]] = {"plain": case.plain, "again": case.plain}
    for name, config in configs.items():
        ways[name] = lambda config=config, name=name: case.ours(config, name)
    row: dict[str, Any] = {
        "collective": case.collective,
        "bytes": case.nbytes,
        "world_size": dist.get_world_size(),
    }
    for name in configs:
        row[f"{name}_error"], row[f"{name}_equal"] = case.check(ways[name])
    calls = max(2, min(20, MOST_BYTES // max(1, case.nbytes)))
    shuffle = random.Random(case.nbytes)  # the same order on every rank
    for kind in ("call", "device"):
        for call in ways.values():
            timed(call, 3, False)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name in shuffle.sample(list(ways), len(ways)):
                case.restore()
                times[name].append(timed(ways[name], calls, kind == "device"))
        for name, found in times.items():
            over = statistics.median(a / b for a, b in zip(times["plain"], found, strict=True))
            row[f"{kind}_{name}_ms"] = statistics.median(found)
            row[f"{kind}_{name}_speedup"] = over
    row["bus_gbps"] = case.bus_bytes() / row["device_plain_ms"] / 1e6
    rows = cccl.stats()["rows"]
    row["ways"] = sorted({r["algorithm"] for r in rows if r["calls"] and not r["plain"]})
    went = [r for r in rows if r["label"] == "auto"]
    row["auto"] = " ".join(sorted({"plain" if r["plain"] else "compressed" for r in went}))
    return row


def line(row: dict[str, Any]) -> str:
    """For people."""
    text = (
        f"{row['collective']:14} {row['bytes'] >> 10:8} KiB  plain {row['device_plain_ms']:7.3f} ms"
    )
    for name in (*CODECS, "auto"):
        if f"call_{name}_ms" in row:
            text += (
                f"  {name}: {row[f'call_{name}_speedup']:.2f}x {row[f'device_{name}_speedup']:.2f}x"
            )
    return text


def run(options: argparse.Namespace) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for collective in options.collectives:
        configs = {
            name: cccl.Config(
                compression_type=codec, collective_filter=COLLECTIVES, strict=True,
                peer_memory=options.peer_memory,
            )
            for name, codec in CODECS.items()
        }  # fmt: skip
        if collective == "all_reduce":  # which auto is about
            configs["auto"] = cccl.Config(compression_type="auto", auto_codecs=["block_float8"])
        for nbytes in options.sizes:
            cccl.reset_stats()
            size = parse_bytes(nbytes) if isinstance(nbytes, str) else nbytes
            row = measure(Case(collective, size, device), configs, options.rounds)
            if dist.get_rank() == 0:
                print(json.dumps(row) if options.json else line(row), flush=True)
    dist.destroy_process_group()


def report(file: Path, figure: Path | None) -> None:
    """Markdown tables, and a picture of the speed-ups by size."""
    rows = [json.loads(text) for text in file.read_text().splitlines() if text.startswith("{")]
    for collective in COLLECTIVES:
        found = [row for row in rows if row["collective"] == collective]
        if not found:
            continue
        print(f"### {collective}, {found[0]['world_size']} GPUs\n")
        print("| size | plain | GB/s | 8 bits, calls | device | 4 bits, calls | device | auto |")
        print("|---|---|---|---|---|---|---|---|")
        for row in found:
            kib = row["bytes"] >> 10
            cells = [
                f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB",
                f"{1e3 * row['device_plain_ms']:.0f} us",
                f"{row['bus_gbps']:.0f}",
            ]
            for name in CODECS:
                cells += [f"{row[f'{kind}_{name}_speedup']:.2f}x" for kind in ("call", "device")]
            auto = row.get("call_auto_speedup")
            cells.append(f"{auto:.2f}x, {row['auto']}" if auto else "")
            print("| " + " | ".join(cells) + " |")
        print()
    if figure:
        draw(rows, figure)


def draw(rows: list[dict[str, Any]], figure: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [c for c in COLLECTIVES if any(row["collective"] == c for row in rows)]
    canvas, axes = pyplot.subplots(1, len(shown), figsize=(4 * len(shown), 3.2), squeeze=False)
    for axis, collective in zip(axes[0], shown, strict=True):
        found = [row for row in rows if row["collective"] == collective]
        sizes = [row["bytes"] / (1 << 20) for row in found]
        for name, colour in (("8", "#4c78a8"), ("4", "#e45756")):
            for kind, style in (("device", "-"), ("call", ":")):
                values = [row[f"{kind}_{name}_speedup"] for row in found]
                axis.plot(sizes, values, style, color=colour, label=f"{name} bits, {kind}")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xscale="log", xlabel="MiB of bfloat16", title=collective, ylim=(0, None))
    axes[0][0].set_ylabel("speed-up over plain NCCL")
    axes[0][0].legend(fontsize=8)
    canvas.tight_layout()
    canvas.savefig(figure, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE")
    parser.add_argument("--collectives", nargs="+", default=COLLECTIVES, choices=COLLECTIVES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-memory", choices=("auto", "off"), default="auto")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print tables of such lines")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="of the report")
    options = parser.parse_args()
    report(options.report, options.figure) if options.report else run(options)


if __name__ == "__main__":
    main()
