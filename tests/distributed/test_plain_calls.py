"""Plain calls are found again, for tensors that need no closer look and groups as they were."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import cccl
import cccl.torch
from cccl import _members
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
        ones.double(), torch.ones(COUNT + 1), [1.0] * COUNT,
    ]  # fmt: skip
    assert [_found(tensor) for tensor in closer] == [None] * len(closer)
    other = torch.ones(COUNT)
    assert _found(ones, output=other)[0] is how


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


def test_find_says_how_many_arguments_it_takes():
    with pytest.raises(TypeError, match="takes 8 arguments, not 1"):
        find_plain(torch.ones(1))
