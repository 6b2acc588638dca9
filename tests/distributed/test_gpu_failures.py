"""What goes wrong over NCCL is a typed error on every survivor, soon, and outputs are NaN."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from expect import check_spoiled, error_of, gradient
from ranks import Died, stay_away

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

DEADLINE = 4.0
CONFIG = cccl.Config(compression_type="block_float8", deadline=DEADLINE)
COUNT = 1 << 20


def _first(count=COUNT):
    tensor = gradient(dist.get_rank(), count, torch.float32).cuda()
    cccl.torch.all_reduce(tensor, config=CONFIG)
    torch.cuda.synchronize()
    return tensor


def _left_alone(kill):
    """Rank 1 does not come to the second collective, or dies before it."""
    tensor = _first()
    if dist.get_rank() == 1:
        return stay_away(DEADLINE + 6, kill)
    begun, before = time.monotonic(), tensor.clone()
    known = error_of(lambda: cccl.torch.all_reduce(tensor, config=CONFIG))
    torch.cuda.synchronize()  # comes back: nothing hangs on the device
    check_spoiled(tensor, before, known)
    error = known or error_of(lambda: cccl.torch.all_reduce(before.clone(), config=CONFIG))
    seconds = time.monotonic() - begun
    for _ in range(2):  # the first may tell what became known meanwhile
        closed = False
        try:
            cccl.torch.all_reduce(tensor, config=CONFIG)
        except cccl.Error as found:
            closed = isinstance(found, cccl.ClosedError)
    return type(error), str(error), seconds, closed


def check_survivors(found, world):
    """Of `_left_alone`: all but rank 1 got an error in time, and the group is closed."""
    for rank in (r for r in range(world) if r != 1):
        assert not isinstance(found[rank], Exception), found[rank]
        kind, text, seconds, closed = found[rank]
        assert issubclass(kind, cccl.TransportError), text
        assert closed
        assert seconds < DEADLINE + 10


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_does_not_come_meets_the_deadline(own_ranks, world):
    found = own_ranks(world, backend="cpu:gloo,cuda:nccl")(_left_alone, False)
    check_survivors(found, world)
    assert all("rank" in found[rank][1] for rank in range(world) if rank != 1)


@pytest.mark.parametrize("world", [2, 3])
def test_survivors_of_a_killed_rank_get_an_error(own_ranks, world):
    """Torch's own NCCL group leaves them waiting in synchronize()."""
    found = own_ranks(world, backend="cpu:gloo,cuda:nccl").outcomes(_left_alone, True)
    assert isinstance(found[1], Died)
    check_survivors(found, world)


def _known_before():
    """The failure of a call that had returned is told by the next one, which does not begin."""
    from cccl.torch._groups import communicator

    tensor, store = _first(), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["returned"])  # who dies before may fail the call itself
        return stay_away(DEADLINE + 6, True)
    core = communicator(dist.group.WORLD, tensor.device, CONFIG).core
    cccl.torch.all_reduce(tensor, config=CONFIG, async_op=True)
    store.set("returned", "")
    until = time.monotonic() + DEADLINE + 5
    while not core.closed and time.monotonic() < until:
        time.sleep(0.01)
    values = torch.ones(COUNT, device="cuda")
    for kind in (cccl.TransportError, cccl.ClosedError):
        with pytest.raises(kind, match="did not begin"):
            cccl.torch.all_reduce(values, config=CONFIG)
    torch.cuda.synchronize()
    assert tensor.isnan().all() and (values == 1).all()
    return None


def test_a_call_that_does_not_begin_leaves_its_tensors(own_ranks):
    found = own_ranks(2, backend="cpu:gloo,cuda:nccl").outcomes(_known_before)
    assert found[0] is None


def _recovered():
    tensor = _first()
    want = _first()
    if dist.get_rank() == 1:
        time.sleep(DEADLINE + 2)
    else:
        with pytest.raises(cccl.Error):
            for _ in range(2):
                cccl.torch.all_reduce(tensor, config=CONFIG)
                torch.cuda.synchronize()
    cccl.torch.recover(deadline=30.0)
    again = gradient(dist.get_rank(), COUNT, torch.float32).cuda()
    cccl.torch.all_reduce(again, config=CONFIG)
    assert torch.equal(again, want)


def test_a_group_recovers(own_ranks):
    own_ranks(2, backend="cpu:gloo,cuda:nccl")(_recovered)


def _pending():
    """What is under way when this rank gives up fails, and is NaN."""
    from cccl.torch._groups import communicator

    tensor = _first()
    if dist.get_rank() == 1:
        time.sleep(2.0)
        return
    work = cccl.torch.all_reduce(tensor, config=CONFIG, async_op=True)
    time.sleep(0.3)
    communicator(dist.group.WORLD, tensor.device, CONFIG).core.abort("enough")
    with pytest.raises(cccl.ClosedError, match="enough"):
        work.wait(20.0)
    torch.cuda.synchronize()
    assert tensor.isnan().all()


def test_an_abort_fails_what_is_under_way(own_ranks):
    own_ranks(2, backend="cpu:gloo,cuda:nccl")(_pending)


def _refused_in_launch():
    """The output is NaN and nothing else is written."""
    tensor = torch.ones(COUNT + dist.get_rank(), device="cuda")
    with pytest.raises(cccl.MismatchError):
        cccl.torch.all_reduce(tensor, config=CONFIG)
    assert tensor.isnan().all()
    for _ in range(4):
        with pytest.raises(cccl.MismatchError):
            ones = torch.ones(COUNT + 2 + dist.get_rank(), device="cuda")
            cccl.torch.all_reduce(ones, config=CONFIG)
        del ones
        others = torch.full((COUNT,), 7.0, device="cuda")
        torch.cuda.synchronize()
        assert (others == 7).all()


def test_a_refused_launch_leaves_nan_and_touches_no_other_memory(own_ranks):
    own_ranks(2, backend="cpu:gloo,cuda:nccl")(_refused_in_launch)


def _other_than_agreed():
    """Rank 0 repeats a call, rank 1 makes another: nobody can tell before it is too late."""
    tensor = _first()
    other = torch.ones(COUNT + dist.get_rank(), device="cuda")
    with pytest.raises(cccl.TransportError):
        for _ in range(2):
            cccl.torch.all_reduce(other if dist.get_rank() else tensor, config=CONFIG)
            torch.cuda.synchronize()


def test_a_call_unlike_one_agreed_before_meets_the_deadline(own_ranks):
    own_ranks(2, backend="cpu:gloo,cuda:nccl")(_other_than_agreed)


def _aborted():
    """One rank gives up; the other hears its reason."""
    from cccl.torch._groups import communicator

    tensor = _first()
    if dist.get_rank() == 1:
        time.sleep(0.5)
        communicator(dist.group.WORLD, tensor.device, CONFIG).core.abort("out of coffee")
        return ""
    try:
        cccl.torch.all_reduce(tensor, config=CONFIG)
        torch.cuda.synchronize()
        cccl.torch.all_reduce(tensor, config=CONFIG)
    except cccl.PeerAbortedError as error:
        return str(error)


def test_a_reason_reaches_the_other_ranks(own_ranks):
    assert "out of coffee" in own_ranks(2, backend="cpu:gloo,cuda:nccl")(_aborted)[0]
