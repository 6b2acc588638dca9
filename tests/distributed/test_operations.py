"""Which collectives may lose bits: gradients' do, weights' only where they are asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, gradient, rows_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import cccl
import cccl.torch
from cccl.torch._plain import is_known, name_of, parts_of, reduce_op

COUNT = 30_000


def _call(collective: str, config) -> tuple[dict, str, bool]:
    """Its row, the digest of its result, and whether it is exact."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cccl.reset_stats()
    tensor = gradient(rank, COUNT, torch.float32)
    if collective == "all_reduce":
        exact = sum(gradient(r, COUNT, torch.float32).double() for r in range(world)) / world
        out = cccl.torch.all_reduce(tensor, config=config) or tensor
    elif collective == "reduce_scatter":
        whole = [gradient(r, COUNT * world, torch.float32) for r in range(world)]
        mine = slice(rank * COUNT, (rank + 1) * COUNT)
        exact = sum(one[mine].double() for one in whole) / world
        out = torch.empty(COUNT)
        cccl.torch.reduce_scatter(out, whole[rank], config=config)
    elif collective == "all_gather":
        exact = torch.cat([gradient(r, COUNT, torch.float32) for r in range(world)]).double()
        out = torch.empty(COUNT * world)
        cccl.torch.all_gather(out, tensor, config=config)
    else:
        exact = gradient(1, COUNT, torch.float32).double()
        cccl.torch.broadcast(tensor, 1, config=config)
        out = tensor
    near = float((out.double() - exact).norm() / exact.norm())
    (row,) = rows_of(collective, torch.float32)
    return row, digest(out), near < 1e-6


ALL = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
GRADIENTS, WEIGHTS = ALL[:2], ALL[2:]


def _by_default():
    digests = []
    for collective in ALL:
        row, bits, exact = _call(collective, {"compression_type": "block_float4"})
        assert row["plain"] == exact == (collective in WEIGHTS), collective
        if collective in WEIGHTS:
            assert row["reason"] == "not in collective_filter"
        digests += [bits] if collective != "reduce_scatter" else []
    return digests


@pytest.mark.parametrize("world", [2, 3])
def test_only_gradients_lose_bits_by_default(ranks, world):
    assert_equal(ranks(world)(_by_default))


def _asked(how):
    filtered = {"compression_type": "block_float4", "collective_filter": ["all_reduce", *WEIGHTS]}
    ruled = {"compression_type": "block_float4", "rules": [
        {"collective": "all_gather", "compression_type": "block_float8"},
        {"collective": "broadcast", "compression_type": "block_float6"},
        {"collective": "reduce_scatter", "compression_type": "none"}]}  # fmt: skip
    digests, bits = [], {}
    for collective in ALL:
        row, found, exact = _call(collective, filtered if how == "filter" else ruled)
        assert exact == row["plain"] == (collective == "reduce_scatter"), collective
        digests += [found] if collective != "reduce_scatter" else []
        if not row["plain"] and row["bytes_sent"]:
            bits[collective] = 32 / row["ratio"]
    return digests, bits


@pytest.mark.parametrize("how", ["filter", "rules"])
def test_weights_lose_bits_where_they_are_asked_for(ranks, how):
    """By `collective_filter` as gradients do, by a rule as many as it says."""
    found = ranks(2)(_asked, how)
    assert_equal([digests for digests, _ in found])
    expected = {"all_reduce": 4.125, "all_gather": 4.125, "broadcast": 4.125}
    if how == "rules":
        expected |= {"all_gather": 8.125, "broadcast": 6.125}
    together = {name: bits for _, rank in found for name, bits in rank.items()}
    assert together == pytest.approx(expected, rel=0.02)


