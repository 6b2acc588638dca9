"""Fully sharded models: as plain FSDP within the codec's bound, bitwise where nothing is lossy."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, gradient
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

import cccl
import cccl.torch

WIDTH, HIDDEN = 24, 301  # of which no world is a divisor


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 7))


def _sharded(mesh, policy=None) -> nn.Module:
    model, options = _model(), {"mp_policy": policy} if policy else {}
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def _batch(rank: int, step: int = 0) -> torch.Tensor:
    return gradient(rank, (8, WIDTH), torch.float32, seed=step)


def _train(model, steps=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(2):  # accumulates once, then reduces
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == 1)
            batch = _batch(dist.get_rank(), 2 * step + micro)
            model(batch).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [digest(_whole(p)) for p in model.parameters()]


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def _rows(collective):
    return [row for row in cccl.stats()["rows"] if row["collective"] == collective]


POLICIES = {
    "float32": None,
    "bf16, reduced in float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
    "fp16, which FSDP divides twice": MixedPrecisionPolicy(torch.float16, torch.float16),
}


def _mesh(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])


def _identity(shape, policy):
    mesh = _mesh(shape)
    expected = _train(_sharded(mesh, policy))
    model = _sharded(mesh, policy)
    cccl.torch.compress_fsdp(model, {"compression_type": "identity"})
    assert _train(model) == expected
    assert {row["reason"] for row in _rows("reduce_scatter")} == {"identity"}
    return expected


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["FSDP", "HSDP"])
def test_identity_equals_plain_fsdp_bitwise(ranks, shape, policy):
    """F078"""
    assert_equal(ranks(3 if len(shape) == 1 else 4)(_identity, shape, policy))


def _gradients(model):
    model(_batch(dist.get_rank())).float().square().mean().backward()
    return [p.grad.full_tensor().double() for p in model.parameters()]


def _largest(world):
    """Of a gradient's element, over all ranks and layers."""
    found = 0.0
    for rank in range(world):
        model = _model()
        model(_batch(rank)).square().mean().backward()
        found = max(found, *(float(p.grad.abs().max()) for p in model.parameters()))
    return found


def _near_plain(shape, policy, codec, factor):
    mesh, world = _mesh(shape), dist.get_world_size()
    plain, model = _sharded(mesh, policy), _sharded(mesh, policy)
    cccl.torch.compress_fsdp(model, {"compression_type": codec, "strict": True})
    if factor:
        plain.set_gradient_divide_factor(factor)
        model.set_gradient_divide_factor(factor)
        # On gloo plain FSDP fails with a factor other than the world's size, unless it divides.
        for layer in (plain[0], plain[2], plain):
            layer.set_force_sum_reduction_for_comms(True)
    expected, found = _gradients(plain), _gradients(model)
    # Both legs code values up to the largest; each is off by no more than there.
    most = torch.tensor([_largest(world) * world / (factor or world) * 1.02])
    bound = 2 * float(cccl.codec(codec).error_bound(most)[0])
    if policy:
        bound += 4 * float(most) * torch.finfo(policy.reduce_dtype).eps
    worst = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))
    assert 0 < worst <= bound, (worst, bound)
    rows = _rows("reduce_scatter")
    assert {row["label"] for row in rows} == {"fsdp 0", "fsdp 2"}
    assert not any(row["plain"] for row in rows)
    assert all(row["reason"] == "not in collective_filter" for row in _rows("all_gather"))
    return [digest(g) for g in found]


@pytest.mark.parametrize("codec", ["block_float8", "block_float4"])
@pytest.mark.parametrize(
    ("shape", "policy", "factor"),
    [
        ((3,), "float32", None),
        ((3,), "float32", 3.0),
        ((3,), "float32", 2.5),
        ((3,), "bf16, reduced in float32", None),
        ((3,), "bf16", 2.5),
        ((3,), "fp16, which FSDP divides twice", 5.0),
        ((2, 2), "float32", None),
        ((2, 2), "bf16", None),
    ],
    ids=str,
)
def test_gradients_are_within_the_bound_of_plain_fsdp(ranks, shape, policy, factor, codec):
    """F078: uneven shards, mixed precision, divide factors, an HSDP mesh."""
    world = 3 if len(shape) == 1 else 4
    assert_equal(ranks(world)(_near_plain, shape, POLICIES[policy], codec, factor))


def _all_gather(codec):
    mesh = _mesh((3,))
    model, coder = _sharded(mesh), cccl.codec(codec)
    cccl.torch.compress_fsdp(
        model, {"compression_type": codec, "collective_filter": ["all_gather", "reduce_scatter"]}
    )
    exact = [p.detach() for p in _model().parameters()]
    seen = []
    for layer in (model[0], model[2]):
        layer.unshard()
        seen += [p.detach().clone() for p in layer.parameters()]
        layer.reshard()
    for layer in (0, 1):
        most = max(exact[2 * layer].abs().max(), exact[2 * layer + 1].abs().max())
        bound = float(coder.error_bound(most.reshape(1))[0])
        for found, right in zip(seen[2 * layer :][:2], exact[2 * layer :][:2], strict=True):
            assert 0 < (found - right).abs().max() <= bound
    assert not any(row["plain"] for row in _rows("all_gather"))
    return [digest(t) for t in seen]


