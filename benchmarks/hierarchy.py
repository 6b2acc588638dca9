#!/usr/bin/env python3
"""all_reduce in legs beside flat compressed and flat plain, with the bytes on the hosts' links.

    netlab.py run --hosts 2 --per-host 2 --rate 1gbit -- python3 benchmarks/hierarchy.py

Started as one process per rank, several on each host, by netlab.py or by torchrun. Bytes between
hosts are what this host's kernel counted on its link (--interface); those of a rank, of payloads,
are what CCCL counted. With --device cuda over NCCL; ranks of a host may share a GPU. Rank 0 prints
a line per way, and --json an object.
"""

from __future__ import annotations

import argparse
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


def link_bytes(interface: str) -> int:
    """Sent on this host's link so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[8])
    raise SystemExit(f"there is no interface {interface}: see --interface")


def measure(call: Callable[[torch.Tensor], None], values: torch.Tensor, args) -> dict[str, float]:
    """Median milliseconds of the slowest rank, and bytes per call."""
    tensor = values.clone()
    call(tensor)  # ranks connect and agree
    cccl.reset_stats()
    times, sent = [], []
    for _ in range(args.repeats):
        tensor.copy_(values)
        dist.barrier()
        finish(tensor)
        before, begun = link_bytes(args.interface), time.perf_counter()
        call(tensor)
        finish(tensor)
        seconds = torch.tensor(time.perf_counter() - begun, device=tensor.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(float(seconds))
        sent.append(link_bytes(args.interface) - before)
    exact = values.double()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    smallest, largest = tensor.clone(), tensor.clone()
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    rows = cccl.stats()["rows"]  # on a GPU the last call may be missing, and the first one there
    legs = {
        leg: sum(row["bytes_sent"] / row["calls"] for row in rows if row["leg"] == leg)
        for leg in ("between", "inside")
    }
    host = torch.tensor(statistics.median(sent), dtype=torch.float64, device=tensor.device)
    dist.all_reduce(host, dist.ReduceOp.MAX)
    return {
        "ms": 1e3 * statistics.median(times),
        "host_link_mb": float(host) / 1e6,
        "rank_between_mb": args.tensors * legs["between"] / 1e6,
        "rank_inside_mb": args.tensors * legs["inside"] / 1e6,
        "relative_error": float((tensor.double() - exact).norm() / exact.norm()),
        "bitwise_equal": torch.equal(smallest, largest),
    }


def finish(tensor: torch.Tensor) -> None:
    """The host waits for what was submitted."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=32, help="of float32 values")
    parser.add_argument("--tensors", type=int, default=1, help="of which all are under way at once")
    parser.add_argument("--codec", default="block_float8")
    parser.add_argument("--hierarchy", default="auto", help="as in cccl.Config")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--interface", default=os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if args.device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"  # as NCCL knows no shared GPU
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = torch.randn(int(args.mib * 2**18), generator=generator).to(device)

    def plain(tensor: torch.Tensor) -> None:
        for work in [dist.all_reduce(part, async_op=True) for part in tensor.chunk(args.tensors)]:
            work.wait()
        tensor /= dist.get_world_size()

    def compressed(hierarchy: str) -> Callable[[torch.Tensor], None]:
        config = cccl.Config(compression_type=args.codec, hierarchy=hierarchy)

        def call(tensor: torch.Tensor) -> None:
            parts = tensor.chunk(args.tensors)
            works = [cccl.torch.all_reduce(p, config=config, async_op=True) for p in parts]
            for work in works:
                work.wait()

        return call

    ways = {
        "flat plain": plain,
        f"flat {args.codec}": compressed("off"),
        f"in legs, {args.codec}": compressed(args.hierarchy),
    }
    found = {name: measure(call, values, args) for name, call in ways.items()}
    if dist.get_rank() == 0:
        pieces = f" as {args.tensors} tensors" if args.tensors > 1 else ""
        print(f"all_reduce of {args.mib:g} MiB float32{pieces} on {dist.get_world_size()} ranks")
        for name, row in found.items():
            print(
                f"{name:24} {row['ms']:8.1f} ms   host sends {row['host_link_mb']:7.2f} MB, a rank "
                f"{row['rank_between_mb']:6.2f} between and {row['rank_inside_mb']:6.2f} inside   "
                f"error {row['relative_error']:.1e}, equal {row['bitwise_equal']}"
            )
        if args.json:
            for name, row in found.items():
                print(json.dumps({"collective": "all_reduce", "way": name, **row}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
