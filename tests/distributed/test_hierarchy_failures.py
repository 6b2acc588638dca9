"""A failure in one leg is a typed error on all ranks, soon, and a NaN; a mismatch is named."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, gradient
from ranks import Died, die
from test_failures import _backward, _ddp, until_backward_fails

import cccl
import cccl.torch

TWO_BY_TWO, UNEVEN = [[0, 1], [2, 3]], [[0, 1, 2], [3]]


def settings(hosts=TWO_BY_TWO, **more):
    return {"compression_type": "block_float8", "hierarchy": hosts, "deadline": 20.0, **more}


def _disagree(what):
    odd = dist.get_rank() == 2
    config, count = settings(), 1000
    if what == "hosts":
        config["hierarchy"] = [[0, 2], [1, 3]] if odd else TWO_BY_TWO
    elif what == "off":
        config["hierarchy"] = "off" if odd else TWO_BY_TWO
    elif what == "codecs":
        config["compression_type"] = "block_float4" if odd else "block_float8"
    elif what == "plan":
        config["chunk_size"] = 8192 if odd else 4096
    elif what == "checks":
        config["non_finite"] = "raise" if odd else "propagate"
    else:
        count += odd
    group, begun = dist.new_group(), time.monotonic()
    tensor = torch.ones(count)
    with pytest.raises(cccl.MismatchError, match="rank 2 has") as caught:
        cccl.torch.all_reduce(tensor, group=group, config=config)
    seconds = time.monotonic() - begun
    again = gradient(dist.get_rank(), 1000, torch.float32)
    cccl.torch.all_reduce(again, group=group, config=settings())
    dist.destroy_process_group(group)
    return str(caught.value), digest(again), seconds < 10, bool(tensor.isnan().all())


@pytest.mark.parametrize("what", ["hosts", "off", "codecs", "plan", "checks", "count"])
def test_disagreement_is_a_mismatch_on_every_rank_and_the_group_stays_usable(ranks, what):
    """F062: on the ranks of hosts too that agree among themselves."""
    found = ranks(4)(_disagree, what)
    assert_equal(found)
    assert found[0][2:] == (True, True)


def _disagree_in_ddp():
    ddp = _ddp()
    hosts = TWO_BY_TWO if dist.get_rank() else [[0, 1, 2, 3]]
    cccl.torch.compress(ddp, settings(hosts))
    with pytest.raises(cccl.MismatchError, match="hierarchy") as caught:
        _backward(ddp)
    assert all(p.grad.isnan().all() for p in ddp.parameters())
    return str(caught.value)


def test_disagreement_in_a_hook_is_raised_by_backward(ranks):
    assert_equal(ranks(4)(_disagree_in_ddp))


def _nowhere():
    tensor = torch.ones(100)
    with pytest.raises(cccl.ConfigError, match="rank 3"):
        cccl.torch.all_reduce(tensor, config=settings([[0, 1], [2]]))
    assert torch.equal(tensor, torch.ones(100))
    cccl.torch.all_reduce(tensor, config=settings())
    return float(tensor.mean())


def test_hosts_without_some_rank_are_refused_on_all_and_nothing_is_sent(ranks):
    assert ranks(4)(_nowhere) == [pytest.approx(1, rel=0.01)] * 4


def _non_finite(hosts, policy, bad):
    rank, places = dist.get_rank(), [5, 700, 9999]
    tensor = gradient(rank, 10_000, torch.float32)
    if rank == 1:
        tensor[places] = bad
    config = settings(hosts, non_finite=policy)
    if policy == "raise":
        with pytest.raises(cccl.NonFiniteError, match=r"bucket 3' has a non-finite value$"):
            cccl.torch.all_reduce(tensor, config=config, label="bucket 3")
    else:
        cccl.torch.all_reduce(tensor, config=config, label="bucket 3")
    assert not tensor[places].isfinite().any()
    assert tensor[1000:9000].isfinite().all(), "blocks without it are numbers"
    again = gradient(rank, 10_000, torch.float32)
    cccl.torch.all_reduce(again, config=config)
    assert again.isfinite().all()
    return digest(tensor.nan_to_num()), tensor.isnan().nonzero().tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("policy", ["propagate", "raise"])
@pytest.mark.parametrize("hosts", [TWO_BY_TWO, UNEVEN, [[0], [1, 2, 3]]], ids=str)
def test_a_nan_on_one_rank_surfaces_on_all_of_all_hosts(ranks, hosts, policy, bad):
    """F010: and the next collective is fine."""
    assert_equal(ranks(4)(_non_finite, hosts, policy, bad))


def _until_it_fails(hosts, victim, how):
    """Several under way at once; what each ended with, and how long the last wait took."""
    config = settings(hosts, deadline=30.0, chunk_size="64KiB")
    for step in itertools.count():
        if step == 1 and dist.get_rank() == victim:
            die(0.3)
        tensors, begun = [torch.ones(200_000) for _ in range(3)], time.monotonic()
        try:
            if how == "sync":
                cccl.torch.all_reduce(tensors[0], config=config)
                continue
            works = [cccl.torch.all_reduce(t, config=config, async_op=True) for t in tensors]
        except cccl.Error as error:
            return [type(error)], str(error), time.monotonic() - begun, tensors[0].isnan().all()
        errors, nan = [], True
        for work, tensor in zip(works, tensors, strict=True):
            try:
                work.wait()
            except cccl.Error as error:
                errors.append(error)
                nan &= bool(tensor.isnan().all())
        if errors:
            return [type(e) for e in errors], str(errors[0]), time.monotonic() - begun, nan


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(("hosts", "victim"), [
    (TWO_BY_TWO, 0), (TWO_BY_TWO, 3), (UNEVEN, 1), (UNEVEN, 3),
], ids=str)  # fmt: skip
def test_a_killed_rank_is_a_typed_error_on_every_survivor(own_ranks, hosts, victim, how):
    """The store's host, one that no lane has, and one alone on its host among them."""
    found = own_ranks(4).outcomes(_until_it_fails, hosts, victim, how, seconds=60)
    assert isinstance(found.pop(victim), Died)
    for kinds, text, seconds, nan in found:
        assert all(issubclass(kind, cccl.TransportError) for kind in kinds)
        assert "rank" in text
        assert seconds < 15, "long before the deadline"
        assert nan, "never stale numbers"


