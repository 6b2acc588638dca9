"""Backend "cccl" and fully sharded models on GPUs, beside NCCL's own in the same run."""

from __future__ import annotations

from datetime import timedelta

import c10d_calls
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expect import EVERYTHING, assert_equal, digest, gradient
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

BOTH = "cpu:cccl,cuda:cccl"
ON = {"collective_filter": EVERYTHING, "min_size": 0, "attach_ddp": False, "strict": True}
# NCCL has no sparse tensors, no tags, and no barrier that says who is late.
NOT_OVER_NCCL = {"sparse_all_reduce", "point_to_point", "barriers"}


@pytest.fixture
def gpu_default(gpu_ranks):
    """`run(world, job, ...)`: the job's tensors are made on the GPU."""

    def run(world, job, *arguments):
        return gpu_ranks(world)(_on_gpu, job, *arguments)

    return run


def _on_gpu(job, *arguments):
    with torch.device("cuda"):
        return job(*arguments)


def _outcome(calls, group):
    """What the calls wrote, or how the group refuses them."""
    try:
        return [(t.dtype, t.shape, digest(t)) for t in calls(group)]
    except (ValueError, RuntimeError) as error:
        return [type(error).__name__]


def _same():
    plain, group = dist.new_group(backend="cpu:gloo,cuda:nccl"), dist.new_group(backend=BOTH)
    for settings in ({"compression_type": "none"}, {**ON, "compression_type": "identity"}):
        cccl.configure({**settings, "attach_ddp": False})
        for calls in c10d_calls.EVERY:
            if calls.__name__ not in NOT_OVER_NCCL:
                cccl.reset_stats()
                assert _outcome(calls, group) == _outcome(calls, plain), calls.__name__
                assert all(row["plain"] for row in cccl.stats()["rows"])
    dist.barrier(group)
    dist.destroy_process_group(group)
    dist.destroy_process_group(plain)


def test_what_is_not_compressed_equals_nccl_bitwise(gpu_default):
    """F070"""
    gpu_default(2, _same)


def _compressed():
    cccl.configure(ON)
    group, size = dist.new_group(backend=BOTH), dist.get_world_size()
    found = []
    for device in ("cuda", "cpu"):  # of one group
        whole, part = torch.ones(8000 * size, device=device), torch.empty(8000, device=device)
        mine = gradient(dist.get_rank(), 8000, torch.float32).to(device)
        expected = mine.clone()
        cccl.torch.all_reduce(expected, "sum", group)
        ways = [mine.clone() for _ in range(5)]
        dist.all_reduce(ways[0], group=group)
        dist.all_reduce(ways[1], group=group, async_op=True).wait()
        with dist._coalescing_manager(group):
            dist.all_reduce(ways[2], group=group)
            dist.all_reduce(ways[3], group=group)
        ways[4] = funcol.wait_tensor(funcol.all_reduce(ways[4], "sum", group))
        tripled = dist.all_reduce(mine, group=group, async_op=True).get_future()
        tripled = tripled.then(lambda future: future.value()[0] * 3).wait()
        assert {digest(way) for way in ways} == {digest(expected)}
        assert torch.equal(tripled, expected * 3)
        c10d_calls._all_gather(whole, mine, group=group)
        c10d_calls._reduce_scatter(part, whole, group=group)
        dist.broadcast(mine, 0, group=group)
        found += [digest(expected), digest(whole), digest(mine)]
    rows = [row for row in cccl.stats()["rows"] if row["label"] == "backend cccl"]
    assert {row["collective"] for row in rows} == set(EVERYTHING)
    assert not any(row["plain"] for row in rows)
    dist.destroy_process_group(group)
    return found


def test_every_way_of_calling_is_compressed_on_both_devices(gpu_default):
    assert_equal(gpu_default(2, _compressed))


def _on_streams():
    """F058: what a side stream writes before and reads after is in order, without the host."""
    cccl.configure(ON)
    group, side = dist.new_group(backend=BOTH), torch.cuda.Stream()
    values = torch.zeros(1 << 22)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        values += 1 + dist.get_rank()
        work = dist.all_reduce(values, group=group, async_op=True)
        work.wait()
        doubled = values * 2
    torch.cuda.current_stream().wait_stream(side)
    assert (doubled - 6).abs().max() < 0.1
    dist.destroy_process_group(group)


def test_works_follow_the_callers_stream(gpu_default):
    gpu_default(2, _on_streams)


