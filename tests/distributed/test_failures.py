"""What goes wrong on one rank is a typed error on every rank, soon, and never a stale number."""

from __future__ import annotations

import gc
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, gradient
from ranks import Died, die
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch

BLOCK8 = {"compression_type": "block_float8"}


def _disagree(what):
    rank, world = dist.get_rank(), dist.get_world_size()
    odd = rank == world - 1
    count, config, op, dtype = 1000, dict(BLOCK8), "avg", torch.float32
    if what == "count":
        count += odd
    elif what == "dtype":
        dtype = torch.bfloat16 if odd else dtype
    elif what == "op":
        op = "sum" if odd else op
    elif what == "codecs":
        config["compression_type"] = "block_float4" if odd else "block_float8"
    elif what == "plain":
        config["compression_type"] = "none" if odd else "block_float8"
    elif what == "block size":
        config["block_size"] = 64 if odd else 128
    elif what == "plan":
        config["chunk_size"] = 8192 if odd else 4096
    group = dist.new_group()
    tensor = torch.ones(count, dtype=dtype)
    begun = time.monotonic()
    error: Exception | None = None
    try:
        cccl.torch.all_reduce(tensor, op, group, config=config)
    except cccl.Error as found:
        error = found
    seconds = time.monotonic() - begun
    again = gradient(rank, 1000, torch.float32)
    cccl.torch.all_reduce(again, "avg", group, config=BLOCK8)
    dist.destroy_process_group(group)
    untouched = what == "plain" and odd
    return type(error), str(error), seconds, bool(tensor.isnan().all()) or untouched, digest(again)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("what", ["count", "dtype", "op", "codecs", "plain", "block size", "plan"])
def test_disagreement_is_a_mismatch_on_every_rank_and_the_group_stays_usable(ranks, world, what):
    """F062"""
    found = ranks(world)(_disagree, what)
    assert {kind for kind, *_ in found} == {cccl.MismatchError}
    assert len({text for _, text, *_ in found}) == 1, "the same text everywhere"
    assert f"rank {world - 1} has" in found[0][1]
    assert all(seconds < 10 for _, _, seconds, _, _ in found)
    assert all(nan for *_, nan, _ in found), "never stale numbers"
    assert_equal([bits for *_, bits in found])


def _ddp(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5))
    return DistributedDataParallel(model, **options)


def _backward(ddp, scale=1.0):
    loss = ddp(gradient(dist.get_rank(), (8, 20), torch.float32)).square().mean() * scale
    loss.backward()


def _disagree_in_ddp():
    ddp = _ddp()
    kind = "block_float8" if dist.get_rank() else "block_float4"
    cccl.torch.compress(ddp, {"compression_type": kind})
    with pytest.raises(cccl.MismatchError, match="codecs") as caught:
        _backward(ddp)
    assert all(p.grad.isnan().all() for p in ddp.parameters())
    return str(caught.value)


def test_disagreement_in_a_hook_is_raised_by_backward(ranks):
    """F062: on every rank, and the gradients are NaN."""
    assert_equal(ranks(2)(_disagree_in_ddp))


def _absent(deadline):
    config = BLOCK8 | {"deadline": deadline}
    group = dist.new_group()
    cccl.torch.all_reduce(torch.ones(10), group=group, config=config)
    if dist.get_rank() == 1:
        time.sleep(deadline + 2)
        return None
    tensor = torch.ones(5000)
    begun = time.monotonic()
    with pytest.raises((cccl.DeadlineError, cccl.PeerAbortedError)) as caught:
        cccl.torch.all_reduce(tensor, group=group, config=config)
    seconds = time.monotonic() - begun
    with pytest.raises(cccl.Error):  # a new attempt needs all ranks as well
        cccl.torch.all_reduce(torch.ones(10), group=group, config=config)
    return type(caught.value), str(caught.value), seconds, bool(tensor.isnan().all())


