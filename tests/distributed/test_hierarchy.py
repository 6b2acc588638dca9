"""Several ranks per host: plain inside, compressed between, and still one collective."""

from __future__ import annotations

import gc
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from expect import (
    EVERYTHING,
    allowed,
    assert_equal,
    check,
    digest,
    gradient,
    parameters_digest,
)
from hypothesis import given
from hypothesis import strategies as st
from test_ddp import plain, train

import cccl
import cccl.torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
COUNTS = (0, 1, 3, 2049, 10_000)
HOSTS = {
    "2x2": [[0, 1], [2, 3]],
    "interleaved": [[0, 2], [1, 3]],
    "3+1": [[0, 1, 2], [3]],
    "1+2": [[0], [1, 2]],
    "2x3": [[0, 1, 2], [3, 4, 5]],
    "3x2": [[0, 1], [2, 3], [4, 5]],
    "one host": [[0, 1, 2]],
}
each_grouping = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)


def settings(hosts, codec="block_float8", **more):
    more = {"collective_filter": EVERYTHING, "deadline": 20.0, **more}
    return {"compression_type": codec, "hierarchy": hosts, **more}


def world_of(hosts) -> int:
    return sum(map(len, hosts))


def bound_of(inputs, hosts, codec, op):
    """The flat codec's, of what each host contributes; and that is rounded to the dtype, once more
    where it is weighted, and so is the result."""
    dtype, average = inputs[0].dtype, op == "avg"
    share = len(hosts) / len(inputs) if average else 1.0
    sums = [sum(inputs[r].double() for r in host) * share for host in hosts]
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(dtype, 2.0**-21)
    bound = sum(values.double().abs() for values in inputs) * share / len(hosts) * 3 * step
    bound += 2.0**-22 if dtype is torch.float16 else 0
    if len(hosts) > 1:
        bound += allowed(codec, [part.to(dtype) for part in sums])
    return bound * (1 if average else len(hosts))


def reals(tensor):
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


def _all_reduces(hosts, codec):
    """Of every dtype and size; returns the digests of what all ranks must hold alike."""
    found, rank, world = [], dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for count in COUNTS:
            inputs = [reals(gradient(r, count, dtype)) for r in range(world)]
            total = sum(values.double() for values in inputs)
            for op, divisor in (("avg", world), ("sum", 1)):
                tensor = gradient(rank, count, dtype)
                cccl.torch.all_reduce(tensor, op, config=settings(hosts, codec))
                found.append(digest(tensor))
                bound = bound_of(inputs, hosts, codec, op)
                check(reals(tensor), total / divisor, bound, f"{dtype} x {count} {op}")
    return found


@each_grouping
def test_all_ranks_get_the_same_bits_within_the_codecs_bound(ranks, hosts):
    """F006: whatever the hosts, dtypes and sizes."""
    assert_equal(ranks(world_of(hosts))(_all_reduces, hosts, "block_float8"))


@pytest.mark.parametrize("codec", ["block_float4", "lossless", "sparse(block_float8)", "cast_bf16"])
def test_other_codecs_go_between_hosts_too(ranks, codec):
    assert_equal(ranks(4)(_all_reduces, HOSTS["2x2"], codec))


def _scatters_and_gathers(hosts):
    """reduce_scatter, all_gather and broadcast; returns digests of what all ranks hold alike."""
    found, rank, world = [], dist.get_rank(), dist.get_world_size()
    config, coder = settings(hosts), cccl.codec("block_float8")
    for dtype in (torch.float32, torch.bfloat16):
        for count in (0, 1, 129, 3000):
            wholes = [gradient(r, count * world, dtype) for r in range(world)]
            part = torch.empty(count, dtype=dtype)
            sent = wholes[rank].clone()
            cccl.torch.reduce_scatter(part, sent, config=config)
            assert torch.equal(sent, wholes[rank]), "the input stays as it was"
            own = [whole[rank * count : (rank + 1) * count] for whole in wholes]
            exact = sum(values.double() for values in own) / world
            check(part, exact, bound_of(own, hosts, "block_float8", "avg"), f"{dtype} x {count}")

            parts = [gradient(r, count, dtype) for r in range(world)]
            whole = torch.empty(count * world, dtype=dtype)
            cccl.torch.all_gather(whole, parts[rank].clone(), config=config)
            bound = torch.cat([torch.from_numpy(coder.error_bound(values)) for values in parts])
            check(whole, torch.cat(parts).double(), bound, f"gather {dtype} x {count}")
            found.append(digest(whole))

            for source in range(world):
                mine = parts[rank].clone()
                cccl.torch.broadcast(mine, source, config=config)
                bound = torch.from_numpy(coder.error_bound(parts[source]))
                check(mine, parts[source].double(), bound, f"broadcast {dtype} x {count}")
                found.append(digest(mine))
    legs = {
        (row["collective"], row["leg"])
        for row in cccl.stats()["rows"]
        if row["codec"] != "identity"
    }
    return found, legs


