"""Weights handed over from a trainer to inference ranks, plain and without losing a bit.

    torchrun --nproc-per-node 2 examples/hand_over.py
    python benchmarks/netlab.py run --hosts 2 --rate 1gbit -- python examples/hand_over.py

Rank 0 trains a small GPT for a few steps; all other ranks take its state_dict in bfloat16 by
broadcast, as reinforcement learning does after each step of training. Both ways alternate, and
medians count. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable

import corpus
import torch
import torch.distributed as dist
from gpt import GPT, SIZES

import cccl
import cccl.torch

LOSSLESS = cccl.Config(compression_type="none", weights_type="lossless")
PLAIN = cccl.Config(compression_type="none")


def hand_over(tensors: Iterable[torch.Tensor], config: cccl.Config, src: int = 0) -> None:
    """Gives every rank the tensors of rank `src`: all of one dtype in one message."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for group in groups.values():
        flat = torch.cat([tensor.flatten() for tensor in group])
        cccl.torch.broadcast(flat, src, config=config, label="hand-over")
        parts = flat.split([tensor.numel() for tensor in group])
        for tensor, part in zip(group, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def train(model: GPT, steps: int, size: str) -> None:
    """What makes weights look as weights do."""
    shape = SIZES[size]
    text, _ = corpus.load()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*corpus.sample(text, shape.batch, shape.context, generator)).backward()
        optimizer.step()


def main() -> None:
    """Trains, hands over, compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--steps", type=int, default=20, help="of training on rank 0")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else "cpu"
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(dist.get_rank())
    model = GPT(SIZES[options.size])
    if dist.get_rank() == 0:
        train(model, options.steps, options.size)
    state = [tensor.detach().to(device, torch.bfloat16) for tensor in model.state_dict().values()]

    times: dict[str, list[float]] = {"plain": [], "lossless": []}
    sent = {}
    for _ in range(options.repeats + 1):
        for name, config in (("plain", PLAIN), ("lossless", LOSSLESS)):
            received = [tensor.clone() for tensor in state]
            dist.barrier()
            cccl.reset_stats()
            begun = time.perf_counter()
            hand_over(received, config)
            if cuda:
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - begun)
            sent[name] = sum(t.nbytes for t in state)
            if name == "lossless":
                sent[name] = cccl.stats()["total"]["bytes_sent"]
            # All ranks against rank 0's own bits, which go to them plain.
            exact = torch.cat([t.flatten() for t in state]).view(torch.uint8)
            dist.broadcast(exact, 0)
            found = torch.cat([t.flatten() for t in received]).view(torch.uint8)
            if not torch.equal(found, exact):
                raise SystemExit(f"rank {dist.get_rank()}: {name} changed bits")
    if dist.get_rank() == 0:
        # The first of each pays for connections and memory.
        ms = {name: 1e3 * statistics.median(values[1:]) for name, values in times.items()}
        print(json.dumps({
            "ranks": dist.get_world_size(), "plain_bytes": sent["plain"],
            "lossless_bytes": sent["lossless"], "plain_ms": ms["plain"],
            "lossless_ms": ms["lossless"], "speedup": ms["plain"] / ms["lossless"],
        }))  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
