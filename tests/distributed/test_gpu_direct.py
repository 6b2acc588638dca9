"""Payloads that are read in their sender's memory: the same bits, on time, and no hang."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, gathered_like_the_cpu, gradient
from ranks import Died
from test_gpu_collectives import CODECS, FLOATS, _chunked, _staged_late, _streams, settings
from test_gpu_failures import _aborted, _left_alone, _pending, _recovered, check_survivors

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

BACKEND = "cpu:gloo,cuda:nccl"
COUNTS = (0, 1, 3, 129, 65537, 1_000_003)


def _ways() -> set[str]:
    return {row["algorithm"] for row in cccl.stats()["rows"] if row["calls"]}


def _like_the_cpu(codec, options):
    """What is read in place is told in stats()."""
    config, rank = settings(codec, **options), dist.get_rank()
    found = []
    for dtype in FLOATS:
        for count in COUNTS:
            mine = gradient(rank, count, dtype)
            cpu, gpu = mine.clone(), mine.cuda()
            for tensor in (cpu, gpu):
                cccl.torch.all_reduce(tensor, config=config)
            assert digest(gpu.cpu()) == digest(cpu), f"all_reduce {dtype} x {count}"
            gathered = gathered_like_the_cpu(dtype, count, config)
            found += [digest(cpu), digest(gathered)]
    assert any("in place" in way for way in _ways())
    return found


@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize(("codec", "options"), CODECS, ids=str)
def test_bits_are_those_of_cpu_tensors(near_ranks, world, codec, options):
    """F006, F023"""
    assert_equal(near_ranks(world)(_like_the_cpu, codec, options, seconds=100.0))


@pytest.mark.parametrize("job", (_streams, _staged_late, _chunked), ids=lambda job: job.__name__)
def test_streams_chunks_and_windows(near_ranks, job):
    """F065: nothing is read before it is written, nor written again before all have read it."""
    near_ranks(2)(job)


def _many():
    """Thousands in a row on both workplaces, of sizes that grow and shrink, none waited for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [1 << 20, 3, 70_000, 5_000_000, 129, 300_001]
    tensors = [torch.full((n,), float(rank + 1), device="cuda") for n in sizes]
    want = (world + 1) / 2
    for turn in range(1000):
        works = [
            cccl.torch.all_reduce(tensor, config=settings("cast_bf16"), async_op=True)
            for tensor in tensors
        ]
        if turn % 100 == 0:
            for work in works:
                work.wait()
    torch.cuda.synchronize()
    for tensor in tensors:
        assert (tensor == want).all(), tensor.unique()


def test_memory_is_not_written_before_all_have_read_it(near_ranks):
    """F056"""
    near_ranks(2)(_many, seconds=100.0)


def _mixed():
    """With what goes over NCCL in between: broadcasts, payloads of any size, graphs."""
    rank = dist.get_rank()
    mine = gradient(rank, 300_001, torch.float32)
    want = mine.clone()
    cccl.torch.all_reduce(want, config=settings())
    root = gradient(1, 70_001, torch.float32)
    sent = root.clone()
    cccl.torch.broadcast(sent, 1, config=settings())
    for _ in range(3):
        gpu = mine.cuda()
        cccl.torch.all_reduce(gpu, config=settings())
        assert torch.equal(gpu.cpu(), want)
        other = gradient(rank, 70_001, torch.float32).cuda()
        cccl.torch.broadcast(other, 1, config=settings())
        assert torch.equal(other.cpu(), sent)
        exact = gradient(0, 70_001, torch.bfloat16).cuda()
        kept = exact.clone()
        cccl.torch.all_reduce(exact, config=settings("lossless"))  # of equal values
        assert torch.equal(exact, kept)
    static, graph = mine.cuda(), torch.cuda.CUDAGraph()
    cccl.torch.all_reduce(static.clone(), config=settings())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cccl.torch.all_reduce(static, config=settings())
    for _ in range(3):
        static.copy_(mine)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(static.cpu(), want)
        gpu = mine.cuda()
        cccl.torch.all_reduce(gpu, config=settings())
        assert torch.equal(gpu.cpu(), want)
    del graph


def test_beside_what_goes_over_nccl(near_ranks):
    near_ranks(2)(_mixed)


def _switched(memory, expected):
    tensor = gradient(dist.get_rank(), 70_001, torch.float32).cuda()
    group = dist.new_group(backend="nccl")
    work = cccl.torch.all_reduce(
        tensor, group=group, async_op=True, config=settings(peer_memory=memory)
    )
    work.wait(20.0)  # on the host: then it is counted
    assert any("in place" in way for way in _ways()) == expected
    return digest(tensor.cpu())


def _one_does_not_want():
    return _switched("off" if dist.get_rank() == 1 else "auto", False)


def test_peer_memory_can_be_switched_off(near_ranks):
    """By one rank for all; the bits are the same."""
    found = [
        near_ranks(2)(_switched, "auto", True),
        near_ranks(2)(_switched, "off", False),
        near_ranks(2)(_one_does_not_want),
    ]
    assert len({digest for ranks in found for digest in ranks}) == 1


@pytest.mark.parametrize("kill", (False, True), ids=("absent", "killed"))
@pytest.mark.parametrize("world", (2, 3))
def test_a_rank_that_is_lost_is_an_error_on_the_others(own_ranks, world, kill):
    found = own_ranks(world, backend=BACKEND, near=True).outcomes(_left_alone, kill)
    assert isinstance(found[1], Died) == kill
    check_survivors(found, world)


@pytest.mark.parametrize("job", (_pending, _recovered), ids=lambda job: job.__name__)
def test_giving_up_and_beginning_again(own_ranks, job):
    own_ranks(2, backend=BACKEND, near=True)(job)


def test_a_reason_reaches_the_other_ranks(own_ranks):
    assert "out of coffee" in own_ranks(2, backend=BACKEND, near=True)(_aborted)[0]
