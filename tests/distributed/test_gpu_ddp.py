"""DistributedDataParallel on GPUs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, parameters_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")


def _model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10)).cuda()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(32, 256, generator=generator)
    return x.cuda(), (x[:, :10].argmax(1)).cuda()


def _train(config, amp):
    device = torch.cuda.current_device()
    model = DistributedDataParallel(_model(), device_ids=[device], bucket_cap_mb=0.5)
    cccl.torch.compress(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    losses = []
    for step in range(12):
        x, y = _batch(step % 2)
        with torch.autocast("cuda", torch.float16, enabled=amp):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    rows = [row for row in cccl.stats()["rows"] if row["label"].startswith("bucket")]
    assert len(rows) > 1
    assert not any(row["plain"] for row in rows)
    return parameters_digest(model.cpu())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
def test_ranks_stay_bitwise_equal(gpu_ranks, world, amp):
    config = cccl.Config(compression_type="block_float8", strict=True)
    assert_equal(gpu_ranks(world)(_train, config, amp))


def _overflow():
    """GradScaler sees an Inf of one rank on all, skips the step and halves its scale."""
    model = DistributedDataParallel(_model(), device_ids=[torch.cuda.current_device()])
    cccl.torch.compress(model, {"compression_type": "block_float8"})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = _batch(0)
    if dist.get_rank() == 1:
        x[3, 5] = float("inf")
    scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return scaler.get_scale()


def test_a_grad_scaler_skips_what_one_rank_overflowed(gpu_ranks):
    assert gpu_ranks(2)(_overflow) == [512.0, 512.0]


def _wrapped_on_a_side_stream():
    """The wrapper's hooks belong to another stream than the training that calls them."""
    found = []
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model = DistributedDataParallel(_model(), device_ids=[torch.cuda.current_device()])
            cccl.torch.compress(model, {"compression_type": "block_float8", "strict": True})
        torch.cuda.current_stream().wait_stream(stream)
        x, y = _batch(0)
        for _ in range(2):
            nn.functional.cross_entropy(model(x), y).backward()
        found.append([digest(p.grad) for p in model.parameters()])
    assert found[0] == found[1]
    return found


def test_a_model_wrapped_on_a_side_stream_trains_on_another(gpu_ranks):
    """F064"""
    assert_equal(gpu_ranks(2)(_wrapped_on_a_side_stream))


def _configured():
    """`cccl.configure` and plain DDP."""
    cccl.configure({"compression_type": "block_float4", "strict": True})
    model = DistributedDataParallel(_model(), device_ids=[torch.cuda.current_device()])
    x, y = _batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    torch.cuda.synchronize()
    until = time.monotonic() + 10
    while not cccl.stats()["rows"] and time.monotonic() < until:
        time.sleep(0.01)  # the calls are counted just after
    assert {row["codec"].split("(")[0] for row in cccl.stats()["rows"]} == {"block_float4"}


def test_configure_attaches_to_a_model_on_gpus(gpu_ranks):
    gpu_ranks(2)(_configured)


def _profiled():
    model = DistributedDataParallel(_model(), device_ids=[torch.cuda.current_device()])
    cccl.torch.compress(model, {"compression_type": "block_float8"})
    x, y = _batch(0)
    nn.functional.cross_entropy(model(x), y).backward()
    with torch.profiler.profile() as profile:
        nn.functional.cross_entropy(model(x), y).backward()
        torch.cuda.synchronize()
    return sorted({e.key for e in profile.key_averages() if e.key.startswith("cccl_")})


def test_a_profiler_shows_the_ranges(gpu_ranks):
    expected = ["cccl_communicate", "cccl_compress", "cccl_decompress"]
    assert gpu_ranks(2)(_profiled) == [expected, expected]
