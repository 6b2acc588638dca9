"""Backend "cccl" beside the plain one in the same run: equal where nothing is compressed."""

from __future__ import annotations

from datetime import timedelta

import c10d_calls
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from expect import EVERYTHING, digest

import cccl
import cccl.torch
from cccl.torch._backend_group import CompressedGroup


def test_every_method_that_returns_a_work_is_ours():
    """One that is left to C++ would run with the GIL held, and deadlock now and then."""
    methods = [n for n in dir(dist.ProcessGroup)
               if "Work" in str(getattr(dist.ProcessGroup, n).__doc__)]  # fmt: skip
    assert {"allreduce", "barrier", "send", "recv_anysource"} <= set(methods)
    assert not [name for name in methods if name not in vars(CompressedGroup)]


OFF = {
    "none": {"compression_type": "none"},
    "identity": {"compression_type": "identity", "collective_filter": EVERYTHING, "min_size": 0},
    "nothing in the filter": {"collective_filter": ()},
    "all below min_size": {"collective_filter": EVERYTHING, "min_size": "1MiB"},
}


def _same(name, settings):
    cccl.configure(cccl.Config(attach_ddp=False, **settings))
    calls = getattr(c10d_calls, name)
    plain, group = dist.new_group(backend="gloo"), dist.new_group(backend="cpu:cccl")
    expected = calls(plain)
    cccl.reset_stats()
    found = calls(group)
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in expected]
    assert [digest(t) for t in found] == [digest(t) for t in expected]
    assert all(row["plain"] for row in cccl.stats()["rows"])
    dist.destroy_process_group(plain)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("name", [calls.__name__ for calls in c10d_calls.EVERY])
@pytest.mark.parametrize("settings", OFF.values(), ids=OFF)
def test_what_is_not_compressed_equals_the_plain_backend_bitwise(ranks, settings, name):
    """F070"""
    ranks(3)(_same, name, settings)


SETTINGS = cccl.Config(collective_filter=EVERYTHING, min_size=0, attach_ddp=False, strict=True)


def _reduced_in_every_way(group, count):
    """The sum over the group's ranks, by each call that gives it."""
    found = [c10d_calls.mine(group, count=count) for _ in range(8)]
    dist.all_reduce(found[0], group=group)
    dist.all_reduce(found[1], group=group, async_op=True).wait()
    dist.all_reduce(found[2], group=group, async_op=True).get_future().wait()
    group.allreduce(found[3]).wait()
    group.allreduce([found[4]], dist.ReduceOp.SUM).wait(timedelta(seconds=20))
    with dist._coalescing_manager(group):
        dist.all_reduce(found[5], group=group)
        dist.all_reduce(found[6], group=group)
    found[7] = funcol.wait_tensor(funcol.all_reduce(found[7], "sum", group))
    return found


def _scattered_in_every_way(group, count):
    whole = c10d_calls.mine(group, count=count * group.size())
    found = [torch.empty(count) for _ in range(4)]
    c10d_calls._reduce_scatter(found[0], whole.clone(), group=group)
    dist.reduce_scatter(found[1], [c.clone() for c in whole.chunk(group.size())], group=group)
    with dist._coalescing_manager(group):
        c10d_calls._reduce_scatter(found[2], whole.clone(), group=group)
        c10d_calls._reduce_scatter(found[3], whole.clone(), group=group)
    found.append(funcol.wait_tensor(funcol.reduce_scatter_tensor(whole.clone(), "sum", 0, group)))
    return found


def _gathered_in_every_way(group, count):
    part, size = c10d_calls.mine(group, count=count), group.size()
    found = [torch.empty(count * size) for _ in range(3)]
    c10d_calls._all_gather(found[0], part, group=group)
    with dist._coalescing_manager(group):
        c10d_calls._all_gather(found[1], part, group=group)
        c10d_calls._all_gather(found[2], part, group=group)
    found.append(funcol.wait_tensor(funcol.all_gather_tensor(part, 0, group)))
    return found


def _compressed():
    cccl.configure(SETTINGS)
    reference, group = dist.new_group(backend="gloo"), dist.new_group(backend="cpu:cccl")
    for count in (1, 129, 40_000):
        whole, size = c10d_calls.mine(group, count=count * group.size()), group.size()
        reduced = c10d_calls.mine(group, count=count)
        scattered, gathered = torch.empty(count), torch.empty(count * size)
        cccl.torch.all_reduce(reduced, "sum", reference)
        cccl.torch.reduce_scatter(scattered, whole, "sum", reference)
        cccl.torch.all_gather(gathered, c10d_calls.mine(group, count=count), reference)
        cccl.reset_stats()
        assert all(digest(t) == digest(reduced) for t in _reduced_in_every_way(group, count))
        assert all(digest(t) == digest(scattered) for t in _scattered_in_every_way(group, count))
        assert all(digest(t) == digest(gathered) for t in _gathered_in_every_way(group, count))
        for source in range(size):
            expected, sent = (c10d_calls.mine(group, count=count) for _ in range(2))
            cccl.torch.broadcast(expected, source, reference)
            dist.broadcast(sent, source, group=group)
            assert digest(sent) == digest(expected)
        rows = [row for row in cccl.stats()["rows"] if row["label"] == "backend cccl"]
        assert {row["collective"] for row in rows} == set(EVERYTHING)
        assert not any(row["plain"] for row in rows)
    dist.destroy_process_group(group)
    dist.destroy_process_group(reference)


