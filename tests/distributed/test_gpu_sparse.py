"""sparse over NCCL: bits and bytes are those of the CPU, whatever each rank's share of zeros."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import EVERYTHING, assert_equal, digest, rows_of, sparse

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")


def settings(codec, **more) -> cccl.Config:
    return cccl.Config(
        compression_type=codec,
        collective_filter=EVERYTHING,
        strict=True,
        chunk_size="64KiB",
        algorithm="two_shot",
        **more,
    )


def _like_the_cpu(codec, zeros, more):
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    config = settings(codec, **more)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for count in (0, 1, 2049, 100_001):
            whole, results = sparse(rank, count * world, zeros[rank]).to(dtype), []
            for device in ("cpu", "cuda"):
                cccl.reset_stats()
                mean = whole.to(device, copy=True)
                part = torch.empty(count, dtype=dtype, device=device)
                cccl.torch.reduce_scatter(part, mean, config=config)
                gathered = torch.empty_like(mean)
                cccl.torch.all_gather(gathered, part, config=config)
                sent = mean.clone()
                cccl.torch.broadcast(sent, world - 1, config=config)
                work = cccl.torch.all_reduce(mean, config=config, async_op=True)
                work.wait(30.0)  # the host: all that came before is counted
                sizes = [rows_of(name, dtype)[0]["bytes_sent"] for name in EVERYTHING if count]
                results.append(([digest(t) for t in (mean, part, gathered, sent)], sizes))
            for cpu, gpu in zip(*results, strict=True):
                assert gpu == cpu, f"{dtype}, {count} values: CPU {cpu}, GPU {gpu}"
            shared = results[0][0]
            found.append((shared[0], shared[2], shared[3]))
    return found


@pytest.mark.parametrize("zeros", [(0.9, 0.9), (0.0, 1.0, 0.5), (0.99, 0.6, 0.95, 0.0)], ids=str)
@pytest.mark.parametrize(
    ("codec", "more"),
    [("sparse", {}), ("sparse(block_float8)", {"window": 2}), ("sparse", {"top_k": 0.05})],
    ids=str,
)
def test_collectives_have_the_bits_and_bytes_of_the_cpu(gpu_ranks, codec, more, zeros):
    """F074: sizes differ between ranks, and the sum's form is chosen anew."""
    assert_equal(gpu_ranks(len(zeros))(_like_the_cpu, codec, zeros, more))


def _in_ddp():
    torch.manual_seed(0)
    model = torch.nn.Embedding(5000, 64).cuda()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    cccl.torch.compress(ddp, cccl.Config(compression_type="sparse", strict=True))
    words = torch.arange(40, device="cuda") * (7 + dist.get_rank())
    cccl.reset_stats()
    ddp(words).square().sum().backward()
    behind = torch.zeros(1, dtype=torch.float64, device="cuda")
    cccl.torch.all_reduce(behind, async_op=True).wait(30.0)  # the host: the hook's are counted
    (row,) = rows_of("all_reduce", torch.float32)
    assert row["bytes_sent"] < 0.1 * row["plain_bytes"]
    return digest(model.weight.grad)


def test_the_gradients_of_an_embedding_are_few_bytes(gpu_ranks):
    assert_equal(gpu_ranks(2)(_in_ddp))
