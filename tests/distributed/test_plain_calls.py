"""Plain calls are found again, for tensors that need no closer look and groups as they were."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import cccl
import cccl.torch
from cccl import _core, _members
from cccl.torch._groups import existing, find_plain, plain_calls

COUNT = 64
NONE = cccl.Config(compression_type="none")


def _found(tensor, *, output=None, group=None, op="avg", label="all_reduce", config=NONE):
    output = tensor if output is None else output
    return find_plain("all_reduce", tensor, output, op, group, 0, label, config)


def _send(count=COUNT, group=None, **more):
    cccl.torch.all_reduce(torch.ones(count), group=group, config=NONE, **more)


def _known():
    plain_calls.clear()
    ones = torch.ones(COUNT)
    assert _found(ones) is None
    _send()
    how, group = _found(ones)
    assert group is dist.group.WORLD
    assert how is _found(ones, group=dist.group.WORLD)[0]
    unlike = [
        {"label": "another"}, {"op": "sum"}, {"op": dist.ReduceOp.AVG},
        {"config": cccl.Config(compression_type="none")}, {"group": "none"}, {"label": 3},
        {"output": torch.ones(COUNT, dtype=torch.float64)}, {"output": ones[: COUNT // 2]},
        {"output": ones[:]},
    ]  # fmt: skip
    assert [_found(ones, **other) for other in unlike] == [None] * len(unlike)
    closer = [
        torch.nn.Parameter(ones), torch.ones(COUNT, requires_grad=True), torch.ones(COUNT, 2)[:, 0],
        torch._neg_view(ones), ones.to_sparse(), torch.empty(COUNT, device="meta"),
        torch.nested.nested_tensor([ones[:3], ones[3:]]), ones.double(), torch.ones(COUNT + 1),
        [1.0] * COUNT,
    ]  # fmt: skip
    assert [_found(tensor) for tensor in closer] == [None] * len(closer)
    phases = torch.ones(COUNT, dtype=torch.complex64)
    cccl.torch.all_reduce(phases, config=NONE)
    assert _found(phases) and not _found(phases.conj())


def _gathered():
    """Out of place, whole and in parts that are shaped otherwise."""
    plain_calls.clear()
    rank, world = dist.get_rank(), dist.get_world_size()
    for turn in range(3):
        whole = torch.empty(world, COUNT // 2, 2)
        part = torch.full((COUNT // 2, 2), rank + 1.0 + turn)
        found = find_plain("all_gather", part, whole, "sum", None, 0, "all_gather", NONE)
        assert bool(found) == (turn > 0)
        overlapping = whole.view(-1)[1 : COUNT + 1].view(COUNT // 2, 2)
        assert not find_plain("all_gather", overlapping, whole, "sum", None, 0, "all_gather", NONE)
        cccl.torch.all_gather(whole, part, config=NONE)
        assert (whole == torch.arange(1.0, world + 1).view(-1, 1, 1) + turn).all()


def test_calls_between_two_tensors_are_found_too(ranks):
    ranks(2)(_gathered)


def _broadcast_of_bytes():
    """Of a dtype that gloo moves as bytes, without dimensions; each source is a call of its own."""
    for source in (0, 1, 1, 0):
        tensor = torch.tensor(7 + dist.get_rank(), dtype=torch.int16)
        cccl.torch.broadcast(tensor, source, config=NONE)
        assert tensor.item() == 7 + source


def test_a_scalar_is_broadcast_as_often_as_one_likes(ranks):
    ranks(2)(_broadcast_of_bytes)


def test_what_needs_a_closer_look_is_not_found(ranks):
    ranks(2)(_known)


def _forgotten():
    plain_calls.clear()
    for count in range(COUNT, COUNT + 3):
        _send(count)
    members = existing(None, torch.device("cpu"))[0]
    assert _found(torch.ones(COUNT))
    members.forget_kinds()
    assert not any(_found(torch.ones(count)) for count in range(COUNT, COUNT + 3))
    # Where there are too many kinds, what was agreed of them goes with them.
    most, _members._MOST_KEPT = _members._MOST_KEPT, 2
    try:
        for count in range(COUNT, COUNT + 3):
            _send(count)
    finally:
        _members._MOST_KEPT = most
    assert [bool(_found(torch.ones(count))) for count in range(COUNT, COUNT + 3)] == [
        False, False, True,
    ]  # fmt: skip
    cccl.torch.recover()
    assert not _found(torch.ones(COUNT + 2))
    _send(COUNT + 2)
    assert _found(torch.ones(COUNT + 2))


def test_calls_are_found_only_while_their_ranks_have_agreed_on_them(ranks):
    ranks(2)(_forgotten)


def _of_two():
    """Of one group calls of another are not known, and none is kept alive."""
    plain_calls.clear()
    one, two = (dist.new_group([0, 1]) for _ in range(2))
    _send(group=one)
    ones = torch.ones(COUNT)
    assert _found(ones, group=one)[1] is one
    assert _found(ones, group=two) is None
    assert _found(ones) is None
    gone = weakref.ref(one)
    dist.destroy_process_group(one)
    del one
    gc.collect()
    assert gone() is None
    dist.destroy_process_group(two)


def test_groups_have_calls_of_their_own_and_go_when_they_are_dropped(ranks):
    ranks(2)(_of_two)


def _failed():
    plain_calls.clear()
    _send()
    existing(None, torch.device("cpu"))[0].core.abort("enough")
    assert _found(torch.ones(COUNT)) is None
    with pytest.raises(cccl.ClosedError, match="did not begin"):
        _send()


def test_after_a_failure_none_is_found(own_ranks):
    own_ranks(2)(_failed)


class _Groups:
    class WORLD:
        """Stands for a group: it is asked for nothing."""


def _calls():
    communicator = _core.Communicator(_core.loopback(1)[0], 5.0)
    return _core.PlainCalls(torch.Tensor, torch.strided, _Groups), communicator


def test_calls_are_kept_up_to_a_number():
    calls, communicator = _calls()
    for count in range(1030):
        ones = torch.ones(1 + count)
        like = "all_reduce", ones, ones, "avg"
        calls.remember(*like, _Groups.WORLD, 0, "label", NONE, None, communicator, count)
        assert calls.find(*like, None, 0, "label", NONE) == (count, _Groups.WORLD)
    first = torch.ones(1)
    assert calls.find("all_reduce", first, first, "avg", None, 0, "label", NONE) is None
    communicator.close()
    assert calls.find(*like, None, 0, "label", NONE) is None


def test_threads_may_forget_what_another_finds():
    """Torch lets other threads in where a tensor is asked for its bits."""
    calls, communicator = _calls()
    ones, until = torch.ones(COUNT), time.monotonic() + 2.0
    like = "all_reduce", ones, ones, "avg"

    def change():
        while time.monotonic() < until:
            how = ["a call"]
            calls.remember(*like, _Groups.WORLD, 0, "label", NONE, None, communicator, how)
            del how
            calls.clear()
            _ = [["in its place"] for _ in range(50)]

    def look():
        found = 0
        while time.monotonic() < until:
            known = calls.find(*like, None, 0, "label", NONE)
            assert known is None or known == (["a call"], _Groups.WORLD)
            found += known is not None
        return found

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            changing, looking = pool.submit(change), pool.submit(look)
            changing.result()
            assert looking.result()
    finally:
        sys.setswitchinterval(before)


def _forked():
    """A fork has none of the connections, so it finds no call."""
    _send()
    assert _found(torch.ones(COUNT))
    child = os.fork()
    if not child:
        os._exit(_found(torch.ones(COUNT)) is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _found(torch.ones(COUNT))


def test_a_fork_finds_none(own_ranks):
    own_ranks(2)(_forked)


def test_find_says_how_many_arguments_it_takes():
    with pytest.raises(TypeError, match="takes 8 arguments, not 1"):
        find_plain(torch.ones(1))