def test_a_rank_that_never_calls_is_named_within_the_deadline(own_ranks):
    found = own_ranks(3)(_absent, 1.0, seconds=30)
    kinds = {found[0][0], found[2][0]}
    assert cccl.DeadlineError in kinds
    for _, text, seconds, nan in (found[0], found[2]):
        assert "rank 1" in text
        assert seconds < 6
        assert nan


def _until_it_fails(deadline, victim):
    config = BLOCK8 | {"deadline": deadline}
    for step in itertools.count():
        if step == 1 and dist.get_rank() == victim:
            die(0.3)
        tensor, begun = torch.ones(300_000), time.monotonic()
        try:
            cccl.torch.all_reduce(tensor, config=config)
        except cccl.Error as error:
            seconds = time.monotonic() - begun
            return type(error), str(error), bool(tensor.isnan().all()), seconds


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_peer_is_a_typed_error_on_every_survivor(own_ranks, victim):
    """The store's host among them; long before the deadline, since its connections close."""
    found = own_ranks(3).outcomes(_until_it_fails, 30.0, victim, seconds=60)
    assert isinstance(found.pop(victim), Died)
    for kind, text, nan, seconds in found:
        assert issubclass(kind, cccl.TransportError)
        assert "rank" in text
        assert nan, "never stale numbers"
        assert seconds < 15


def until_backward_fails(ddp):
    """Rank 2 dies in the middle: the error's type, which gradients are all NaN, and seconds."""
    _backward(ddp)
    if dist.get_rank() == 2:
        die(0.1)
    while True:
        ddp.zero_grad(set_to_none=False)
        begun = time.monotonic()
        try:
            _backward(ddp)
        except cccl.Error as error:
            seconds = time.monotonic() - begun
            return type(error), [bool(p.grad.isnan().all()) for p in ddp.parameters()], seconds


def _train_until_it_fails():
    ddp = _ddp()
    cccl.torch.compress(ddp, BLOCK8 | {"deadline": 30.0})
    return until_backward_fails(ddp)


def test_a_killed_peer_raises_from_backward_and_leaves_nan_gradients(own_ranks):
    found = own_ranks(3).outcomes(_train_until_it_fails, seconds=60)
    assert isinstance(found.pop(2), Died)
    for kind, nan, seconds in found:
        assert issubclass(kind, cccl.TransportError)
        assert all(nan)
        assert seconds < 15


def _leaves_while_others_work():
    config = BLOCK8 | {"deadline": 30.0}
    cccl.torch.all_reduce(torch.ones(10), config=config)
    if dist.get_rank() == 1:
        raise SystemExit(3)
    return _until_it_fails(30.0, victim=None)


def test_a_peer_that_exits_is_a_typed_error_on_the_others(own_ranks):
    begun = time.monotonic()
    outcome, exited = own_ranks(2).outcomes(_leaves_while_others_work, seconds=60)
    assert isinstance(exited, Died)
    assert issubclass(outcome[0], cccl.TransportError)
    assert outcome[2], "never stale numbers"
    assert time.monotonic() - begun < 20, "long before the deadline"


def _non_finite(policy, bad):
    rank, places = dist.get_rank(), [5, 700, 4999]
    tensor = gradient(rank, 5000, torch.float32)
    if rank == 2:
        tensor[places] = bad
    config = BLOCK8 | {"non_finite": policy}
    if policy == "propagate":
        cccl.torch.all_reduce(tensor, config=config, label="bucket 3")
    else:
        with pytest.raises(cccl.NonFiniteError, match=r"bucket 3.*rank 2"):
            cccl.torch.all_reduce(tensor, config=config, label="bucket 3")
    assert not tensor[places].isfinite().any()
    assert tensor[1000:4000].isfinite().all(), "blocks without it are numbers"
    again = gradient(rank, 5000, torch.float32)
    cccl.torch.all_reduce(again, config=config)
    assert again.isfinite().all()
    return digest(tensor.nan_to_num()), tensor.isnan().nonzero().tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("policy", ["propagate", "raise"])
