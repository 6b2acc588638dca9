"""diff over NCCL: the last mean lives on the device, and all has the bits of the CPU."""

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
INNERS = ("block_float8", "block_float4", "cast_bf16")


def settings(codec: str = "diff(block_float4)", **more) -> cccl.Config:
    return cccl.Config(
        compression_type=codec,
        collective_filter=EVERYTHING,
        strict=True,
        **({"algorithm": "two_shot", "chunk_size": "64KiB"} | more),
    )


def seen_alike(rank: int, count: int, dtype: torch.dtype, step: int) -> torch.Tensor:
    """What all ranks see at every step, but for some cells, and noise of their own."""
    shared = gradient(99, count, torch.float64)
    own = gradient(rank, count, torch.float64, seed=step)
    values = (1 + step / 10) * shared + 0.1 * own
    values[4096:8192] = own[4096:8192]
    return values.to(dtype)


def _steps(device, config, dtype, *, bad=None, skipped=None, steps=7):
    """In a group of its own, as what is kept stays on one device."""
    group, found, errors = dist.new_group(), [], []
    store = cccl.torch.state_of(group)
    for step in range(steps):
        if step == skipped:
            continue
        for label, count in (("w", 120_003), ("v", 5000)):
            world = [seen_alike(r, count, dtype, step) for r in range(dist.get_world_size())]
            if step == bad:
                world[0][1234] = float("inf")
            mean = world[dist.get_rank()].to(device, copy=True)
            cccl.torch.all_reduce(mean, group=group, config=config, label=label)
            found.append(digest(mean))
            exact = sum(w.double() for w in world) / len(world)
            finite = mean.cpu().isfinite()
            assert finite.all() or step == bad
            error = (mean.cpu().double() - exact)[finite].square().mean()
            errors.append(float(error / exact[finite].square().mean()))
    assert store.nbytes >= 125_003 * dtype.itemsize
    size = store.nbytes
    store.reset()
    assert store.nbytes == 0
    return found, size, errors


def _like_the_cpu(config, dtype, where):
    cpu, cuda = (_steps(device, config, dtype, **where) for device in ("cpu", "cuda"))
    assert cuda == cpu
    return cuda[0]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("where", [{}, {"bad": 3}, {"skipped": 3}], ids=str)
@pytest.mark.parametrize("inner", INNERS)
def test_steps_have_the_bits_of_the_cpu(gpu_ranks, inner, where, world):
    """F009: a step that is not finite, or is left out, included."""
    config = settings(f"diff({inner})")
    assert_equal(gpu_ranks(world)(_like_the_cpu, config, torch.float32, where))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_every_dtype_and_algorithm(gpu_ranks, algorithm, dtype):
    config = settings(algorithm=algorithm)
    assert_equal(gpu_ranks(2)(_like_the_cpu, config, dtype, {"bad": 4}))


@pytest.mark.parametrize("type", ["float32", "bfloat16"])
def test_error_feedback_around_it(gpu_ranks, type):
    config = settings("diff(block_float2)", error_feedback="both", residual_type=type)
    assert_equal(gpu_ranks(2)(_like_the_cpu, config, torch.float32, {"bad": 3}))


def _helps():
    found = _steps("cuda", settings(), torch.float32)[2][::2]
    plain = []
    for step in range(7):
        world = [seen_alike(r, 120_003, torch.float32, step) for r in range(dist.get_world_size())]
        mean = world[dist.get_rank()].cuda()
        cccl.torch.all_reduce(mean, config=settings("block_float4"))
        exact = sum(w.double() for w in world) / len(world)
        plain.append(float((mean.cpu() - exact).square().mean() / exact.square().mean()))
    assert found[0] == pytest.approx(plain[0], rel=1e-3)  # nothing is known in the first step
    assert all(f < 0.5 * p for f, p in zip(found[1:], plain[1:], strict=True)), (found, plain)


def test_what_ranks_share_is_sent_with_less_error(gpu_ranks):
    gpu_ranks(2)(_helps)


def _anew():
    """After other shapes under the same name, and after a reset, the first step knows nothing."""
    group, config = dist.new_group(), settings()
    plain = settings("block_float4")

    def mean(count, step, config):
        tensor = seen_alike(dist.get_rank(), count, torch.float32, step).cuda()
        cccl.torch.all_reduce(tensor, group=group, config=config, label="w")
        return digest(tensor)

    mean(9000, 0, config)
    assert mean(9000, 1, config) != mean(9000, 1, plain)
    assert mean(20_000, 1, config) == mean(20_000, 1, plain)
    assert mean(20_000, 2, config) != mean(20_000, 2, plain)
    cccl.torch.state_of(group).reset()
    assert mean(20_000, 2, config) == mean(20_000, 2, plain)
    assert mean(20_000, 3, config) != mean(20_000, 3, plain)
    cccl.torch.state_of(group).load_state_dict(cccl.torch.state_of(group).state_dict())
    assert mean(20_000, 3, config) == mean(20_000, 3, plain)


