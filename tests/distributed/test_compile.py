"""torch.compile of models and functions: compressed as without, and right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expect import assert_equal, digest, gradient
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch

# Traces, and lowers forward and backward, but runs them without a C++ compiler.
BACKEND = "aot_eager"
STEPS = 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 300), nn.Linear(300, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def _ddp_on_the_backend(group, plain):
    return DistributedDataParallel(Net(), process_group=group)


def _ddp_with_the_hook(group, plain):
    ddp = DistributedDataParallel(Net(), process_group=plain)
    cccl.torch.compress(ddp)
    return ddp


def _fsdp_on_the_backend(group, plain):
    model, mesh = Net(), DeviceMesh.from_group(group, "cpu")
    for layer in (model.first, model.last, model):
        fully_shard(layer, mesh=mesh)
    return model


def _fsdp_with_the_hooks(group, plain):
    model = _fsdp_on_the_backend(plain, plain)
    cccl.torch.compress_fsdp(model)
    return model


def _train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cccl.reset_stats()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(
            gradient(dist.get_rank(), (8, 24), torch.float32, seed=step)
        ).square().mean().backward()
        optimizer.step()
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    calls = {(r["collective"], r["label"]): r["calls"] for r in cccl.stats()["rows"]
             if not r["plain"]}  # fmt: skip
    return [v.detach() for v in values], calls


def _trained(build):
    from torch._dynamo.testing import CompileCounterWithBackend

    cccl.configure({"attach_ddp": False, "min_size": 2000})
    group, plain = dist.new_group(backend="cpu:cccl"), dist.new_group(backend="gloo")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(BACKEND)
    eager, calls = _train(build(group, plain))
    compiled, calls_compiled = _train(torch.compile(build(group, plain), backend=counter))
    assert 0 < counter.frame_count < STEPS, "compiled, and not anew for each step"
    assert calls, "nothing was compressed"
    assert calls_compiled == calls
    for one, other in zip(eager, compiled, strict=True):
        # DDP orders buckets by when gradients come; then other values share a scale.
        if "ddp" in build.__name__:
            assert (one - other).abs().max() < 2e-3
        else:
            assert torch.equal(one, other)
    return [digest(value) for value in compiled]


@pytest.mark.parametrize(
    "build",
    [_ddp_on_the_backend, _ddp_with_the_hook, _fsdp_on_the_backend, _fsdp_with_the_hooks],
)
def test_a_compiled_model_trains_as_the_eager_one(ranks, build):
    """F077"""
    assert_equal(ranks(2)(_trained, build))


def _in_a_graph():
    cccl.configure({"attach_ddp": False, "min_size": 2000})
    torch._dynamo.reset()
    group = dist.new_group(backend="cpu:cccl")

    def by_dist(x):
        y = x * 2
        dist.all_reduce(y, group=group)
        return y + 1

    def by_funcol(x):
        whole = funcol.all_reduce(x * 2, "sum", group)
        part = funcol.reduce_scatter_tensor(whole, "avg", 0, group)
        return funcol.wait_tensor(funcol.all_gather_tensor(part, 0, group)) + 1

    found, values = [], gradient(dist.get_rank(), 4000, torch.float32)
    for function in (by_dist, by_funcol):
        compiled = torch.compile(function, backend=BACKEND, fullgraph=True)
        cccl.reset_stats()
        expected = digest(function(values))
        calls = cccl.stats()["total"]["calls"] - cccl.stats()["total"]["plain_calls"]
        for _ in range(2):
            assert digest(compiled(values)) == expected
        assert cccl.stats()["total"]["calls"] - cccl.stats()["total"]["plain_calls"] == 3 * calls
        assert calls
        found.append(expected)
    return found


def test_collectives_inside_a_whole_graph_are_compressed(ranks):
    assert_equal(ranks(2)(_in_a_graph))
