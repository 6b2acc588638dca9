"""What goes plain is right for every layout too: gloo itself reads memory, not strides (F031)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import cccl
import cccl.torch

PLAIN = {"compression_type": "none"}


def _strided():
    rank = dist.get_rank()
    memory = torch.arange(8) * (rank + 1)
    cccl.torch.all_reduce(memory[::2], op="sum", config=PLAIN)
    expected = torch.arange(8) * (rank + 1)
    expected[::2] = torch.arange(0, 8, 2) * 3
    assert memory.equal(expected)

    weights = torch.arange(8.0) * (rank + 1)
    work = cccl.torch.broadcast(weights[::2], 0, async_op=True)
    assert work.wait()
    assert weights[::2].equal(torch.arange(0.0, 8.0, 2.0))
    assert weights[1::2].equal(torch.arange(1.0, 8.0, 2.0) * (rank + 1))

    negated = (torch.full((4,), 1j, dtype=torch.complex64) * (rank + 1)).conj().imag
    cccl.torch.all_reduce(negated, op="sum", config=PLAIN)
    assert negated.equal(torch.full((4,), -3.0))

    matrix = torch.arange(6.0).reshape(2, 3)
    turned = matrix.t().contiguous().t() if rank else matrix
    cccl.torch.all_reduce(turned, op="sum", config=PLAIN)
    assert turned.equal(matrix if rank == 0 else torch.arange(6.0).reshape(2, 3) * 2)
    return True


def test_strided_tensors_go_plain_right_and_leave_their_neighbours_alone(ranks):
    assert all(ranks(2)(_strided))


def _shapes():
    rank = dist.get_rank()
    out = torch.empty(())
    cccl.torch.reduce_scatter(out, torch.tensor([1.0, 2.0]), op="sum", config=PLAIN)
    assert out.item() == 2.0 * (rank + 1)
    stacked = torch.empty(2, 3, dtype=torch.int16)
    cccl.torch.all_gather(stacked, torch.full((3,), rank, dtype=torch.int16))
    assert stacked.tolist() == [[0, 0, 0], [1, 1, 1]]
    return True


def test_shapes_are_as_free_as_on_the_compressed_way(ranks):
    assert all(ranks(2)(_shapes))


def _inference():
    rank = dist.get_rank()
    with torch.inference_mode():
        turned = torch.full((40, 30), float(rank)).t()
    work = cccl.torch.all_reduce(turned, config={"compression_type": "block_float8"}, async_op=True)
    assert work.get_future().wait() is not None and work.wait()
    return bool(torch.allclose(turned, torch.tensor(0.5), rtol=0.01))


def test_inference_tensors_are_written_back(ranks):
    assert ranks(2)(_inference) == [True, True]


def _without_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(100)
    for tensor in (freed, fake, torch._efficientzerotensor(10), [1.0, 2.0], None):
        with pytest.raises(cccl.UnsupportedError):
            cccl.torch.all_reduce(tensor)
    with pytest.raises(cccl.UnsupportedError):
        cccl.torch.all_reduce(torch.ones(3), group="x")
    with pytest.raises(cccl.ConfigError):
        cccl.torch.all_reduce(torch.ones(3), op=3)
    return True


def test_tensors_without_memory_are_refused(ranks):
    """F086"""
    assert all(ranks(2)(_without_memory))


def _wait_in_a_callback():
    first = cccl.torch.all_reduce(torch.ones(8_000_000), async_op=True)  # not done at once
    caught = []

    def callback(_):
        try:
            cccl.torch.all_reduce(torch.ones(10))
        except cccl.Error as error:
            caught.append(str(error))

    first.get_future().then(callback).wait()
    first.wait()
    return bool(caught) and "callback" in caught[0]


def test_waiting_inside_a_callback_is_an_error_not_a_hang(own_ranks):
    assert own_ranks(2)(_wait_in_a_callback) == [True, True]


def _fork():
    import os

    cccl.torch.all_reduce(torch.ones(1000))
    child = os.fork()
    if child == 0:
        try:
            cccl.torch.all_reduce(torch.ones(1000), config={"deadline": 2.0})
            os._exit(1)
        except cccl.Error:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    cccl.torch.all_reduce(torch.ones(1000))
    return os.waitstatus_to_exitcode(status)


def test_a_fork_gets_an_error_and_leaves_its_parent_alone(own_ranks):
    assert own_ranks(2).outcomes(_fork, seconds=40) == [0, 0]


def _sparse():
    rank = dist.get_rank()
    mine = torch.sparse_coo_tensor([[rank, 3]], [1.0, 2.0], (5,))
    cccl.torch.all_reduce(mine, op="sum")
    return mine.to_dense().tolist()


def test_sparse_tensors_go_to_the_backend_as_they_are(ranks):
    """F043, without DDP."""
    assert ranks(2)(_sparse) == [[1.0, 1.0, 0.0, 4.0, 0.0]] * 2
