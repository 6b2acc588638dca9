"""Error feedback over NCCL: what ranks get and keep has the bits of the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import EVERYTHING, assert_equal, digest, gradient, parameters_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")
CODECS = ({"compression_type": "block_float4"}, {"compression_type": "block_float2"},
          {"compression_type": "sparse", "top_k": 0.05})  # fmt: skip


def settings(codec, **more) -> cccl.Config:
    return cccl.Config(
        **codec,
        collective_filter=EVERYTHING,
        strict=True,
        chunk_size="64KiB",
        algorithm="two_shot",
        **({"error_feedback": "both"} | more),
    )


def _like_the_cpu(codec, type, bad):
    """Steps of two collectives, of which one may have an Inf; on each device with a group of its
    own, as residuals stay on one."""
    rank, world, results = dist.get_rank(), dist.get_world_size(), []
    config = settings(codec, residual_type=type, residual_decay=0.9)
    for device in ("cpu", "cuda"):
        group, found, sizes = dist.new_group(), [], set()
        store = cccl.torch.state_of(group)
        for step in range(8):
            whole = gradient(rank, 40_001 * world, torch.float32, seed=step)
            if step == bad and rank == 0:
                whole[1234] = float("inf")
            mean, part = whole.to(device, copy=True), torch.empty(40_001, device=device)
            cccl.torch.all_reduce(mean, group=group, config=config, label="w")
            cccl.torch.reduce_scatter(part, whole.to(device), group=group, config=config, label="v")
            found += [digest(mean), digest(part)]
            if step != bad:
                assert mean.isfinite().all()
            if step > 1:
                sizes.add(store.nbytes)
        assert len(sizes) == 1
        for tensor in store.state_dict()["tensors"]:
            found += [digest(tensor[leg]["bytes"]) for leg in ("sender", "owner")]
        results.append((found, sizes))
        store.reset()
        assert store.nbytes == 0
    assert results[0] == results[1], f"CPU {results[0]}, GPU {results[1]}"
    return results[0][0][:16:2]  # of all_reduce, which all ranks have alike


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bad", [None, 3])
@pytest.mark.parametrize("type", ["float32", "bfloat16", "block_float8"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_steps_have_the_bits_of_the_cpu(gpu_ranks, codec, type, bad, world):
    """F009, F110: of results and of what is kept, a step that is not finite included."""
    assert_equal(gpu_ranks(world)(_like_the_cpu, codec, type, bad))


def _model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10)).cuda()


def _trained(skips):
    """Ten steps, of which the fifth has a NaN in one bucket, or is left out."""
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.25)
    state = cccl.torch.compress(
        ddp, {"compression_type": "block_float2", "error_feedback": "both", "strict": True}
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    cccl.reset_stats()
    for step in range(10):
        if step == 5 and skips:
            continue
        optimizer.zero_grad()
        loss = ddp(gradient(dist.get_rank(), (32, 256), torch.float32, seed=step).cuda()).square()
        if step == 5 and dist.get_rank() == 0:
            hook = ddp.module[8].bias.register_hook(lambda g: torch.full_like(g, float("nan")))
            loss.mean().backward()
            hook.remove()
        else:
            loss.mean().backward()
        if step != 5:  # what a GradScaler does
            optimizer.step()
        if step == 2:
            size = state.store.nbytes
    torch.cuda.synchronize()
    rows = [row for row in cccl.stats()["rows"] if row["label"].startswith("bucket")]
    assert len(rows) > 1
    assert all(row["feedback_calls"] == row["calls"] for row in rows)
    assert state.store.moves > 0
    assert state.store.nbytes == size > 0
    assert cccl.stats()["total"]["state_bytes"] >= size
    return parameters_digest(ddp.cpu())


def test_ddp_keeps_residuals_by_parameter_and_skips_a_step_with_a_nan(gpu_ranks):
    """F009, F047: through the rebuilding of buckets, nobody waiting for the device."""
    found = gpu_ranks(2)(_trained, False)
    assert_equal(found)
    assert found == gpu_ranks(2)(_trained, True)


def _arrives():
    config = settings({"compression_type": "block_float2"})
    total = torch.zeros(4096, dtype=torch.float64, device="cuda")
    for _ in range(60):
        tensor = torch.full((4096,), 0.02, device="cuda")
        tensor[::128] = 1.0
        cccl.torch.all_reduce(tensor, config=config, label="w")
        total += tensor
    assert (total[1:128] / 60 - 0.02).abs().max() < 0.01
    with pytest.raises(cccl.UnsupportedError, match="a group of their own"):
        cccl.torch.all_reduce(torch.ones(4096), config=config, label="on the CPU")
    cccl.torch.state_of().reset()
    return digest(total)


def test_what_two_bits_round_to_nothing_arrives(gpu_ranks):
    assert_equal(gpu_ranks(2)(_arrives))


def _captured():
    config = settings({"compression_type": "block_float4"})
    tensor = torch.ones(5000, device="cuda")
    cccl.torch.all_reduce(tensor, config=config, label="w")
    torch.cuda.synchronize()
    refused = pytest.raises(cccl.UnsupportedError, match="error feedback cannot be captured")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        cccl.torch.all_reduce(tensor, config=config, label="w")
    cccl.torch.all_reduce(tensor, config=config, label="w")
    cccl.torch.state_of().reset()
    return digest(tensor)


def test_a_capture_is_refused_and_the_group_goes_on(gpu_ranks):
    assert_equal(gpu_ranks(2)(_captured))
