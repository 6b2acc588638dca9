#!/usr/bin/env python3
"""`cccl plan` beside measured DDP steps, plain and compressed, behind limited links. As root:

  python benchmarks/plan_lab.py                  2, 4 and 8 hosts at three rates
  python benchmarks/plan_lab.py --hosts 2 --rates 1gbit

For each number of hosts `cccl tune` makes a profile at one rate. From it, the steps' own
computation and the line rate alone `plan` predicts each step, with the chunks that the profile
sets. Hosts share this machine's cores, so that anything else that runs there spoils a row: its
computation then differs from the other rates'.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _show
from cccl.doctor import examine
from cccl.plan import load_cluster, plan

HERE = Path(__file__).resolve()
LAYERS, WIDTH, BUCKET_MIB = 4, 2048, 16
# The backward pass after its first bucket; the first layer needs no gradient of its input.
OVERLAP = (2 * LAYERS - 3) / (3 * LAYERS - 1)
CODECS = ["block_float8", "block_float4"]


def main() -> int:
    """The driver, or with `measure` one of a lab's ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["1gbit", "2gbit", "4gbit"])
    parser.add_argument("--calibrated-at", default="2gbit", help="the rate of `cccl tune`")
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--steps", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--measure", metavar="PROFILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return 0
    rows = []
    for hosts in options.hosts:
        with tempfile.TemporaryDirectory() as folder:
            profile = Path(folder, "profile.toml")
            tune = ["-m", "cccl", "tune", "--seconds", "15", "--output", str(profile)]
            tune += ["--codec", *CODECS]
            lab(hosts, options.calibrated_at, tune)
            cluster = load_cluster(profile)
            own = [str(HERE), "--measure", str(profile), "--batch", str(options.batch)]
            for rate in options.rates:
                found = lab(hosts, rate, [*own, "--steps", str(options.steps)])
                there = dataclasses.replace(cluster, link_gbit=_show.gbit(rate))
                rows += compare(hosts, rate, found, there, options.json)
    if not options.json:
        _show.table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])
        worst = max(abs(row["error %"]) for row in rows)
        cpu = examine()["cpu"]
        print(f"largest error: {worst:.1f} %; {cpu['cores']} cores, {cpu['model']}")
    return 0


def lab(hosts: int, rate: str, arguments: list[str]) -> dict[str, float]:
    """Runs Python on each host; returns the last JSON object of rank 0, if there is one."""
    netlab = [sys.executable, str(HERE.with_name("netlab.py")), "run", "--hosts", str(hosts)]
    done = subprocess.run(
        [*netlab, "--rate", rate, "--", sys.executable, *arguments],
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"plan_lab.py: {' '.join(arguments)} failed:\n{done.stdout}")
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("[0] {")]
    return dict(json.loads(lines[-1])) if lines else {}


def compare(
    hosts: int, rate: str, found: dict[str, float], cluster: object, as_json: bool
) -> list[dict[str, Any]]:
    """A row for plain and for each codec."""
    rows = []
    for way in ("plain", *CODECS):
        codec = CODECS[0] if way == "plain" else way
        predicted = plan(
            LAYERS * WIDTH * WIDTH, cluster, compute_seconds=found["compute"], codec=codec,
            overlap=OVERLAP, bucket_bytes=BUCKET_MIB << 20, ranks=[hosts],
        )["rows"][0]["plain" if way == "plain" else "flat"]  # fmt: skip
        rows.append({
            "hosts": hosts,
            "rate": rate,
            "way": way,
            "compute ms": round(1e3 * found["compute"], 1),
            "measured ms": round(1e3 * found[way], 1),
            "predicted ms": round(1e3 * predicted["seconds"], 1),
            "error %": round(100 * (predicted["seconds"] / found[way] - 1), 1),
        })  # fmt: skip
        if as_json:
            print(json.dumps(rows[-1]), flush=True)
    return rows


def measure(options: argparse.Namespace) -> None:
    """Median steps, each with its slowest rank, in turns; rank 0 prints them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cccl.configure({"attach_ddp": False})
    chunk_size = cccl.Config.load(options.measure).chunk_size
    models = {name: model() for name in ("plain", *CODECS)}
    for name in CODECS:
        cccl.torch.compress(models[name], {"compression_type": name, "chunk_size": chunk_size})
    batch = torch.randn(options.batch, WIDTH)
    shuffle, names = random.Random(0), ["compute", *models]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.steps + 3):
        for name in shuffle.sample(names, len(names)):
            dist.barrier()
            begun = time.perf_counter()
            if name == "compute":
                with models["plain"].no_sync():
                    models["plain"](batch).sum().backward()
            else:
                models[name](batch).sum().backward()
            times[name].append(time.perf_counter() - begun)
    slowest = torch.tensor([column[3:] for column in times.values()], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        medians = [statistics.median(column) for column in slowest.tolist()]
        print(json.dumps(dict(zip(names, medians, strict=True))), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def model() -> DistributedDataParallel:
    """Whose gradients go in buckets of a layer each."""
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=BUCKET_MIB)


if __name__ == "__main__":
    sys.exit(main())
