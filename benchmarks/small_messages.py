#!/usr/bin/env python3
"""What an all-reduce of a small tensor costs: torch.distributed's own, and each way of CCCL.

  torchrun --nproc-per-node 2 benchmarks/small_messages.py
  netlab.py run --hosts 2 --rate 1gbit -- python benchmarks/small_messages.py

Medians in microseconds of rank 0, all ways in turn, in an order that changes from round to round.
The row `new` has a size that was never used before in every call; `resident` is what a new size
adds to the process's memory, in bytes.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator

import psutil
import torch
import torch.distributed as dist

import cccl
import cccl.torch

WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "torch": lambda t: dist.all_reduce(t),
    "none": lambda t: cccl.torch.all_reduce(t, "sum", config=_NONE),
    "none, a dict": lambda t: cccl.torch.all_reduce(t, "sum", config={"compression_type": "none"}),
    "auto": lambda t: cccl.torch.all_reduce(t, "sum", config=_AUTO),
    "block_float8": lambda t: cccl.torch.all_reduce(t, "sum", config=_BLOCK8),
}
_NONE, _AUTO, _BLOCK8 = (cccl.Config(compression_type=c) for c in ("none", "auto", "block_float8"))
_ROUNDS, _NEW = 1000, 200


def main() -> None:
    """Rank 0 prints a line per size."""
    torch.set_num_threads(1)  # ranks often share the cores
    dist.init_process_group("gloo")
    memory = torch.zeros(1 << 20)
    for kib in (1, 4, 16, 64):
        show(f"{kib} KiB", dict.fromkeys(WAYS, itertools.repeat(memory[: kib * 256])), _ROUNDS)
    show("new", {name: sizes(memory, 1000 + i) for i, name in enumerate(WAYS)}, _NEW)
    for i, (name, call) in enumerate(WAYS.items()):
        before, new = psutil.Process().memory_info().rss, sizes(memory, 100_000 + i)
        for _ in range(2000):
            call(next(new))
        if dist.get_rank() == 0:
            grown = psutil.Process().memory_info().rss - before
            print(f"resident  {name} {grown / 2000:.0f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def sizes(memory: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """Another size each time, and another for each way."""
    while True:
        yield memory[:numel]
        numel += len(WAYS)


def show(title: str, tensors: dict[str, Iterator[torch.Tensor]], rounds: int) -> None:
    """A line of medians."""
    shuffle = random.Random(0)  # the same order on every rank
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds + 2):
        for name in shuffle.sample(list(WAYS), len(WAYS)):
            tensor, begun = next(tensors[name]), time.perf_counter()
            WAYS[name](tensor)
            times[name].append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        medians = (f"{name} {1e6 * statistics.median(t[2:]):.0f}" for name, t in times.items())
        print(f"{title}  ", "  ".join(medians), flush=True)


if __name__ == "__main__":
    main()