def test_it_begins_anew_with_other_shapes_a_reset_and_a_resume(gpu_ranks):
    gpu_ranks(2)(_anew)


def _another_mean():
    group, config = dist.new_group(), settings()

    def begin(step):
        tensor = seen_alike(dist.get_rank(), 20_000, torch.float32, step).cuda()
        work = cccl.torch.all_reduce(tensor, group=group, config=config, label="w", async_op=True)
        return tensor, work

    for step in range(2):
        begin(step)[1].wait(20.0)
    if dist.get_rank() == 1:
        cccl.torch.state_of(group).reset()
    tensor, work = begin(2)
    if dist.get_rank() == 1:
        with pytest.raises(
            cccl.CorruptPayloadError, match=r"prediction number 2 .* here is number 0"
        ):
            work.wait(20.0)
        torch.cuda.synchronize()
        assert tensor.isnan().all()
    else:  # it may be done before the other knows
        try:
            work.wait(20.0)
        except cccl.Error as error:
            assert "prediction number 2" in str(error)
        torch.cuda.synchronize()
        exact = sum(seen_alike(r, 20_000, torch.float32, 2).double() for r in range(2)) / 2
        right = (tensor.cpu() - exact).abs() < 0.2 * exact.abs().max()
        assert (right | tensor.cpu().isnan()).all(), "a wrong value"
        assert tensor.isnan().any()
    cccl.torch.recover(group, deadline=30.0)
    tensor, work = begin(3)
    work.wait(20.0)
    assert tensor.isfinite().all()
    return digest(tensor)


def test_a_rank_that_goes_by_another_mean_is_found_out(own_ranks):
    """Reset on one rank alone: an error there, and never a wrong value."""
    assert_equal(own_ranks(2, backend="cpu:gloo,cuda:nccl")(_another_mean))


def _model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10)).cuda()


def _trained(feedback):
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=0.25)
    state = cccl.torch.compress(
        ddp,
        {"compression_type": "diff(block_float4)", "error_feedback": feedback, "strict": True},
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    sizes = set()
    for step in range(10):
        optimizer.zero_grad()
        data = gradient(dist.get_rank(), (32, 256), torch.float32, seed=step).cuda()
        ddp(data).square().mean().backward()
        optimizer.step()
        if step > 2:
            sizes.add(state.store.nbytes)
    torch.cuda.synchronize()
    assert len(sizes) == 1, "what is kept does not grow"
    values = sum(p.numel() for p in ddp.parameters())
    assert min(sizes) >= 4 * values
    return parameters_digest(ddp.cpu())


@pytest.mark.parametrize("feedback", ["none", "both"])
@pytest.mark.parametrize("world", [2, 3])
def test_replicas_stay_equal_through_rebuilt_buckets(gpu_ranks, world, feedback):
    assert_equal(gpu_ranks(world)(_trained, feedback))


def _host_waits():
    """Whether the host comes back while the device is still busy with what was before."""
    config = settings(chunk_size="1MiB")  # fewer launches than a stream holds
    tensor = gradient(dist.get_rank(), 1 << 20, torch.float32).cuda()
    for _ in range(3):
        cccl.torch.all_reduce(tensor, config=config, label="w")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    before = torch.cuda.Event()
    before.record()
    cccl.torch.all_reduce(tensor, config=config, label="w")
    waited = before.query()
    torch.cuda.synchronize()
    cccl.torch.state_of().reset()
    return waited


def test_the_host_waits_for_nothing(gpu_ranks):
    assert gpu_ranks(2)(_host_waits) == [False] * 2


def _captured():
    config = settings()
    tensor = torch.ones(5000, device="cuda")
    cccl.torch.all_reduce(tensor, config=config, label="w")
    torch.cuda.synchronize()
    refused = pytest.raises(cccl.UnsupportedError, match="which mean it predicts by")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        cccl.torch.all_reduce(tensor, config=config, label="w")
    cccl.torch.all_reduce(tensor, config=config, label="w")
    cccl.torch.state_of().reset()
    return digest(tensor)


def test_a_capture_is_refused_and_the_group_goes_on(gpu_ranks):
    assert_equal(gpu_ranks(2)(_captured))