@each_grouping
def test_the_other_collectives_go_in_legs_where_hosts_are_even(ranks, hosts):
    found = ranks(world_of(hosts))(_scatters_and_gathers, hosts)
    assert_equal([bits for bits, _ in found])
    even = len({len(host) for host in hosts}) == 1
    for _, legs in found:
        for collective in ("reduce_scatter", "all_gather"):
            assert ((collective, "") in legs) != even, "flat where hosts are not even"
        assert (("broadcast", "") in legs) != even, "from a rank whose index not all hosts have"


@given(
    st.sampled_from(list(HOSTS)), st.integers(0, 20_000), st.sampled_from(["float32", "bfloat16"])
)
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_any_size_is_the_same_everywhere(_pools, op, hosts, count, dtype):
    found = _pools(world_of(HOSTS[hosts]))(_one, HOSTS[hosts], count, dtype, op)
    assert_equal(found)


def _one(hosts, count, dtype, op):
    world, dtype = dist.get_world_size(), getattr(torch, dtype)
    inputs = [gradient(r, count, dtype) for r in range(world)]
    tensor = inputs[dist.get_rank()].clone()
    cccl.torch.all_reduce(tensor, op, config=settings(hosts))
    exact = sum(values.double() for values in inputs) / (world if op == "avg" else 1)
    check(tensor, exact, bound_of(inputs, hosts, "block_float8", op), f"{count}")
    return digest(tensor)


