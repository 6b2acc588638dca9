"""After a failure no rank's call meets another's: all go back to one place, or all fail."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

import cccl
import cccl.torch

BLOCK8 = {"compression_type": "block_float8", "deadline": 2.0}


def _fail_out_of_step():
    """Rank 1 learns of the failure one call later than rank 0."""
    rank = dist.get_rank()
    tensors = [torch.full((1000,), 10.0 * i + rank) for i in range(4)]
    cccl.torch.all_reduce(tensors[0], config=BLOCK8)
    errors = []
    if rank == 0:
        works = [cccl.torch.all_reduce(tensors[1], config=BLOCK8, async_op=True)]
    else:
        time.sleep(4)  # beyond rank 0's deadline
        works = [cccl.torch.all_reduce(t, config=BLOCK8, async_op=True) for t in tensors[1:3]]
    for work in works:
        with pytest.raises(cccl.TransportError) as caught:
            work.wait()
        errors.append(str(caught.value))
    later = torch.full((1000,), float(rank))
    with pytest.raises(cccl.ClosedError, match=r"cccl\.torch\.recover"):
        cccl.torch.all_reduce(later, config=BLOCK8)
    cccl.torch.recover()
    cccl.torch.all_reduce(later, config=BLOCK8)
    return float(later[0]), float(later[-1])


def test_recover_brings_ranks_back_that_failed_at_different_calls(own_ranks):
    means = own_ranks(2)(_fail_out_of_step)
    assert means[0] == means[1]
    assert means[0] == pytest.approx((0.5, 0.5), rel=0.01)


def _recover_alone():
    if dist.get_rank() == 0:
        begun = time.monotonic()
        with pytest.raises(cccl.TransportError):
            cccl.torch.recover(deadline=1.0)
        return time.monotonic() - begun
    time.sleep(3)
    return 0.0


def test_recovering_alone_ends_at_the_deadline(own_ranks):
    assert own_ranks(2)(_recover_alone)[0] < 5


def _drop_the_group_given_as_state():
    import gc
    import weakref

    group = dist.new_group([0, 1])
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), process_group=group)
    ddp.register_comm_hook(group, cccl.torch.compression_hook)
    ddp(torch.ones(2, 8)).sum().backward()
    watch = weakref.ref(group)
    del ddp
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return watch() is None


def test_a_group_given_as_the_hooks_state_is_let_go(own_ranks):
    assert own_ranks(2)(_drop_the_group_given_as_state) == [True, True]


def _two_models_after_configure():
    cccl.reset_stats()
    cccl.configure({"compression_type": "block_float8"})
    try:
        for _ in range(2):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
            model(torch.ones(2, 64)).sum().backward()
    finally:
        cccl.configure(cccl.Config(attach_ddp=False))
    return cccl.stats()["total"]["calls"]


def test_every_ddp_model_after_configure_is_compressed(own_ranks):
    """F081: a second one was once left plain without a word."""
    assert own_ranks(2)(_two_models_after_configure) == [2, 2]


def _overlapping_input_and_output():
    rank = dist.get_rank()
    memory = torch.arange(300, dtype=torch.float32)
    with contextlib.suppress(cccl.UnsupportedError):
        cccl.torch.reduce_scatter(memory[50:150], memory[:200], config=BLOCK8)
        return "not refused"
    own = memory[100 * rank : 100 * rank + 100]
    expected = own.clone()
    cccl.torch.reduce_scatter(own, memory[:200], config=BLOCK8)
    return float((own - expected).abs().max())


def test_input_and_output_may_share_the_ranks_own_part_alone(own_ranks):
    assert all(error <= 200 / 255 * 1.01 for error in own_ranks(2)(_overlapping_input_and_output))