def _backend_row():
    group = dist.new_group(backend="cpu:cccl")
    cccl.configure({
        "compression_type": "block_float4", "attach_ddp": False,
        "rules": [{"collective": "broadcast", "compression_type": "block_float8"}],
    })  # fmt: skip
    tensor = gradient(dist.get_rank(), COUNT, torch.float32)
    dist.broadcast(tensor, 0, group)
    rows = {row["collective"]: row["codec"] for row in cccl.stats()["rows"]}
    parts = torch.empty(COUNT * dist.get_world_size())
    dist.all_gather_into_tensor(parts, tensor, group)
    (gathered,) = rows_of("all_gather", torch.float32)
    assert gathered["plain"]
    assert rows["broadcast"].startswith("block_float8")
    only = [{"collective": "all_gather", "compression_type": "block_float8"}]
    cccl.configure({"compression_type": "none", "attach_ddp": False, "rules": only})
    cccl.reset_stats()
    dist.all_gather_into_tensor(parts, tensor, group)
    assert not rows_of("all_gather", torch.float32)[0]["plain"], "the rule alone turns it on"
    dist.destroy_process_group(group)
    return digest(tensor)


def test_the_backend_follows_rules_of_collectives(ranks):
    assert_equal(ranks(2)(_backend_row))


def _sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


def _train(model: nn.Module, number: int) -> dict[str, set[str]]:
    cccl.reset_stats()
    model(gradient(dist.get_rank(), (8, 64), torch.float32, seed=number)).square().mean().backward()
    found: dict[str, set[str]] = {}
    for row in cccl.stats()["rows"]:
        way = "plain" if row["plain"] else row["codec"].split("(")[0]
        found.setdefault(row["collective"], set()).add(way)
    return found


def _fsdp_by_operation():
    model = _sharded()
    cccl.torch.compress_fsdp(model, {"compression_type": "block_float4", "rules": [
        {"collective": "reduce_scatter", "compression_type": "block_float6"},
        {"collective": "all_gather", "compression_type": "block_float8"}]})  # fmt: skip
    return _train(model, 0)


def test_fsdp_follows_rules_of_collectives(ranks):
    for found in ranks(2)(_fsdp_by_operation):
        assert found == {"reduce_scatter": {"block_float6"}, "all_gather": {"block_float8"}}


def _fsdp_steps(by_rule):
    steps = {"start_step": 1, "schedule": [[3, "block_float8"]]}
    config = {"compression_type": "block_float4", **steps}
    if by_rule:
        config = {"compression_type": "block_float2", "rules": [
            {"collective": "reduce_scatter", "compression_type": "block_float4", **steps}
        ]}  # fmt: skip
    model = _sharded()
    cccl.torch.compress_fsdp(model, config)
    found = [_train(model, number)["reduce_scatter"] for number in range(5)]
    resumed = _sharded()
    cccl.torch.compress_fsdp(resumed, config, step=5)
    return [*found, _train(resumed, 5)["reduce_scatter"]]


@pytest.mark.parametrize("by_rule", [False, True])
def test_fsdp_counts_steps(ranks, by_rule):
    four, eight = {"block_float4"}, {"block_float8"}
    for found in ranks(2)(_fsdp_steps, by_rule):
        assert found == [{"plain"}, four, four, eight, eight, eight]


def _refused():
    by_parameter = {"rules": [{"max_ndim": 1, "compression_type": "none"}]}
    with pytest.raises(
        cccl.UnsupportedError, match=r"rules\[0\] \(max_ndim = 1\) is of parameters"
    ):
        cccl.torch.compress_fsdp(_sharded(), by_parameter)
    with pytest.raises(cccl.UnsupportedError, match="spike_factor"):
        cccl.torch.compress_fsdp(_sharded(), {"spike_factor": 10})
    model = _sharded()
    cccl.torch.compress_fsdp(model)
    cccl.configure({**by_parameter, "attach_ddp": False})  # later
    with pytest.raises(cccl.UnsupportedError, match="is of parameters"):
        _train(model, 0)
    older = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    for config in (by_parameter, {"start_step": 5}):
        with pytest.raises(cccl.UnsupportedError, match=r"is of parameters|FSDP1's hook"):
            cccl.torch.compress_fsdp(older, config)


