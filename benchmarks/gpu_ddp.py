"""Step times of a GPT's training on GPUs: plain DDP, PyTorch's hooks, and ours; or FSDP2.

Runs as one rank of several, e.g. on four hosts behind 10 Gbit/s that share one GPU:

    python benchmarks/netlab.py run --hosts 4 --rate 10gbit --mtu 9000 -- \
        python benchmarks/gpu_ddp.py --json

or with a GPU each: torchrun --nproc-per-node gpu benchmarks/gpu_ddp.py --model 1b [--sharded]
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from corpus import load, sample
from gpt import GPT, Size

MODELS = {
    "86m": Size(layers=12, width=768, heads=12, context=512, batch=8),
    "1b": Size(layers=22, width=1920, heads=15, context=512, batch=8),
}
SHARDED_WAYS = ("fp32", "bf16", "block_float8", "block_float4")
WAYS = ("none", "fp32", "bf16", "powersgd", "block_float8", "block_float4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all")
    parser.add_argument("--model", choices=MODELS, default="86m")
    parser.add_argument(
        "--sharded", action="store_true", help="FSDP2 in place of DDP; ways: how gradients go"
    )
    parser.add_argument(
        "--settings", nargs="+", default=[""], help="of ours, e.g. chunk_size=8MiB,window=1"
    )
    parser.add_argument("--steps", type=int, default=30, help="of which the first third warms up")
    parser.add_argument("--trace", type=Path, help="write a profiler trace of rank 0 here")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    try:
        for way in options.ways or (SHARDED_WAYS if options.sharded else WAYS):
            for settings in options.settings if way.startswith("block_float") else [""]:
                row = measure(way, settings, device, options)
                if dist.get_rank() == 0:
                    print(json.dumps(row) if options.json else row, flush=True)
    finally:
        dist.destroy_process_group()


def measure(
    way: str, settings: str, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Median step of the slowest rank, and what the hook cost the host."""
    torch.manual_seed(0)
    size = MODELS[options.model]
    model: torch.nn.Module = GPT(size).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    host: list[float] = []
    if options.sharded:
        model = sharded(model, way)
    else:
        model = DistributedDataParallel(model, device_ids=[device], gradient_as_bucket_view=True)
        attach(model, way, settings, host)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    text, _ = load()
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        [t.to(device) for t in sample(text, size.batch, size.context, generator)] for _ in range(8)
    ]
    cccl.reset_stats()
    times, backward, losses = [], [], []
    warm = options.steps // 3

    def train(step: int) -> None:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*batches[step % len(batches)])
        torch.cuda.synchronize()
        middle = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        backward.append(time.perf_counter() - middle)
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        losses.append(loss.item())

    for step in range(options.steps):
        train(step)
    compute = 0.0
    if dist.get_rank() == 0:
        with torch.profiler.profile() as profiler:
            train(options.steps)
        compute = 1e-3 * sum(
            event.device_time
            for event in profiler.events() or []
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not any(name in event.name for name in ("cccl", "nccl"))
        )
        if options.trace:
            stem = f"{options.trace.stem}-{way}"
            profiler.export_chrome_trace(str(options.trace.with_stem(stem)))
    else:
        train(options.steps)
    measured = torch.tensor([times[warm:-1], backward[warm:-1]], device=device)
    dist.all_reduce(measured, dist.ReduceOp.MAX)
    step_ms, backward_ms = (1e3 * statistics.median(row) for row in measured.tolist())
    hooks = host[len(host) // 3 :]
    return {
        "way": way,
        "model": options.model,
        "sharded": options.sharded,
        "settings": settings,
        "world_size": dist.get_world_size(),
        "parameters": parameters,
        "step_ms": step_ms,
        "backward_ms": backward_ms,
        "compute_kernels_ms": compute,
        "hook_host_us": 1e6 * statistics.median(hooks) if hooks else 0.0,
        "loss": losses[-1],
    }


def sharded(model: GPT, way: str) -> torch.nn.Module:
    """Of blocks, whose parameters are gathered in bfloat16; `way`: how gradients are scattered."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    reduced = torch.bfloat16 if way == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(torch.bfloat16, reduced)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if way.startswith("block_float"):
        cccl.torch.compress_fsdp(model, {"compression_type": way, "strict": True})
    return model


def attach(model: DistributedDataParallel, way: str, settings: str, host: list[float]) -> None:
    """Registers the hook of that name; ours with a clock around it."""
    if way == "none":
        model.register_comm_hook(None, _nothing)
    elif way == "bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif way == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way != "fp32":
        pairs = (pair.split("=") for pair in settings.split(",") if pair)
        given = {key: int(value) if value.isdigit() else value for key, value in pairs}
        config = cccl.Config.load({"compression_type": way, "strict": True, **given})
        state = cccl.torch.CompressionState(config=config)

        def timed(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            begun = time.perf_counter()
            future = cccl.torch.compression_hook(state, bucket)
            host.append(time.perf_counter() - begun)
            return future

        model.register_comm_hook(state, timed)


def _nothing(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


if __name__ == "__main__":
    main()
