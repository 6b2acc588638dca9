"""compression_type auto over gloo: one decision on all ranks, whatever happens on one of them."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, gradient, parameters_digest
from ranks import Died, die
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _policy
from cccl.torch import _auto
from cccl.torch._groups import existing

AUTO = {"compression_type": "auto"}
SLOW_LINK = {"none": (1e-3, 1.0, 1.0), "block_float8": (2e-3, 0.1, 0.1)}
FAST_LINK = {"none": (1e-3, 0.1, 0.1), "block_float8": (2e-3, 1.0, 1.0)}


def _pretend(*links):
    """Has measuring find these times at 1 KiB, 1 MiB and above, one after the other; what the
    calls then really take counts for nothing."""
    tables = [_policy.Table((1 << 10, 1 << 20, 1 << 24), link, link) for link in links]
    _policy.calibrate = lambda *_: tables.pop(0)
    _policy.Policy.observe = lambda *_: None


def _policies(group=None):
    return existing(group, torch.device("cpu"))[0].policies


def _under_load(busy):
    stop = threading.Event()
    if dist.get_rank() == 1 and busy:
        os.nice(5)
        for _ in range(2):
            threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)]).start()
    group = dist.new_group()
    try:
        found = []
        for numel in (1, 1000, 30_000, 300_000):
            for dtype in (torch.float32, torch.bfloat16):
                tensor = gradient(dist.get_rank(), numel, dtype)
                cccl.torch.all_reduce(tensor, group=group, config=AUTO)
                found.append(digest(tensor))
    finally:
        stop.set()
    tables = {str(key): policy.table for key, policy in _policies(group).items()}
    dist.destroy_process_group(group)
    return found, tables


@pytest.mark.parametrize("busy", [False, True])
def test_ranks_hold_one_table_and_the_same_bits_though_one_is_slow(own_ranks, busy):
    found = own_ranks(3)(_under_load, busy)
    assert_equal(found)
    tables = found[0][1]
    assert len(tables) == 2, "one for each dtype"
    for table in tables.values():
        assert len(table.sizes) >= 3 and list(table.medians) == ["none", "block_float8"]


def _choices():
    _pretend(SLOW_LINK)
    cccl.configure({**AUTO, "strict": True, "attach_ddp": False})
    for _ in range(3):
        cccl.torch.all_reduce(torch.ones(100), label="small")
        cccl.torch.all_reduce(torch.ones(1 << 18), label="large")
        cccl.torch.all_reduce(torch.ones(5, dtype=torch.int64), "sum", label="integers")
    return {row["label"]: row for row in cccl.stats()["rows"]}, cccl.report()


def test_every_decision_is_in_the_statistics_with_its_reason(own_ranks):
    """F081, F103: strict mode takes plain decisions as expected."""
    for rows, report in own_ranks(2)(_choices):
        small, large = rows["small"], rows["large"]
        assert small["plain"] and not large["plain"]
        reason = "auto: plain is faster (predicted 1 ms against 2 ms)"
        assert small["reason"] == reason and f"plain ({reason})" in report
        assert large["predicted_seconds"] == pytest.approx(3 * 0.1)
        assert large["alternative_seconds"] == pytest.approx(3 * 1.0)
        assert "(auto: predicted 1e+02 ms against 1e+03 ms)" in report
        assert min(small["latency_seconds"], large["latency_seconds"]) > 0
        assert small["calls"] == large["calls"] == 3
        assert rows["integers"]["predicted_seconds"] == 0


def _train(tables):
    _pretend(*tables)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 512)))
    cccl.torch.compress(model, AUTO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(24):
        cccl.reset_stats()
        optimizer.zero_grad()
        model(gradient(dist.get_rank(), (8, 64), torch.float32, step)).square().mean().backward()
        optimizer.step()
        rows = cccl.stats()["rows"]
        steps.append([row["plain"] for row in rows if row["label"].startswith("bucket")])
        if step == 10 and dist.get_rank() == 0:  # alone
            for policy in _policies(model.process_group).values():
                policy._ratios.extend([1e-6] * 64)
    return parameters_digest(model), steps


def test_replicas_are_equal_and_switch_at_the_same_step(own_ranks):
    """F110: from plain to compressed in mid-training, since one rank saw other times."""
    found = own_ranks(2)(_train, (FAST_LINK, SLOW_LINK))
    assert_equal(found)
    steps = found[0][1]
    assert all(steps[5]) and not any(steps[-1])


def _plain_as_ddp(hooked):
    _pretend(FAST_LINK)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 512))
    if hooked:
        cccl.torch.compress(model, AUTO)
    for step in range(3):
        model(gradient(dist.get_rank(), (8, 64), torch.float32, step)).sum().backward()
    return digest(model.module.weight.grad)


def test_buckets_that_go_plain_are_those_of_ddp_bit_by_bit(own_ranks):
    pool = own_ranks(3)
    assert_equal(pool(_plain_as_ddp, True) + pool(_plain_as_ddp, False))


def _every_collective():
    rank, found = dist.get_rank(), []
    config = {**AUTO, "collective_filter": ["all_reduce", "reduce_scatter", "all_gather",
                                            "broadcast"]}  # fmt: skip
    for link in (FAST_LINK, SLOW_LINK):
        group = dist.new_group()
        _pretend(*[link] * 4)
        for _ in range(3):  # plain ones come another way from the second time on
            tensor = gradient(rank, 1 << 18, torch.float32)
            part = torch.empty(1 << 17)
            cccl.torch.reduce_scatter(part, tensor, group=group, config=config)
            cccl.torch.all_gather(tensor, part, group=group, config=config)
            whole = gradient(rank, 1 << 18, torch.float32)
            cccl.torch.all_reduce(whole, group=group, config=config)
            cccl.torch.broadcast(whole[:1000], 1, group=group, config=config)
            torch.testing.assert_close(tensor, whole, rtol=0.05, atol=0.05)
            found += [digest(tensor), digest(whole)]
        dist.destroy_process_group(group)
    return found


def test_every_collective_is_decided(own_ranks):
    assert_equal(own_ranks(2)(_every_collective))


def _really_measured():
    config = {**AUTO, "collective_filter": ["reduce_scatter", "all_gather", "broadcast"]}
    tensor, part = gradient(dist.get_rank(), 5000, torch.float32), torch.empty(2500)
    cccl.torch.reduce_scatter(part, tensor, "sum", config=config)
    cccl.torch.all_gather(tensor, part, config=config)
    cccl.torch.broadcast(tensor, 1, config=config)
    return digest(tensor), len(_policies())


def test_every_collective_is_measured(own_ranks):
    assert_equal(own_ranks(2)(_really_measured))


def _subgroups():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for group in (pairs[rank // 2], None):
        cccl.torch.all_reduce(gradient(rank, 5000, torch.float32), group=group, config=AUTO)
    assert cccl.torch.all_reduce(torch.ones(5), group=pairs[1 - rank // 2], config=AUTO) is None
    tables = []
    for group in (pairs[rank // 2], None):
        (policy,) = _policies(group).values()
        tables.append(policy.table)
    return tables


def test_subgroups_have_tables_of_their_own(own_ranks):
    found = own_ranks(4)(_subgroups)
    whole = [table for _, table in found]
    assert whole[0] == whole[1] == whole[2] == whole[3]
    assert found[0][0] == found[1][0] != found[2][0] == found[3][0]


def _disagree():
    config = {"compression_type": "block_float8"} if dist.get_rank() else AUTO
    with pytest.raises(cccl.MismatchError, match=r"codecs: rank 0 has .*rank 1 has block_float8"):
        cccl.torch.all_reduce(torch.ones(1000), config=config)
    other = {**AUTO, "auto_codecs": ["block_float4"]} if dist.get_rank() else AUTO
    with pytest.raises(cccl.MismatchError, match="codecs"):
        cccl.torch.all_reduce(torch.ones(1000), config=other)
    tensor = gradient(dist.get_rank(), 1000, torch.float32)
    cccl.torch.all_reduce(tensor, config=AUTO)
    return digest(tensor)


def test_ranks_that_are_not_all_in_auto_find_out_before_measuring(own_ranks):
    """F062: and the group goes on."""
    assert_equal(own_ranks(2)(_disagree))


def _interrupted(name, happens):
    """Rank 1 dies or dawdles as it is about to measure `name` for the fifth time."""
    measure, left = _auto.Probe.measure, [5]

    def measured(probe, way, nbytes):
        left[0] -= way == name
        if left[0] == 0 and dist.get_rank() == 1:
            happens()
        return measure(probe, way, nbytes)

    _auto.Probe.measure = measured
    tensor, begun = gradient(dist.get_rank(), 1000, torch.float32), time.monotonic()
    with pytest.raises(cccl.TransportError) as caught:
        cccl.torch.all_reduce(tensor, config={**AUTO, "deadline": 2.0})
    seconds = time.monotonic() - begun
    _auto.Probe.measure = measure
    with pytest.raises(cccl.ClosedError):
        cccl.torch.all_reduce(tensor, config=AUTO)
    return type(caught.value), str(caught.value), seconds


def _dawdle():
    time.sleep(4)


@pytest.mark.parametrize("name", ["none", "block_float8"])
def test_a_peer_that_dies_while_measuring_is_a_typed_error(own_ranks, name):
    survivor, dead = own_ranks(2).outcomes(_interrupted, name, die)
    assert isinstance(dead, Died)
    assert issubclass(survivor[0], cccl.TransportError)
    assert survivor[2] < 15


def _recover(name):
    found = _interrupted(name, _dawdle)
    cccl.torch.recover()
    tensor = gradient(dist.get_rank(), 1000, torch.float32)
    cccl.torch.all_reduce(tensor, config=AUTO)
    return found, digest(tensor)


def test_the_deadline_holds_while_measuring_and_recover_measures_anew(own_ranks):
    found = own_ranks(2)(_recover, "block_float8")
    assert found[0][0][2] < 6, "the deadline is 2 s"
    assert {kind for (kind, *_), _ in found} <= {cccl.DeadlineError, cccl.PeerAbortedError}
    assert found[0][1] == found[1][1]


def _plain_deadline():
    return _interrupted("none", _dawdle)


def test_the_deadline_holds_in_plain_collectives_that_are_measured(own_ranks):
    waiting, late = own_ranks(2)(_plain_deadline)
    assert issubclass(waiting[0], cccl.DeadlineError) and "compression_type 'auto'" in waiting[1]
    assert waiting[2] < 6
    assert issubclass(late[0], cccl.TransportError) and "rank 0 gave up" in late[1]
