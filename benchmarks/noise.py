"""What a noise budget chooses while a small GPT learns, and what measuring costs.

    torchrun --nproc-per-node 2 benchmarks/noise.py train --picture codecs.png
    python benchmarks/noise.py cost

`train`: for each configuration the same training, by real DDP over gloo: the loss on held-out
files at its end, and bits per value that went over the wire, as the mean of both legs. Of a noise
budget also the noise of the mean gradient (standard deviation over root mean square) and the bits
of the ways chosen, from the first to the last quarter of the measurements. The picture is of the
first share.
`cost`: what one rank takes to add up 4 MiB of its shard and to encode the mean, in a step that
measures and in others: microseconds, the lower quartile of 40 times in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _core

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import corpus
from gpt import GPT, SIZES

AT_8 = {"compression_type": "block_float8"}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"compression_type": "none"},
    "8 bits": AT_8,
    "4 bits": {"compression_type": "block_float4"},
    "share 0.1": {**AT_8, "max_noise_share": 0.1},
    "share 0.01": {**AT_8, "max_noise_share": 0.01},
}
RISING_STEPS, WINDOWS = 10, 256
COST_VALUES, COST_TIMES = 1 << 20, 40


def train(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One configuration, as one of the ranks."""
    size, steps = SIZES[options.size], options.steps
    torch.manual_seed(options.seed)
    ddp = DistributedDataParallel(GPT(size), bucket_cap_mb=1)
    state = cccl.torch.compress(ddp, CONFIGS[name])
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RISING_STEPS, 1 - step / steps)
    )
    text, held_out = corpus.load()
    generator = torch.Generator().manual_seed(1000 * options.seed + dist.get_rank())
    cccl.reset_stats()
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(*corpus.sample(text, size.batch, size.context, generator)).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        loss = float(ddp.module(*corpus.evenly(held_out, WINDOWS, size.context)))
    total, world = cccl.stats()["total"], dist.get_world_size()
    sent = 8 * total["bytes_sent"] / total["values"] * world / (2 * (world - 1))
    row = {"way": name, "loss": round(loss, 4), "bits": round(sent, 2)}
    if history := state.history:
        quarter = len(history) // 4
        for part, some in (("first", history[:quarter]), ("last", history[-quarter:])):
            row[f"noise, {part}"] = round(statistics.median(one.noise or 0.0 for one in some), 2)
            row[f"bits, {part}"] = round(statistics.mean(one.bits for one in some), 2)
        if options.picture and dist.get_rank() == 0 and name == "share 0.1":
            state.draw_history(options.picture)
    return row


def cost(world: int) -> dict[str, Any]:
    """Of a reduction of so many contributions."""
    codec, rng = _core.make_codec("block_float8", {}), np.random.default_rng(0)
    room = codec.max_encoded_bytes(COST_VALUES, 1)
    payloads = [np.empty(room, np.uint8) for _ in range(world)]
    out = np.empty(room, np.uint8)
    for payload in payloads:
        values = rng.standard_normal(COST_VALUES, np.float32)
        codec.encode(
            values.ctypes.data, COST_VALUES, 1, payload.ctypes.data, room, 0, 0, True
        )  # fmt: skip
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(COST_TIMES):
        for measures, found in times.items():
            begun = time.perf_counter()
            codec.reduce_encode(
                [payload.ctypes.data for payload in payloads], room, float(world), codec,
                out.ctypes.data, room, COST_VALUES, 1, 0, 0, measures=measures,
            )  # fmt: skip
            found.append(time.perf_counter() - begun)
    plain, measuring = (statistics.quantiles(times[key], n=4)[0] for key in (False, True))
    return {
        "ranks": world, "plain_us": round(1e6 * plain), "measuring_us": round(1e6 * measuring),
        "ratio": round(measuring / plain, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["train", "cost"])
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", help="a file for the codecs over the steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "cost":
        for world in (2, 4, 8):
            print(json.dumps(cost(world)))
        return
    dist.init_process_group("gloo")
    for name in CONFIGS:
        row = train(name, options)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