@pytest.mark.parametrize("world", [2, 3])
def test_every_way_of_calling_is_compressed_like_the_functional_collectives(ranks, world):
    ranks(world)(_compressed)


def _choices():
    cccl.configure(SETTINGS)
    group = dist.new_group(backend="cpu:cccl")
    with pytest.raises(cccl.NotCompressedError, match="only avg and sum"):
        dist.all_reduce(torch.ones(5000), dist.ReduceOp.MAX, group=group)
    with pytest.raises(cccl.NotCompressedError, match="all_gather_into_tensor"):
        dist.all_gather([torch.ones(5000)] * 2, torch.ones(5000), group=group)
    with pytest.raises(cccl.UnsupportedError, match="input on cpu, output on meta"):
        c10d_calls._all_gather(torch.ones(8, device="meta"), torch.ones(4), group=group)
    dist.all_reduce(torch.ones(5000, dtype=torch.int64), group=group)
    cccl.configure(attach_ddp=False)
    for _ in range(3):
        dist.all_reduce(torch.ones(4095), group=group)
        dist.all_reduce(torch.ones(4096), group=group)
        dist.all_reduce(torch.ones(4096), dist.ReduceOp.MAX, group=group)
        dist.broadcast(torch.ones(4096), 0, group=group)
    cccl.torch.all_reduce(torch.ones(10), "sum", group)  # asked for: whatever its size
    cccl.torch.all_reduce(torch.ones(5000), "sum", group, config={"compression_type": "none"})
    dist.destroy_process_group(group)
    return sorted(
        (row["collective"], row["label"], row["calls"], row["reason"] or row["codec"][:12])
        for row in cccl.stats()["rows"]
    )


def test_what_goes_plain_is_counted_with_its_reason_and_strict_refuses_it(ranks):
    found = ranks(2)(_choices)
    assert found[0] == found[1] == [
        ("all_reduce", "all_reduce", 1, "block_float8"),
        ("all_reduce", "all_reduce", 1, "compression_type none"),
        ("all_reduce", "backend cccl", 1, "integers are never lossy"),
        ("all_reduce", "backend cccl", 3, "below min_size"),
        ("all_reduce", "backend cccl", 3, "block_float8"),
        ("all_reduce", "backend cccl", 3, "only avg and sum are compressed"),
        ("broadcast", "backend cccl", 3, "not in collective_filter"),
    ]  # fmt: skip


def _by_method():
    """With no options, as PyTorch's own tests call a group."""
    cccl.configure({"attach_ddp": False, "min_size": 0, "collective_filter": EVERYTHING})
    group = dist.new_group(backend="cpu:cccl")
    rank, size = dist.get_rank(), group.size()
    ours, part, whole = torch.full((100,), rank + 1.0), torch.empty(100), torch.empty(100 * size)
    group.allreduce_coalesced([ours]).wait()
    group.broadcast(ours, root=0).wait()
    group.all_gather_single(whole, ours).wait()
    group.all_gather_single_coalesced([whole], [ours]).wait()
    group.reduce_scatter_single(part, whole).wait()
    group.reduce_scatter_single_coalesced([part], [whole]).wait()
    group.reduce_scatter(part, list(whole.chunk(size)), dist.ReduceOp.SUM).wait()
    assert (part - 6 * size).abs().max() < 0.5
    assert not any(row["plain"] for row in cccl.stats()["rows"])
    dist.destroy_process_group(group)


def test_methods_of_the_group_are_compressed_too(ranks):
    ranks(3)(_by_method)


def _auto():
    cccl.configure({"compression_type": "auto", "attach_ddp": False})
    group = dist.new_group(backend="cpu:cccl")
    for _ in range(5):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            tensor = torch.full((100_000,), 3.0)
            dist.all_reduce(tensor, op, group=group)
            assert (tensor - (6 if op == dist.ReduceOp.SUM else 3)).abs().max() < 0.1
    rows = [row for row in cccl.stats()["rows"] if row["label"] == "backend cccl"]
    assert sum(row["calls"] for row in rows) == 10
    return [row["codec"] for row in rows]


def test_auto_decides_alike_on_all_ranks(ranks):
    found = ranks(2)(_auto)
    assert found[0] == found[1]


def _split():
    cccl.configure(SETTINGS)
    group = dist.new_group(backend="cpu:cccl")
    rank = dist.get_rank()
    half = group.split_group([0, 1] if rank < 2 else [2], timeout=timedelta(seconds=20),
                             group_name=f"half {rank < 2}")  # fmt: skip
    tensor = torch.full((5000,), rank + 1.0)
    dist.all_reduce(tensor, group=half)
    assert (tensor - 3).abs().max() < 0.05
    dist.broadcast(tensor, 1, group=dist.new_group([1, 2], backend="cpu:cccl"))
    rows = cccl.stats()["rows"]
    return half.size(), sorted({(row["collective"], row["plain"]) for row in rows})


def test_subgroups_and_split_groups_are_compressed_too(ranks):
    found = ranks(3)(_split)
    assert [size for size, _ in found] == [2, 2, 1]
    assert found[1][1] == [("all_reduce", False), ("broadcast", False)]
    assert found[2][1] == [("all_reduce", True), ("broadcast", False)]
