#!/usr/bin/env python3
"""`compression_type: auto` beside plain torch.distributed and each fixed codec, in one run.

One process per rank; with a limited link, as root:

  netlab.py run --hosts 2 --rate 1gbit -- python benchmarks/auto.py
  torchrun --nproc-per-node 2 benchmarks/auto.py --sizes 1KiB 64KiB 4MiB
  netlab.py run --hosts 2 --rate 10gbit -- python benchmarks/auto.py --device cuda --dtype bfloat16

Every round times each variant once, in an order that changes from round to round; a round counts
with its slowest rank. Columns are medians in ms; the ratios are medians of the rounds' own ratios,
so that what slows the machine for a while slows both sides. Above 1, auto is the faster. `noise` is
such a ratio of plain to plain itself. `best` is the fastest of what auto may choose from.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time

import torch
import torch.distributed as dist

import cccl
import cccl.torch
from cccl._rules import parse_bytes

SIZES = ["1KiB", "4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB"]
WARM_UP = 2


def main() -> None:
    """Rank 0 prints a line per size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=parse_bytes, default=SIZES, metavar="SIZE")
    parser.add_argument("--codecs", nargs="+", default=["block_float8"], help="that auto may use")
    parser.add_argument("--beside", nargs="+", default=[], help="codecs that it may not use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seconds", type=float, default=4.0, help="per size, about")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks often share the cores
    device = torch.device("cpu")
    if options.device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if options.device == "cpu" else "nccl",
        device_id=None if options.device == "cpu" else device,
    )
    variants = {"plain": cccl.Config(compression_type="none")}
    codecs = [*options.codecs, *options.beside]
    variants |= {name: cccl.Config(compression_type=name) for name in codecs}
    variants["again"] = variants["plain"]
    variants["auto"] = cccl.Config(compression_type="auto", auto_codecs=options.codecs)
    for nbytes in options.sizes:
        nbytes = nbytes if isinstance(nbytes, int) else parse_bytes(nbytes)
        row = measure(nbytes, variants, device, options)
        if dist.get_rank() == 0:
            print(json.dumps(row) if options.json else line(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(
    nbytes: int,
    variants: dict[str, cccl.Config],
    device: torch.device,
    options: argparse.Namespace,
) -> dict[str, object]:
    """Rounds of all variants for one size."""
    dtype = getattr(torch, options.dtype)
    tensor = torch.linspace(-1, 1, nbytes // dtype.itemsize, device=device).to(dtype)

    def run(name: str) -> float:
        begun = time.perf_counter()
        if name in ("plain", "again"):
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
        else:
            cccl.torch.all_reduce(tensor, config=variants[name], label=name)
        if tensor.is_cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - begun

    for _ in range(WARM_UP):
        spent = sum(run(name) for name in variants)
    rounds = repeats(options.seconds / spent, device)
    shuffle = random.Random(nbytes)  # the same order on every rank
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name in shuffle.sample(list(variants), len(variants)):
            times[name].append(run(name))
    slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    found = dict(zip(variants, slowest.tolist(), strict=True))
    medians = {name: 1e3 * statistics.median(column) for name, column in found.items()}
    again = found.pop("again")
    best = min(("plain", *options.codecs), key=medians.__getitem__)
    went = [row for row in cccl.stats()["rows"] if row["label"] == "auto"]
    cccl.reset_stats()
    fixed = [*options.codecs, *options.beside]
    return {
        "collective": "all_reduce",
        "world_size": dist.get_world_size(),
        "bytes": nbytes,
        "rounds": rounds,
        **{f"{name}_ms": medians[name] for name in found},
        **{f"{name}_over_plain": ratio(found["plain"], found[name]) for name in fixed},
        "noise": ratio(found["plain"], again),
        "auto_over_plain": ratio(found["plain"], found["auto"]),
        "auto_over_best": ratio(found[best], found["auto"]),
        "best": best,
        "went": " ".join(sorted({"plain" if row["plain"] else "compressed" for row in went})),
        "predicted_ms": 1e3 * went[0]["predicted_seconds"] / went[0]["calls"],
    }


def repeats(rounds: float, device: torch.device) -> int:
    """What rank 0 can afford, between 3 and 400."""
    agreed = torch.tensor([min(400, max(3, int(rounds)))], device=device)
    dist.broadcast(agreed, 0)
    return int(agreed.item())


def ratio(base: list[float], other: list[float]) -> float:
    """Median speed-up of the rounds."""
    return statistics.median(a / b for a, b in zip(base, other, strict=True))


def line(row: dict[str, object]) -> str:
    """For people."""
    return "  ".join(
        f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
    )


if __name__ == "__main__":
    main()
