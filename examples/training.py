"""One DDP training run of the demo. The lines that bring CCCL in are those with `cccl`.

    python training.py --codec block_float8 --ranks 2 --result run.json    ranks of its own
    torchrun --nproc-per-node 2 training.py --result run.json              one of a launcher's ranks

Rank 0 prints a line of JSON after each step and writes everything to the result file at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import corpus
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import GPT, SIZES, Size
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch

PLAIN = "plain"
LEARNING_RATE = 1e-3
RISING_STEPS = 10  # of the learning rate, which then falls to 0
WARM_UP_STEPS = 3  # not timed: DDP rebuilds its buckets, connections are made
COMPUTE_STEPS = 10
VALIDATIONS = 10
VALIDATION_WINDOWS = 128
DEADLINE = timedelta(seconds=120)


def train(rank: int, world: int, init_method: str, args: argparse.Namespace) -> None:
    """Trains as one of `world` ranks; rank 0 writes `args.result`."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)  # the same initial weights in every run
    store, rank, world = next(dist.rendezvous(init_method, rank, world))
    dist.init_process_group("gloo", timeout=DEADLINE, store=store, rank=rank, world_size=world)

    size = SIZES[args.size]
    model = GPT(size)
    ddp = DistributedDataParallel(model)
    if args.codec != PLAIN:
        cccl.configure({"compression_type": args.codec, "strict": True})
        ddp.register_comm_hook(None, cccl.torch.compression_hook)

    optimizer = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RISING_STEPS, 1 - step / args.steps)
    )
    text, validation_text = corpus.load()
    generator = torch.Generator().manual_seed(args.seed * 1000 + rank)
    held_out = corpus.evenly(validation_text, VALIDATION_WINDOWS, size.context)
    held_out = (held_out[0][rank::world], held_out[1][rank::world])

    losses, seconds, validation = [], [], []
    for step in range(args.steps + 1):
        if args.validate and step in validation_steps(args.steps):
            validation.append((step, total_loss(model, held_out, size)))
        if step == args.steps:
            break
        begun = time.perf_counter()
        loss = ddp(*corpus.sample(text, size.batch, size.context, generator))
        update(loss, ddp, optimizer)
        seconds.append(time.perf_counter() - begun)
        schedule.step()
        losses.append(loss.item())
        if rank == 0:
            print(json.dumps({"step": step + 1, "loss": losses[-1]}), flush=True)

    mine = {
        "losses": losses,
        "seconds": seconds,
        "validation": validation,
        "digest": digest(model),
        "stats": cccl.stats(),
    }
    batch = corpus.sample(text, size.batch, size.context, generator)
    mine["compute_seconds"] = compute_seconds(ddp, optimizer, batch)
    # Through the store: gloo's threads may still free the Python objects of a last collective
    # while the interpreter ends, which kills the process (Python before 3.14).
    store.set(f"result of rank {rank}", json.dumps(mine))
    if rank == 0:
        everyone = [json.loads(store.get(f"result of rank {other}")) for other in range(world)]
        Path(args.result).write_text(json.dumps(summary(args, model, everyone)))
    dist.destroy_process_group()


def update(loss: Tensor, ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Backward pass, in which DDP averages the gradients, and the optimizer's step."""
    loss.backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def compute_seconds(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> float:
    """Median time of a step that sends nothing. Afterwards the replicas differ."""
    seconds = []
    for _ in range(COMPUTE_STEPS):
        begun = time.perf_counter()
        with ddp.no_sync():
            update(ddp(*batch), ddp, optimizer)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def validation_steps(steps: int) -> set[int]:
    """The steps before which the loss on held-out files is taken; `steps` is after the last."""
    return {round(steps * part / VALIDATIONS) for part in range(VALIDATIONS + 1)}


@torch.no_grad()
def total_loss(model: nn.Module, windows: tuple[Tensor, Tensor], size: Size) -> float:
    """Loss summed over this rank's windows."""
    parts = zip(*(part.split(size.batch) for part in windows), strict=True)
    return sum(model(tokens, targets).item() * len(tokens) for tokens, targets in parts)


def digest(model: nn.Module) -> str:
    """SHA-256 of every bit of every parameter."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def summary(
    args: argparse.Namespace, model: nn.Module, ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """What all ranks found, as one result."""
    world = len(ranks)
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    ring_bytes = 2 * (world - 1) / world * gradient_bytes
    sent_bytes = ring_bytes
    if args.codec != PLAIN:
        sent = [rank["stats"]["total"]["bytes_sent"] for rank in ranks]
        sent_bytes = statistics.mean(sent) / args.steps
    validation = zip(*(rank["validation"] for rank in ranks), strict=True)
    seconds = [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    return {
        "run": args.codec,
        "ranks": world,
        "size": args.size,
        "seed": args.seed,
        "parameters": gradient_bytes // 4,
        "gradient_bytes": gradient_bytes,
        "plain_ring_bytes_per_step": ring_bytes,
        "sent_bytes_per_step": sent_bytes,
        "ratio": ring_bytes / sent_bytes,
        "step_seconds": statistics.median(seconds[WARM_UP_STEPS:] or seconds),
        "compute_seconds": max(rank["compute_seconds"] for rank in ranks),
        "digests": [rank["digest"] for rank in ranks],
        "replicas_equal": len({rank["digest"] for rank in ranks}) == 1,
        "losses": [statistics.mean(s) for s in zip(*(r["losses"] for r in ranks), strict=True)],
        "validation": [
            (parts[0][0], sum(total for _, total in parts) / VALIDATION_WINDOWS)
            for parts in validation
        ],
        "seconds": seconds,
        "stats_of_rank_0": ranks[0]["stats"],
    }


def main() -> None:
    """Joins the ranks that a launcher started, or starts them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default=PLAIN, help=f"{PLAIN}, or a codec of CCCL")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="unless a launcher sets WORLD_SIZE")
    parser.add_argument("--validate", action="store_true", help="take the loss on held-out files")
    parser.add_argument("--result", required=True, help="JSON file to write")
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", args)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    init_method = f"tcp://127.0.0.1:{get_free_port()}"
    mp.spawn(train, args=(args.ranks, init_method, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