def test_a_nan_on_one_rank_surfaces_at_the_same_places_on_all(ranks, policy, bad):
    """F010: 'raise' names the rank and the bucket, and the next collective is fine."""
    assert_equal(ranks(4)(_non_finite, policy, bad))


def _nan_in_ddp(policy):
    ddp = _ddp()
    cccl.torch.compress(ddp, BLOCK8 | {"non_finite": policy})
    scale = float("nan") if dist.get_rank() == 1 else 1.0
    if policy == "raise":
        with pytest.raises(cccl.NonFiniteError, match=r"bucket 0.*rank 1"):
            _backward(ddp, scale)
    else:
        _backward(ddp, scale)
    assert all(p.grad.isnan().any() for p in ddp.parameters())
    ddp.zero_grad()
    _backward(ddp)
    assert all(p.grad.isfinite().all() for p in ddp.parameters())


@pytest.mark.parametrize("policy", ["propagate", "raise"])
def test_a_nan_in_a_gradient_reaches_every_rank(ranks, policy):
    """F009, F010: step 2 is as if step 1 had not been."""
    ranks(3)(_nan_in_ddp, policy)


def _strict():
    cccl.configure({**BLOCK8, "strict": True, "attach_ddp": False})
    tensor = torch.ones(10)
    cccl.torch.all_reduce(tensor)
    with pytest.raises(cccl.NotCompressedError, match="only avg and sum are compressed"):
        cccl.torch.all_reduce(tensor, dist.ReduceOp.MAX)
    cccl.torch.all_reduce(torch.ones(10, dtype=torch.int64), "sum")
    cccl.torch.broadcast(tensor)
    cccl.configure({**BLOCK8, "attach_ddp": False})
    cccl.torch.all_reduce(tensor, dist.ReduceOp.MAX)
    reasons = {row["reason"] for row in cccl.stats()["rows"]}
    assert "only avg and sum are compressed" in reasons
    assert "only avg and sum" in cccl.report()


def test_strict_mode_raises_where_something_would_silently_go_plain(ranks):
    """F081: what is plain by rule is no fallback; without strict it is counted with its reason."""
    ranks(2)(_strict)


def _no_group():
    with pytest.raises(cccl.UnsupportedError, match="init_process_group"):
        cccl.torch.all_reduce(torch.ones(3))
    with pytest.raises(cccl.ConfigError, match="wrap it first"):
        cccl.torch.compress(nn.Linear(2, 2))


def test_without_a_process_group_the_error_says_what_to_call(own_ranks):
    own_ranks(1, backend="")(_no_group)


def _exit_in_the_middle():
    tensor = torch.ones(1 << 20)
    cccl.torch.all_reduce(tensor[:10], config=BLOCK8)
    if dist.get_rank() == 0:
        cccl.torch.all_reduce(tensor, async_op=True, config=BLOCK8)
    return True


def test_processes_end_though_a_collective_is_under_way(own_ranks):
    pool = own_ranks(2)
    assert pool(_exit_in_the_middle) == [True, True]
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < 15


def _destroy_at_once(knows_group):
    for _ in range(3):
        group = dist.new_group()
        tensor = torch.full((1000,), dist.get_rank() + 1.0)
        work = cccl.torch.all_reduce(tensor, group=group, async_op=True, config=BLOCK8)
        # Keeps the communicator's thread busy, so that it may be the last to know the group.
        known = group if knows_group else None
        held = work.get_future().then(lambda future, known=known: time.sleep(0.5))
        while not work.get_future().done():
            time.sleep(0.001)
        dist.destroy_process_group(group)
        del group, work, known
        gc.collect()
        held.wait()
        time.sleep(0.2)
    return True


@pytest.mark.parametrize("knows_group", [False, True])
def test_a_group_may_be_destroyed_as_soon_as_its_last_result_is_there(own_ranks, knows_group):
    """The thread that then drops the communicator may be the communicator's own: ours as well as
    the user's callbacks run on it."""
    assert own_ranks(2)(_destroy_at_once, knows_group) == [True, True]
