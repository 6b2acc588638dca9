#!/usr/bin/env python3
"""Backend "cccl" beside plain gloo or NCCL: what it costs with compression off, and gains with it.

  torchrun --nproc-per-node 2 benchmarks/backend.py calls
  netlab.py run --hosts 2 --rate 1gbit -- python benchmarks/backend.py ddp

`calls`: 10,000 small collectives on each group, in turns of 20; microseconds per call, medians of
rank 0's turns. There are several groups of either kind, since two plain groups differ too: what one
of ours costs is over the plain group made before it, and `noise` is a plain group's over the plain
one before that. `ddp`: steps of a model whose
gradients have `--mib`, plain, under the DDP hook, and on the backend without a hook; medians in
milliseconds, and the backend's share of the hook's gain. `fsdp`: the same of a sharded model.
`--device cuda` goes before the command.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch

_CALLS, _TURN = 2000, 20


def calls(options: argparse.Namespace) -> None:
    """A line per collective: 256 float32 values from each rank."""
    cccl.configure({"compression_type": "none"})
    groups: dict[str, dist.ProcessGroup] = {}
    for pair in range(options.pairs):
        backends = [("plain", None), ("cccl", ours(options))]
        for kind, backend in backends if pair % 2 == 0 else backends[::-1]:
            groups[f"{kind} {pair}"] = dist.new_group(backend=backend)
    part, whole = torch.zeros(256), torch.zeros(256 * dist.get_world_size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    kinds: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "all_reduce": lambda g: dist.all_reduce(part, group=g),
        "broadcast": lambda g: dist.broadcast(part, 0, group=g),
        "all_gather": lambda g: gather(whole, part, group=g),
        "reduce_scatter": lambda g: scatter(part, whole, group=g),
        "barrier": lambda g: dist.barrier(g),
    }
    total = dict.fromkeys(groups, 0.0)
    for kind, call in kinds.items():
        times = turns(groups, lambda g, call=call: [call(g) for _ in range(_TURN)], _CALLS // _TURN)
        found = {name: 1e6 * statistics.median(t) / _TURN for name, t in times.items()}
        total = {name: total[name] + found[name] for name in groups}
        show(f"{kind:15}", found, "")
    show(f"{'all':15}", total, "")
    plain, wrapped = (
        [total[f"{kind} {pair}"] for pair in range(options.pairs)] for kind in ("plain", "cccl")
    )
    more = {
        "cost": [100 * (a / b - 1) for a, b in zip(wrapped, plain, strict=True)],
        "noise": [100 * (a / b - 1) for a, b in itertools.pairwise(plain)],
    }
    for name, percents in more.items():
        each = {f"pair {n}": percent for n, percent in enumerate(percents)}
        show(f"{name}, %", each, f"median {statistics.median(percents):.1f}")


def ddp(options: argparse.Namespace) -> None:
    """One line."""
    cccl.configure({"compression_type": options.codec, "attach_ddp": False})
    rows = options.mib * (1 << 18) // 1024
    backend = dist.new_group(backend=ours(options))
    models = {
        "plain": model(rows),
        "hook": model(rows),
        "backend": model(rows, process_group=backend),
    }
    cccl.torch.compress(models["hook"])
    compare(models, "hook", options)


def fsdp(options: argparse.Namespace) -> None:
    """One line: parameters are gathered twice a step, gradients scattered once."""
    cccl.configure({"compression_type": options.codec})
    backend = DeviceMesh.from_group(dist.new_group(backend=ours(options)), options.device)
    plain = DeviceMesh.from_group(dist.new_group(), options.device)
    meshes = {"plain": plain, "hooks": plain, "hooks, all_gather too": plain, "backend": backend}
    models = {name: sharded(options.mib, mesh) for name, mesh in meshes.items()}
    cccl.torch.compress_fsdp(models["hooks"])
    both = ["all_gather", "reduce_scatter"]
    config = {"compression_type": options.codec, "collective_filter": both}
    cccl.torch.compress_fsdp(models["hooks, all_gather too"], config)
    compare(models, "hooks", options)


def ours(options: argparse.Namespace) -> str:
    """The backend string of a compressed group."""
    return "cpu:cccl" if options.device == "cpu" else "cpu:cccl,cuda:cccl"


def compare(models: dict[str, torch.nn.Module], hook: str, options: argparse.Namespace) -> None:
    """Shows steps of all, and what share of the gain of `hook` the backend has."""
    batch = torch.randn(1, 1024)
    times = turns(models, lambda m: m(batch).sum().backward(), options.steps)
    medians = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    gain = medians["plain"] - medians[hook]
    share = (medians["plain"] - medians["backend"]) / gain
    show(f"{options.mib} MiB", medians, f"{100 * share:.0f} % of the gain of {hook}")


def sharded(mib: int, mesh: DeviceMesh) -> torch.nn.Module:
    """Of layers of 4 MiB."""
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(mib // 4)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(torch.nn.Sequential(*layers), mesh=mesh)


def model(rows: int, **options: object) -> DistributedDataParallel:
    """Whose step is the sending of `rows` x 1024 gradients, in buckets of 4 MiB."""
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(rows // 1024)]
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=4, **options)


def turns(ways: dict, turn: Callable, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way's turns, which come in an order that changes from round to round."""
    shuffle = random.Random(0)  # the same order on every rank
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 3):
        for name in shuffle.sample(list(ways), len(ways)):
            dist.barrier()
            begun = time.perf_counter()
            turn(ways[name])
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begun)
    return {name: found[3:] for name, found in times.items()}


def show(title: str, medians: dict[str, float], end: str) -> None:
    """Rank 0's line."""
    if dist.get_rank() == 0:
        print(title, *(f"{name} {t:.1f}" for name, t in medians.items()), end, sep="  ", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("calls")
    p.add_argument("--pairs", type=int, choices=range(2, 9), default=3, help="of groups")
    p.set_defaults(run=calls)
    for run in (ddp, fsdp):
        p = commands.add_parser(run.__name__)
        p.add_argument("--mib", type=int, default=16)
        p.add_argument("--codec", default="block_float8")
        p.add_argument("--steps", type=int, default=15)
        p.set_defaults(run=run)
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks often share the cores
    if options.device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        torch.set_default_device(torch.device("cuda", index))
        torch.cuda.set_device(index)
    dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    options.run(options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
