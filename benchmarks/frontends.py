#!/usr/bin/env python3
"""The CuPy frontend beside the torch frontend, in one run.

  python benchmarks/frontends.py                 NumPy over sockets beside torch over gloo
  python benchmarks/frontends.py --device cuda   CuPy beside torch, both over NCCL

An all-reduce in place with the same settings, both ways in turn, in an order that changes from
round to round. Medians in milliseconds of the slowest rank, and how much longer the CuPy frontend
takes than torch's. On a GPU the host waits for the stream after each call.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SIZES_KIB = (4, 64, 1024, 16384, 65536)


def main() -> None:
    """Starts the ranks; rank 0 prints a line per size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--codec", default="block_float8")
    parser.add_argument("--kib", type=int, nargs="+", default=SIZES_KIB)
    parser.add_argument("--seconds", type=float, default=2.0, help="per size, about")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, options, port, f"file://{folder}/meeting"))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(1)


def _rank(rank: int, options: argparse.Namespace, port: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    import cccl.cupy
    import cccl.torch

    on_gpu = options.device == "cuda"
    torch.set_num_threads(1)  # ranks often share the cores
    if on_gpu:
        number = rank % torch.cuda.device_count()
        torch.cuda.set_device(number)
        if torch.cuda.device_count() < options.ranks:  # hosts apart, as far as NCCL knows
            os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=rank,
                            world_size=options.ranks)  # fmt: skip
    config = cccl.Config(compression_type=options.codec)
    communicator = cccl.cupy.Communicator(rank, options.ranks, meeting, config=config)
    for kib in options.kib:
        values = np.random.default_rng(rank).standard_normal(kib * 256, np.float32)
        tensor, array, finish = _arrays(values, on_gpu)
        ways: dict[str, Callable[[], Any]] = {
            "torch": lambda tensor=tensor: cccl.torch.all_reduce(tensor, config=config),
            "cupy": lambda array=array: communicator.all_reduce(array, array, "avg"),
        }
        times = _times(ways, finish, options.seconds)
        if rank == 0:
            torch_ms, cupy_ms = (1e3 * times[name] for name in ("torch", "cupy"))
            print(f"{kib:6} KiB  torch {torch_ms:8.3f} ms  cupy {cupy_ms:8.3f} ms  "
                  f"{100 * (cupy_ms / torch_ms - 1):+5.1f} %", flush=True)  # fmt: skip
    communicator.close()
    dist.destroy_process_group()


def _arrays(values: np.ndarray, on_gpu: bool) -> tuple[Any, Any, Callable[[], None]]:
    """For torch, for the CuPy frontend, and what waits for the end of a call."""
    import torch

    if not on_gpu:
        return torch.from_numpy(values.copy()), values, lambda: None
    import cupy

    cupy.cuda.Device(torch.cuda.current_device()).use()
    return torch.from_numpy(values).cuda(), cupy.asarray(values), torch.cuda.synchronize


def _times(
    ways: dict[str, Callable[[], Any]], finish: Callable[[], None], seconds: float
) -> dict[str, float]:
    """Medians of each way, of the rank where it is longest."""
    import torch
    import torch.distributed as dist

    generator = random.Random(0)

    def measure(rounds: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name in generator.sample(list(ways), len(ways)):  # alike on all ranks
                dist.barrier()
                begun = time.perf_counter()
                ways[name]()
                finish()
                times[name].append(time.perf_counter() - begun)
        return times

    once = torch.tensor([sum(min(times) for times in measure(5).values())])
    dist.all_reduce(once, dist.ReduceOp.MAX)
    times = measure(max(15, min(1000, int(seconds / once.item()))))
    medians = torch.tensor([statistics.median(times[name]) for name in ("torch", "cupy")])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return dict(zip(("torch", "cupy"), medians.tolist(), strict=True))


if __name__ == "__main__":
    main()
