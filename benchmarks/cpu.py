"""What CPU codecs and collectives reach, beside what was aimed at: `python benchmarks/cpu.py`.

Codecs run on one core, collectives on 'hosts' of netlab (root, iproute2), each beside its baseline
in the same run: memcpy, or torch.distributed over gloo. Prints Markdown tables; `--json FILE`
writes all rows. About 10 minutes; `--only NAME` runs one table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCH = (sys.executable, "-m", "cccl", "bench")
NETLAB = Path(__file__).with_name("netlab.py")
MIB = 1 << 18  # float32 values
GBIT = {"1gbit": 1e9, "10gbit": 1e10}


@dataclass(frozen=True)
class Link:
    """Collectives on one network. `targets` are speed-ups by MiB of float32, 8 and 4 bits."""

    hosts: int
    rate: str = "1gbit"
    delay: str = "0"
    collective: str = "all_reduce"
    targets: dict[int, tuple[float, float]] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        delay = f", {self.delay} delay" if self.delay != "0" else ""
        return f"{self.collective}, {self.hosts} hosts, {self.rate}{delay} {' '.join(self.extra)}"


FULL = {64: (3.85, 7.4), 16: (3.7, 6.8), 4: (3.3, 5.5)}
DELAYED = {mib: (0.9 * eight, 0.9 * four) for mib, (eight, four) in FULL.items()}
LINKS = {
    "links": [Link(2, targets=FULL), Link(4, targets=FULL)],
    "delay": [Link(2, delay="1ms", targets=DELAYED), Link(4, delay="1ms", targets=DELAYED)],
    "fast": [Link(2, "10gbit", targets={64: (2.0, 2.5)})],
    "others": [
        Link(hosts, collective=collective, targets={64: (0, 0), 16: (0, 0)})
        for collective in ("reduce_scatter", "all_gather", "broadcast")
        for hosts in (2, 4)
    ],
    "busy": [Link(2, targets={64: (3.0, 3.0)}, extra=("--beside-python",))],
}


def rows_of(command: list[str]) -> list[dict[str, Any]]:
    """The JSON objects that `command` prints, one a line, whatever stands before them."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found = [line[line.find("{") :] for line in done.stdout.splitlines() if '"codec"' in line]
    if not found:
        raise SystemExit(f"{' '.join(command)} printed no result (exit status {done.returncode})")
    return [json.loads(line) for line in found]


def codecs(repeats: int) -> list[dict[str, Any]]:
    """One core, 16 MiB of float32: GB/s, and times memcpy in the same run."""
    print("\n| codec | encode | decode | accumulate | reduce of 4 | memcpy |")
    print("|---|---|---|---|---|---|")
    rows = []
    narrow = [f"block_float{bits}" for bits in (6, 5, 3, 2)]
    for options in (["--codec", "block_float8", "block_float4", *narrow],
                    ["--codec", "block_float4", "block_float3", "--level", "best"],
                    ["--codec", "block_float8", "block_float4", "--rotation", "hadamard"],
                    ["--codec", "block_float8", "block_float4", "--rounding", "stochastic"],
                    ["--codec", "cast_bf16", "identity"]):  # fmt: skip
        rows += rows_of([*BENCH, "codec", *options, "--json", "--repeats", str(repeats)])
    for row in rows:
        shown = [f"{row[key]:.1f} ({row[key] / row['copy_gbps']:.2f}x)"
                 for key in ("encode_gbps", "decode_gbps", "accumulate_gbps")]  # fmt: skip
        name = ", ".join(row[key] for key in ("codec", "rounding", "level", "rotation"))
        print(f"| {name} | {' | '.join(shown)} | {row['reduce_gbps']:.1f} "
              f"| {row['copy_gbps']:.1f} |", flush=True)  # fmt: skip
    return rows


def link(case: Link, repeats: int) -> list[dict[str, Any]]:
    """Speed-up over gloo, and the share of its time for which the link would carry the bytes."""
    command = [sys.executable, str(NETLAB), "run", "--hosts", str(case.hosts), "--rate", case.rate]
    command += ["--delay", case.delay] if case.delay != "0" else []
    command += ["--timeout", "600", "--", *BENCH, "collective", "--collective", case.collective]
    command += ["--numel", *(str(mib * MIB) for mib in case.targets), "--json", *case.extra]
    rows = rows_of([*command, "--repeats", str(repeats)])
    print(f"\n**{case.title}**\n")
    print("| codec | MiB | gloo ms | ms | speed-up | aim | link busy | equal |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        mib = row["numel"] // MIB
        row["link_busy"] = 8e3 * row["payload_bytes"] / GBIT[case.rate] / row["ms"]
        aim = case.targets[mib][row["codec"] == "block_float4"]
        print(f"| {row['codec']} | {mib} | {row['baseline_ms']:.1f} | {row['ms']:.1f} "
              f"| {row['speedup']:.2f}x | {f'{aim:.2f}x' if aim else '-'} "
              f"| {row['link_busy']:.0%} | {row['bitwise_equal']} |", flush=True)  # fmt: skip
    return [{"link": case.title, **row} for row in rows]


def main() -> None:
    """Runs the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["codecs", *LINKS], action="append")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    wanted = args.only or ["codecs", *LINKS]
    rows = codecs(args.repeats) if "codecs" in wanted else []
    for name in LINKS:
        for case in LINKS[name] if name in wanted else []:
            rows += link(case, args.repeats)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