def _bytes(hosts, collective):
    """What a rank sends to another host, flat and in legs; counted by the core in both cases."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), 12 << 13
    sent = []
    for setting in ("off", hosts):
        cccl.reset_stats()
        whole, part = gradient(rank, count, torch.float32), torch.empty(count // world)
        config = settings(setting)
        if collective == "all_reduce":
            cccl.torch.all_reduce(whole, config=config)
        elif collective == "reduce_scatter":
            cccl.torch.reduce_scatter(part, whole, config=config)
        else:
            cccl.torch.all_gather(whole, part.fill_(rank), config=config)
        total = cccl.stats()["total"]
        if setting == "off":
            assert total["bytes_inside"] == total["bytes_between"] == 0
            host = next(host for host in hosts if rank in host)
            sent.append(total["bytes_sent"] * (world - len(host)) / (world - 1))
        else:
            assert total["bytes_sent"] == total["bytes_inside"] + total["bytes_between"]
            sent.append(total["bytes_between"])
    return sent


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("grouping", ["2x2", "2x3", "3x2"])
def test_bytes_between_hosts_fall_by_the_ranks_per_host(ranks, collective, grouping):
    hosts = HOSTS[grouping]
    for flat, between in ranks(world_of(hosts))(_bytes, hosts, collective):
        assert flat / between == pytest.approx(len(hosts[0]), rel=0.03)


def _many_at_once(hosts):
    """Collectives of all kinds under way at once, on ranks that begin them at other times."""
    rank, world, generator = dist.get_rank(), dist.get_world_size(), random.Random(dist.get_rank())
    config, works, tensors = settings(hosts, chunk_size="64KiB"), [], []
    for number in range(24):
        time.sleep(generator.uniform(0, 5e-3))
        count = 1000 * (1 + number % 7)
        tensor = gradient(rank, count, torch.float32, seed=number)
        kind = number % 4
        if kind == 0:
            out = torch.empty(world * count)
            works.append(cccl.torch.all_gather(out, tensor, async_op=True, config=config))
            tensor = out
        elif kind == 1:
            works.append(cccl.torch.broadcast(tensor, number % world, async_op=True, config=config))
        elif kind == 2 and number % 8 == 2:
            cccl.torch.all_reduce(tensor, config=config)
        else:
            works.append(cccl.torch.all_reduce(tensor, async_op=True, config=config))
        tensors.append(tensor)
    for work in reversed(works):
        assert work.wait()
        assert work.is_success()
        assert work.get_future().done()
    return [digest(tensor) for tensor in tensors]


@pytest.mark.parametrize("grouping", ["2x2", "3+1", "interleaved"])
def test_collectives_under_way_at_once_never_meet_each_other(ranks, grouping):
    assert_equal(ranks(4)(_many_at_once, HOSTS[grouping]))


def _train(hosts, how):
    config = {"compression_type": "block_float8", "hierarchy": hosts}
    if how == "configure":
        cccl.configure(config)
        ddp = plain(bucket_cap_mb=0.001)
    else:
        ddp = plain(bucket_cap_mb=0.001)
        cccl.torch.compress(ddp, config)
    train(ddp, 6)
    rows, total = cccl.stats()["rows"], cccl.stats()["total"]
    assert all(row["leg"] for row in rows if row["label"].startswith("bucket "))
    assert all(f"bucket 0 ({row['leg']})" in cccl.report() for row in rows if row["leg"])
    return parameters_digest(ddp), total["bytes_inside"], total["bytes_between"]


@pytest.mark.parametrize("how", ["configure", "compress"])
@pytest.mark.parametrize("grouping", ["2x2", "3+1"])
def test_ddp_trains_replicas_that_stay_equal(ranks, how, grouping):
    found = ranks(4)(_train, HOSTS[grouping], how)
    assert_equal([bits for bits, *_ in found])
    _, inside, between = zip(*found, strict=True)
    if grouping == "2x2":
        assert all(inside) and all(between)
    else:
        assert all(inside[:3]) and not inside[3]
        assert between[1] == between[2] == 0 < min(between[0], between[3]), "one of each host"


def _subgroup(members):
    """Hosts are lists of global ranks: a group has those of its members."""
    group = dist.new_group(members)
    tensor = gradient(dist.get_rank(), 5000, torch.float32)
    cccl.torch.all_reduce(tensor, group=group, config=settings(HOSTS["2x2"]))
    inside = dist.get_rank() in members
    if inside:
        dist.destroy_process_group(group)
    return digest(tensor) if inside else None, cccl.stats()["total"]["bytes_inside"]


@pytest.mark.parametrize("members", [[0, 1, 2], [3, 1, 2], [0, 2]])
def test_a_groups_hosts_are_those_of_its_members(ranks, members):
    found = ranks(4)(_subgroup, members)
    assert_equal([found[rank][0] for rank in members])
    together = any(len({*host} & {*members}) == 2 for host in HOSTS["2x2"])
    assert any(nbytes for _, nbytes in found) == together


def _by_environment(hosts):
    rank = dist.get_rank()
    host = next(n for n, host in enumerate(hosts) if rank in host)
    os.environ.update(
        LOCAL_RANK=str(hosts[host].index(rank)), LOCAL_WORLD_SIZE=str(len(hosts[host])),
        GROUP_RANK=str(host), CCCL_HIERARCHY="auto",
    )  # fmt: skip
    try:
        tensor = gradient(rank, 5000, torch.float32)
        cccl.torch.all_reduce(tensor, config={"compression_type": "block_float8"})
    finally:
        for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "CCCL_HIERARCHY"):
            del os.environ[name]
        os.environ["LOCAL_RANK"] = str(rank)
    return digest(tensor), {(row["leg"], row["world_size"]) for row in cccl.stats()["rows"]}


def test_auto_finds_hosts_by_the_launchers_variables(own_ranks):
    found = own_ranks(4)(_by_environment, HOSTS["3+1"])
    assert_equal([bits for bits, _ in found])
    assert [legs for _, legs in found] == [
        {("inside", 3), ("between", 2)}, {("inside", 3)}, {("inside", 3)}, {("between", 2)},
    ]  # fmt: skip


def _feedback(hosts, mode):
    """The sum of many steps of one gradient, relative to what plain ones would give."""
    steps, rank, world = 40, dist.get_rank(), dist.get_world_size()
    config = settings(hosts, "sparse", top_k=0.05, error_feedback=mode, residual_type="float32",
                      result_type="identity")  # fmt: skip
    total = torch.zeros(6000)
    for _ in range(steps):
        tensor = gradient(rank, 6000, torch.float32)
        cccl.torch.all_reduce(tensor, config=config, label="weights")
        total += tensor
    exact = sum(gradient(r, 6000, torch.float32) for r in range(world)) / world
    state = cccl.torch.state_of()
    held = state.nbytes
    state.reset()
    return digest(total), float((total / steps - exact).norm() / exact.norm()), held


@pytest.mark.parametrize("grouping", ["2x2", "3+1"])
def test_error_feedback_is_of_what_goes_between_hosts(ranks, grouping):
    """Without it most values would never arrive; who sends nothing between hosts keeps nothing."""
    without = ranks(4)(_feedback, HOSTS[grouping], "none")
    found = ranks(4)(_feedback, HOSTS[grouping], "sender")
    assert_equal([bits for bits, *_ in found])
    assert found[0][1] < 0.3 * without[0][1]
    assert [held > 0 for *_, held in found] == [grouping == "2x2" or r in (0, 3) for r in range(4)]


def _backend(hosts):
    cccl.configure({**settings(hosts), "attach_ddp": False})
    group = dist.new_group(backend="cpu:cccl")
    tensor = gradient(dist.get_rank(), 50_000, torch.float32)
    dist.all_reduce(tensor, group=group)
    exact = sum(gradient(r, 50_000, torch.float32) for r in range(4))
    error = float((tensor - exact).norm() / exact.norm())
    dist.destroy_process_group(group)
    return digest(tensor), error, cccl.stats()["total"]["bytes_between"] > 0


def test_the_process_group_backend_goes_by_it_too(ranks):
    found = ranks(4)(_backend, HOSTS["2x2"])
    assert_equal(found)
    assert found[0][1] < 0.02 and found[0][2]


def _destroyed_at_once(hosts):
    for _ in range(2):
        group = dist.new_group()
        work = cccl.torch.all_reduce(
            torch.ones(1000), group=group, async_op=True, config=settings(hosts)
        )
        held = work.get_future().then(lambda future: time.sleep(0.3))
        while not work.get_future().done():
            time.sleep(0.001)
        dist.destroy_process_group(group)
        del group, work
        gc.collect()
        held.wait()
    return True


def test_a_group_may_be_destroyed_as_soon_as_its_last_result_is_there(own_ranks):
    assert own_ranks(4)(_destroyed_at_once, HOSTS["2x2"]) == [True] * 4
