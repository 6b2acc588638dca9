"""How much of the codec's work an all-reduce over NCCL hides behind its transfers, from a profiler
trace of its kernels: beyond the first encode and the last decode nothing should be exposed. Runs as
one rank of several, as gpu_ddp.py does.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import cccl
import cccl.torch

Span = tuple[float, float]  # begin and end in us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**25, help="bfloat16 values")
    parser.add_argument("--codecs", nargs="+", default=["block_float8", "block_float4"])
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    tensor = torch.randn(options.numel, device=device).bfloat16()
    for codec in options.codecs:
        config = cccl.Config(compression_type=codec)
        for _ in range(20):  # the first ones are timed, which adds work
            cccl.torch.all_reduce(tensor, config=config)
        dist.barrier()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            cccl.torch.all_reduce(tensor, config=config)
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(json.dumps({"codec": codec, "world_size": dist.get_world_size(),
                              "numel": options.numel, **overlap(profiler)}))  # fmt: skip
    dist.destroy_process_group()


def overlap(profiler: profile) -> dict[str, float]:
    """Of the kernels of one collective, in us."""
    codec: list[Span] = []
    transfers: list[Span] = []
    for event in profiler.events() or []:
        span = event.time_range.start, event.time_range.end
        if "nccl" in event.name:
            transfers.append(span)
        elif "encode_kernel" in event.name or "decode_kernel" in event.name:
            codec.append(span)
    codec.sort()
    transfers.sort()
    total = max(codec[-1][1], transfers[-1][1]) - codec[0][0]
    ends = (codec[0][1] - codec[0][0]) + (codec[-1][1] - codec[-1][0])
    exposed = sum(end - begin - covered((begin, end), transfers) for begin, end in codec)
    return {
        "total_us": total,
        "codec_us": sum(end - begin for begin, end in codec),
        "exposed_us": exposed,
        "first_encode_and_last_decode_us": ends,
        "exposed_beyond_share": max(0.0, exposed - ends) / total,
        "no_transfer_share": 1 - covered((codec[0][0], codec[0][0] + total), transfers) / total,
    }


def covered(span: Span, by: list[Span]) -> float:
    """How much of a span others, sorted by their begin, cover together."""
    done, sum_ = span[0], 0.0
    for begin, end in by:
        begin, end = max(begin, done), min(end, span[1])
        if end > begin:
            sum_ += end - begin
            done = end
    return sum_


if __name__ == "__main__":
    main()