def _stress(calls):
    """Mixed sizes, collectives and ways at once; what is compressed equals itself on all ranks."""
    cccl.configure({**ON, "min_size": "16KiB", "strict": False})
    group, generator = dist.new_group(backend=BOTH), torch.Generator("cpu").manual_seed(1)
    works, total = [], torch.zeros(())
    for _ in range(calls):
        kind, count = torch.randint(0, 4, (2,), generator=generator, device="cpu").tolist()
        tensor = torch.full((100 * 30**count,), 1.0)
        if kind == 0:
            dist.broadcast(tensor, 0, group=group)
        elif kind == 1:
            works.append(dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group, async_op=True))
        elif kind == 2:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        else:
            c10d_calls._all_gather(tensor.repeat(2), tensor, group=group)
        total += tensor[-1]
        if len(works) == 16:
            for work in works:
                work.wait()
            works.clear()
    for work in works:
        work.wait()
    assert abs(total.item() - calls) < 0.01 * calls
    dist.destroy_process_group(group)


def test_many_mixed_collectives_do_not_hang(gpu_default):
    gpu_default(2, _stress, 2000)


def _split():
    cccl.configure(ON)
    group, first = dist.new_group(backend=BOTH), dist.get_rank() < 2
    half = group.split_group([0, 1] if first else [2], timeout=timedelta(seconds=20),
                             group_name=f"half {first}")  # fmt: skip
    values = torch.full((50_000,), dist.get_rank() + 1.0)
    dist.all_reduce(values, group=half)
    assert (values - 3).abs().max() < 0.05
    return half.size(), [row["plain"] for row in cccl.stats()["rows"]]


def test_a_split_group_is_compressed_too(own_ranks):
    found = own_ranks(3, backend="cpu:gloo,cuda:nccl")(_on_gpu, _split)
    assert found == [(2, [False]), (2, [False]), (1, [True])]


def _split_by_dist():
    cccl.configure(ON)
    half = dist.split_group(split_ranks=[[0, 1]])
    if half is None:
        return dist.get_rank()
    values = torch.full((50_000,), dist.get_rank() + 1.0)
    dist.all_reduce(values, group=half)
    assert (values - 3).abs().max() < 0.05
    return [row["plain"] for row in cccl.stats()["rows"]]


def test_torchs_split_group_gives_a_compressed_group(own_ranks):
    assert own_ranks(3, backend=BOTH)(_on_gpu, _split_by_dist) == [[False], [False], 2]


WIDTH = 256


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 301), nn.ReLU(), nn.Linear(301, 7)).cuda()


def _train(model, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        batch = gradient(dist.get_rank(), (8, WIDTH), torch.float32, seed=step)
        model(batch).float().square().mean().backward()
        optimizer.step()
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
            for p in model.parameters()]  # fmt: skip


def _far(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def _ddp(compiled):
    cccl.configure({"attach_ddp": False, "min_size": 0})
    group = dist.new_group(backend=BOTH)
    expected = _train(DistributedDataParallel(_model()))
    cccl.reset_stats()
    model = DistributedDataParallel(_model(), process_group=group)
    found = _train(torch.compile(model) if compiled else model)
    assert 0 < _far(expected, found) < 0.05
    assert any(not row["plain"] for row in cccl.stats()["rows"])
    dist.destroy_process_group(group)
    return [digest(p) for p in found]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
def test_ddp_on_the_backend(gpu_default, compiled):
    """F077"""
    assert_equal(gpu_default(2, _ddp, compiled))


def _sharded(mesh, policy):
    model, options = _model(), {"mp_policy": policy} if policy else {}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def _fsdp(codec, policy, on_backend):
    cccl.configure({"attach_ddp": False, "min_size": 0, "compression_type": codec})
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    expected = _train(_sharded(mesh, policy))
    if on_backend:
        mesh = DeviceMesh.from_group(dist.new_group(backend=BOTH), "cuda")
    model = _sharded(mesh, policy)
    if not on_backend:
        cccl.torch.compress_fsdp(model, {"compression_type": codec, "strict": codec != "identity"})
    cccl.reset_stats()
    found = _train(model)
    rows = [row for row in cccl.stats()["rows"] if row["collective"] == "reduce_scatter"]
    assert rows
    assert all(row["plain"] == (codec == "identity") for row in rows)
    far = _far(expected, found)
    assert far == 0 if codec == "identity" else 0 < far < 0.05
    return [digest(p) for p in found]


@pytest.mark.parametrize("on_backend", [False, True], ids=["hooks", "backend"])
@pytest.mark.parametrize("codec", ["identity", "block_float8"])
@pytest.mark.parametrize(
    "policy",
    [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)],
    ids=["float32", "bf16, reduced in float32"],
)
def test_fully_sharded_models_train(gpu_default, codec, policy, on_backend):
    """F078"""
    assert_equal(gpu_default(2, _fsdp, codec, policy, on_backend))