def test_fsdp_refuses_what_would_have_no_effect(own_ranks):
    own_ranks(2)(_refused)


def _twice(what):
    """A call like an earlier one but for `what` is looked at like a first one."""
    config = cccl.Config(compression_type="none")
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.ones(8)
    for _ in range(2):
        cccl.torch.all_gather(torch.empty(8 * world), part, config=config)
    if what == "no tensor":
        with pytest.raises(cccl.UnsupportedError, match="takes tensors, not list"):
            cccl.torch.all_gather([torch.empty(8)] * world, part, config=config)
    elif what == "dtype":
        with pytest.raises(cccl.UnsupportedError, match="must be the same"):
            cccl.torch.all_gather(torch.empty(8 * world, dtype=torch.int32), part, config=config)
    elif what == "strides":
        whole = torch.zeros(8 * world, 2)
        cccl.torch.all_gather(whole[:, 0], part + rank, config=config)
        assert torch.equal(whole[:, 0], torch.arange(world).repeat_interleave(8) + 1.0)
        assert not whole[:, 1].any()
    elif what == "overlap":
        whole = torch.ones(8 * world)
        with pytest.raises(cccl.UnsupportedError, match="share memory"):
            cccl.torch.all_gather(whole, whole[1:9], config=config)
    elif what == "layout":  # a sparse one goes plain, which a dense one like it does not
        config = cccl.Config(compression_type="block_float8")
        for _ in range(2):
            for tensor in (torch.ones(4096).to_sparse(), torch.ones(4096)):
                cccl.torch.all_reduce(tensor, "sum", config=config, label="one label")
        rows = [row for row in cccl.stats()["rows"] if row["label"] == "one label"]
        assert {row["plain"]: row["calls"] for row in rows} == {True: 2, False: 2}
    elif what == "op":
        for op, expected in ((dist.ReduceOp.MAX, world), (dist.ReduceOp.MIN, 1)) * 2:
            for kind in (op, dist.ReduceOp(op)):
                tensor = torch.full((8,), rank + 1.0)
                cccl.torch.all_reduce(tensor, kind, config=config)
                assert (tensor == expected).all()


@pytest.mark.parametrize("what", ["no tensor", "dtype", "strides", "overlap", "layout", "op"])
def test_calls_like_earlier_ones_are_those_alone(ranks, what):
    ranks(2)(_twice, what)


def _made_anew():
    """A group at another's address, and one that was recovered, have members of their own."""
    config = cccl.Config(compression_type="none")
    for members in ([0, 1], [0, 1, 2], [0, 1]):
        group = dist.new_group(members)
        for turn in range(4):
            if turn == 2:
                cccl.torch.recover(group)
            tensor = torch.ones(8)
            cccl.torch.all_reduce(tensor, "sum", group, config=config)
            assert (tensor == (len(members) if dist.get_rank() in members else 1)).all()
        if dist.get_rank() in members:
            dist.destroy_process_group(group)
        del group


def test_groups_made_anew_are_not_taken_for_those_before(ranks):
    ranks(3)(_made_anew)


def test_operations_are_named_alike_on_all_ranks_and_keep_their_factor():
    halves, thirds = (dist._make_nccl_premul_sum(factor) for factor in (0.5, 1 / 3))
    assert halves == thirds  # which is why nothing may be told by equality
    assert [name_of(reduce_op(op)) for op in (halves, thirds)] == ["premul_sum"] * 2
    assert [parts_of(reduce_op(op))[1] for op in (halves, thirds)] == [0.5, 1 / 3]
    for op in ("avg", dist.ReduceOp.AVG, dist.ReduceOp(dist.ReduceOp.AVG)):
        assert name_of(reduce_op(op)) == "avg" and is_known(reduce_op(op))