@pytest.mark.parametrize("codec", ["block_float8", "block_float4"])
def test_parameters_go_compressed_only_when_asked_and_alike_to_all(ranks, codec):
    """The rank that owns a shard computes with what the others got."""
    assert_equal(ranks(3)(_all_gather, codec))


def _on_the_backend():
    """No hook at all, then a hook on the backend's group, which must not compress twice."""
    cccl.configure({"attach_ddp": False, "min_size": 2000})
    mesh, found = DeviceMesh.from_group(dist.new_group(backend="cpu:cccl"), "cpu"), []
    for labels in ({"backend cccl"}, {"fsdp 0", "fsdp 2"}):
        model = _sharded(mesh)
        if "fsdp 0" in labels:
            cccl.torch.compress_fsdp(model)
        cccl.reset_stats()
        found.append([digest(g) for g in _gradients(model)])
        rows = [row for row in _rows("reduce_scatter") if not row["plain"]]
        assert {row["label"] for row in rows} == labels
        assert sum(row["calls"] for row in rows) == 2
    assert_equal(found)
    return found


def test_fsdp_on_the_backend_is_compressed_once(ranks):
    assert_equal(ranks(2)(_on_the_backend))


def _hsdp_on_the_backend():
    cccl.configure({"attach_ddp": False, "min_size": 0})
    rank = dist.get_rank()
    members = [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [dist.new_group(ranks, backend="cpu:cccl") for ranks in members]
    shard, replicate = groups[rank // 2], groups[2 + rank % 2]
    mesh = DeviceMesh.from_group(
        [replicate, shard], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("r", "s")
    )
    expected = _gradients(_sharded(_mesh((2, 2))))
    cccl.reset_stats()
    found = _gradients(_sharded(mesh))
    assert all(not row["plain"] for row in _rows("reduce_scatter") + _rows("all_reduce"))
    assert _rows("all_reduce")
    assert max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)) < 0.01
    return [digest(g) for g in found]


def test_an_hsdp_mesh_of_the_backends_groups_compresses_both_steps(ranks):
    assert_equal(ranks(4)(_hsdp_on_the_backend))


def _fsdp1(strategy, codec):
    def build():
        return FullyShardedDataParallel(
            _model(), sharding_strategy=strategy, device_id=torch.device("cpu")
        )

    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(_batch(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
        with FullyShardedDataParallel.summon_full_params(model):
            return [p.detach().clone() for p in model.parameters()]

    expected, model = trained(build()), build()
    cccl.torch.compress_fsdp(model, {"compression_type": codec})
    with pytest.raises(cccl.ConfigError, match="already registered"):
        cccl.torch.compress_fsdp(model)
    found = trained(model)
    far = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))
    assert far == 0 if codec == "identity" else 0 < far < 0.005
    collective = "all_reduce" if strategy is ShardingStrategy.NO_SHARD else "reduce_scatter"
    assert sum(row["calls"] for row in _rows(collective)) == 3
    return [digest(p) for p in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("codec", ["identity", "block_float8"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_fsdp1_takes_the_hook(ranks, strategy, codec):
    assert_equal(ranks(2)(_fsdp1, ShardingStrategy[strategy], codec))


def _bad():
    mesh = _mesh((2,))
    with pytest.raises(cccl.ConfigError, match="no part of this Sequential is"):
        cccl.torch.compress_fsdp(_model())
    with pytest.raises(cccl.ConfigError, match="use compress"):
        cccl.torch.compress_fsdp(nn.parallel.DistributedDataParallel(_model()))
    with pytest.raises(cccl.ConfigError, match="add 'reduce_scatter' or 'all_gather'"):
        cccl.torch.compress_fsdp(_sharded(mesh), {"collective_filter": ["all_reduce"]})
    with pytest.raises(cccl.ConfigError, match="did you mean 'block_size'"):
        cccl.torch.compress_fsdp(_sharded(mesh), {"blocksize": 64})
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    hybrid = FullyShardedDataParallel(
        _model(), (dist.new_group(), alone), ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(cccl.ConfigError, match="Backend 'cccl'"):
        cccl.torch.compress_fsdp(hybrid)
    model = _sharded(mesh)
    codec = "block_float8" if dist.get_rank() else "block_float4"
    cccl.torch.compress_fsdp(model, {"compression_type": codec})
    with pytest.raises(cccl.MismatchError, match="codecs"):
        _gradients(model)


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_compressed_is_refused(own_ranks):
    own_ranks(2)(_bad)
