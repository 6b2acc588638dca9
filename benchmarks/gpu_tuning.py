"""All-reduce over NCCL by chunk size, window and number of communicators, beside plain NCCL: what
the defaults in core/collectives/tuning.cpp and of `nccl_lanes` were chosen from. Runs as one rank
of several, as gpu_ddp.py does.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import cccl
import cccl.torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, nargs="+", default=[64], help="of bfloat16 values")
    parser.add_argument("--codecs", nargs="+", default=["block_float8", "block_float4"])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--chunks", nargs="+", default=["auto", "2MiB", "4MiB", "8MiB"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trace", type=Path, help="write a profiler trace of the last one here")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    groups = {lanes: dist.new_group() for lanes in options.lanes}
    for mib in options.mib:
        tensor = torch.randn(int(mib * 2**19), device=device).bfloat16()
        plain, _ = seconds(functools.partial(dist.all_reduce, tensor), options.repeats)
        for codec, lanes, window, chunk in itertools.product(
            options.codecs, options.lanes, options.windows, options.chunks
        ):
            config = cccl.Config(
                compression_type=codec, nccl_lanes=lanes, window=window, chunk_size=chunk
            )
            ours = functools.partial(
                cccl.torch.all_reduce, tensor, group=groups[lanes], config=config
            )
            took, host = seconds(ours, options.repeats)
            row = {"mib": mib, "codec": codec, "lanes": lanes, "window": window, "chunk": chunk,
                   "plain_ms": 1e3 * plain, "ms": 1e3 * took, "speedup": plain / took,
                   "host_us": 1e6 * host}  # fmt: skip
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
        if options.trace and dist.get_rank() == 0:
            with torch.profiler.profile() as profiler:
                seconds(ours, 0)
            profiler.export_chrome_trace(str(options.trace))
        elif options.trace:
            seconds(ours, 0)
    dist.destroy_process_group()


def seconds(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians over repeats of the slowest rank: whole, and until the call returned."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        host = time.perf_counter() - begun
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun, host))
    slowest = torch.tensor(times[min(2, repeats) :], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    whole, host = (statistics.median(column) for column in slowest.T.tolist())
    return whole, host


if __name__ == "__main__":
    main()
