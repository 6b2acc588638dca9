#!/usr/bin/env python3
"""What monitoring costs a DDP step: a Prometheus file and port, and TensorBoard's scalars.

  torchrun --nproc-per-node 2 benchmarks/monitor.py

Steps with and without, in turns of 20; the file is written every second, ten times as often as by
default. Prints medians, and each monitor's own processor time per step: the ratio of medians is as
noisy as the machine, the processor time is not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cccl.torch
from cccl import monitor
from cccl.torch.tensorboard import Callback

TURN = 20


def main() -> None:
    """Rank 0 prints a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks share the cores
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    cccl.torch.compress(model, {"compression_type": "block_float8"})
    batch = torch.randn(64, 512)
    with tempfile.TemporaryDirectory() as folder:
        callback = Callback(folder, every=10)
        times: dict[str, list[float]] = {"without": [], "with": []}
        step, spent = 0, 0.0
        for turn in range(2 * options.turns):
            watched = turn % 2 == 1
            file = f"{folder}/stats.prom"
            running = monitor.Monitor(file, 0, interval=1.0) if watched else None
            dist.barrier()
            for _ in range(TURN):
                step += 1
                begun = time.perf_counter()
                model(batch).sum().backward()
                if watched:
                    before = time.thread_time()
                    callback(step)
                    spent += time.thread_time() - before
                times["with" if watched else "without"].append(time.perf_counter() - begun)
            if running is not None:
                running.stop()
        begun = time.thread_time()
        for _ in range(20):
            monitor.text()
        look = (time.thread_time() - begun) / 20
    without, beside = (statistics.median(column[TURN:]) for column in times.values())
    if dist.get_rank() == 0:
        scalars = spent / options.turns / TURN / without
        print(
            f"step {1e3 * without:.2f} ms, monitored {1e3 * beside:.2f} ms "
            f"({beside / without - 1:+.1%}); of a step: scalars every 10 steps {scalars:.2%}, "
            f"a look of {1e3 * look:.2f} ms every 10 s {look / 10:.3%}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