def _train_until_it_fails(hosts):
    ddp = _ddp(bucket_cap_mb=0.001)
    cccl.torch.compress(ddp, settings(hosts))
    return until_backward_fails(ddp)


@pytest.mark.parametrize("hosts", [TWO_BY_TWO, UNEVEN], ids=str)
def test_a_killed_rank_raises_from_backward(own_ranks, hosts):
    found = own_ranks(4).outcomes(_train_until_it_fails, hosts, seconds=60)
    assert isinstance(found.pop(2), Died)
    for kind, nan, seconds in found:
        assert issubclass(kind, cccl.TransportError)
        assert any(nan)
        assert seconds < 15


def _stuck(hosts, absent, first):
    """Rank `absent` does not come, to the first call or a later one; then all recover."""
    rank, deadline = dist.get_rank(), 2.0
    config = settings(hosts, deadline=deadline)
    if not first:
        cccl.torch.all_reduce(torch.ones(5000), config=config)
    seconds, kind = 0.0, None
    if rank == absent:
        time.sleep(deadline + 3)
    else:
        tensor, begun = torch.ones(5000), time.monotonic()
        with pytest.raises(cccl.TransportError) as caught:
            cccl.torch.all_reduce(tensor, config=config)
        seconds, kind = time.monotonic() - begun, caught.type
        assert tensor.isnan().all()
        with pytest.raises(cccl.ClosedError, match=r"cccl\.torch\.recover"):
            cccl.torch.all_reduce(tensor, config=config)
    cccl.torch.recover()
    again = gradient(rank, 5000, torch.float32)
    cccl.torch.all_reduce(again, config=config)
    return digest(again), seconds, kind, cccl.stats()["total"]["bytes_inside"] > 0


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("hosts", "absent"), [(TWO_BY_TWO, 1), (UNEVEN, 3), (UNEVEN, 2)], ids=str)
def test_a_rank_that_does_not_come_meets_the_deadline_and_recover_brings_all_back(
    own_ranks, hosts, absent, first
):
    found = own_ranks(4)(_stuck, hosts, absent, first)
    assert_equal([bits for bits, *_ in found])
    assert all(seconds < 2 + 5 for _, seconds, *_ in found)
    assert cccl.DeadlineError in [kind for *_, kind, _ in found]
    assert [inside for *_, inside in found] == [
        rank != 3 or hosts == TWO_BY_TWO for rank in range(4)
    ]


def _frozen(victim):
    """A process that the system stopped in the middle keeps its connections."""
    rank, deadline = dist.get_rank(), 2.0
    config = settings(deadline=deadline, chunk_size="64KiB")
    cccl.torch.all_reduce(torch.ones(1000), config=config)
    if rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    while True:
        tensor, begun = torch.ones(200_000), time.monotonic()
        try:
            cccl.torch.all_reduce(tensor, config=config)
        except cccl.Error as error:
            return type(error), bool(tensor.isnan().all()), time.monotonic() - begun


def test_a_frozen_rank_meets_the_deadline_on_both_hosts(own_ranks):
    found = own_ranks(4).outcomes(_frozen, 3, seconds=25)
    assert isinstance(found.pop(3), TimeoutError)
    for kind, nan, seconds in found:
        assert issubclass(kind, cccl.TransportError)
        assert nan
        assert seconds < 2 + 5


def _waits_in_a_callback():
    config, seen = settings(), []
    cccl.torch.all_reduce(torch.ones(10), config=config)

    def follow(future):
        with pytest.raises(cccl.Error, match="outside of callbacks"):
            cccl.torch.all_reduce(torch.ones(10), config=config)
        seen.append(True)

    tensor = torch.ones(1 << 20)
    done = cccl.torch.all_reduce(tensor, config=config, async_op=True).get_future().then(follow)
    done.wait()
    return seen


def test_waiting_in_a_callback_is_refused(own_ranks):
    assert own_ranks(4)(_waits_in_a_callback) == [[True]] * 4


def _exit_in_the_middle():
    tensor = torch.ones(1 << 20)
    cccl.torch.all_reduce(tensor, config=settings())
    if dist.get_rank() == 0:
        cccl.torch.all_reduce(tensor, async_op=True, config=settings())
    return True


def test_processes_end_though_a_collective_is_under_way(own_ranks):
    pool = own_ranks(4)
    assert pool(_exit_in_the_middle) == [True] * 4
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 15
