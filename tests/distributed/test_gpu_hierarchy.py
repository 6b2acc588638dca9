"""Hierarchical collectives of CUDA tensors: four ranks as two hosts, on one GPU or several."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from expect import (
    EVERYTHING,
    assert_equal,
    check_order_of_streams,
    digest,
    gathered_like_the_cpu,
    gradient,
)
from ranks import Died, stay_away
from test_gpu_ddp import _train

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

TWO_BY_TWO, INTERLEAVED, UNEVEN = ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,))
DEADLINE = 4.0
BOTH = "cpu:gloo,cuda:nccl"
each_grouping = pytest.mark.parametrize("hosts", [TWO_BY_TWO, INTERLEAVED, UNEVEN], ids=str)


def settings(hosts=TWO_BY_TWO, codec="block_float8", **more) -> cccl.Config:
    return cccl.Config(
        compression_type=codec, hierarchy=hosts, collective_filter=EVERYTHING, strict=True, **more
    )


def _like_the_cpu(hosts):
    """Every collective on both devices; returns digests of what all ranks hold alike."""
    config, world, rank, found = settings(hosts), dist.get_world_size(), dist.get_rank(), []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for count in (0, 1, 3, 2305, 65_537):
            for op in ("avg", "sum"):
                cpu = gradient(rank, count, dtype)
                gpu = cpu.cuda()
                for tensor in (cpu, gpu):
                    cccl.torch.all_reduce(tensor, op, config=config)
                assert digest(gpu) == digest(cpu), f"all_reduce {dtype} x {count}"
                found.append(digest(cpu))
            gathered = gathered_like_the_cpu(dtype, count, config)
            sent = [gradient(rank, count, dtype).to(d) for d in ("cpu", "cuda")]
            for tensor in sent:
                cccl.torch.broadcast(tensor, world - 1, config=config)
            assert digest(sent[1]) == digest(sent[0]), f"broadcast {dtype} x {count}"
            found += [digest(gathered), digest(sent[0])]
    return found


@each_grouping
def test_cuda_tensors_get_the_bits_of_cpu_tensors(gpu_ranks, hosts):
    assert_equal(gpu_ranks(4)(_like_the_cpu, hosts))


def _streams(hosts):
    """Written on one stream just before, read on another just after; and nobody waits in between
    for collectives of one tensor."""
    config = settings(hosts, chunk_size="256KiB")
    exact = gradient(0, 1 << 20, torch.float32).cuda()
    want = exact.clone()
    cccl.torch.all_reduce(want, config=config)  # of equal inputs
    torch.cuda.synchronize()
    check_order_of_streams(exact, want, config, 6)
    mine = gradient(dist.get_rank(), 1 << 19, torch.float32)
    slow, fast = mine.cuda(), mine.cuda()
    for _ in range(3):
        cccl.torch.all_reduce(slow, config=config)
        torch.cuda.synchronize()
        cccl.torch.all_reduce(fast, config=config, async_op=True)
    torch.cuda.synchronize()
    assert torch.equal(slow, fast)
    kept = [torch.randn(1 << 18, device="cuda") for _ in range(4)]
    for tensor in kept:  # their memory is used again while they are under way
        gathered = torch.empty(4 << 18, device="cuda")
        cccl.torch.all_gather(gathered, tensor, config=config, async_op=True)
        cccl.torch.all_reduce(tensor, config=config, async_op=True)
    del kept, tensor, gathered
    others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert all((other == 7).all() for other in others)
    return digest(want)


@each_grouping
def test_results_are_ordered_with_the_callers_streams(gpu_ranks, hosts):
    assert_equal(gpu_ranks(4)(_streams, hosts))


def _host_waits():
    """Whether the host comes back while the device is still busy with what was before."""
    tensor = gradient(dist.get_rank(), 1 << 18, torch.float32).cuda()
    for _ in range(3):
        cccl.torch.all_reduce(tensor, config=settings())
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    before = torch.cuda.Event()
    before.record()
    cccl.torch.all_reduce(tensor, config=settings())
    waited = before.query()
    torch.cuda.synchronize()
    return waited


def test_the_host_waits_for_nothing(gpu_ranks):
    assert gpu_ranks(4)(_host_waits) == [False] * 4


def _captured(hosts):
    rank, config = dist.get_rank(), settings(hosts, chunk_size="256KiB")
    inputs = [gradient(rank, 200_000, torch.float32, seed).cuda() for seed in range(3)]
    static, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    refused = pytest.raises(cccl.UnsupportedError, match="once before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        cccl.torch.all_reduce(static[:77], config=config)
    cccl.torch.all_reduce(static.clone(), config=config)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cccl.torch.all_reduce(static, config=config)
        doubled = static * 2
    for values in inputs:
        eager = values.clone()
        cccl.torch.all_reduce(eager, config=config)
        static.copy_(values)
        graph.replay()
        assert torch.equal(static, eager)
        assert torch.equal(doubled, 2 * eager)
    return digest(static)


@each_grouping
def test_a_cuda_graph_replays_all_legs(gpu_ranks, hosts):
    assert_equal(gpu_ranks(4)(_captured, hosts))


@each_grouping
def test_ddp_ranks_stay_bitwise_equal(gpu_ranks, hosts):
    assert_equal(gpu_ranks(4)(_train, settings(hosts), False))


def _feedback(hosts):
    """What goes between hosts, on both devices; each has a group of its own."""
    config, digests = settings(hosts, "block_float2", error_feedback="both"), []
    for device in ("cpu", "cuda"):
        group, found = dist.new_group(), []
        for step in range(5):
            tensor = gradient(dist.get_rank(), 65_537, torch.float32, seed=step).to(device)
            cccl.torch.all_reduce(tensor, group=group, config=config, label="w")
            found.append(digest(tensor))
        digests.append((found, cccl.torch.state_of(group).nbytes))
    assert digests[0] == digests[1]
    return digests[0][0]


@each_grouping
def test_error_feedback_has_the_bits_of_the_cpu(gpu_ranks, hosts):
    assert_equal(gpu_ranks(4)(_feedback, hosts))


def _predicted(hosts):
    """By the mean of what goes between hosts, on both devices."""
    config, digests = settings(hosts, "diff(block_float4)"), []
    for device in ("cpu", "cuda"):
        group, found = dist.new_group(), []
        for step in range(4):
            whole = gradient(7, 65_537, torch.float32)
            tensor = (whole + 0.1 * gradient(dist.get_rank(), 65_537, torch.float32, seed=step)).to(
                device
            )
            cccl.torch.all_reduce(tensor, group=group, config=config, label="w")
            found.append(digest(tensor))
        digests.append((found, cccl.torch.state_of(group).nbytes))
    assert digests[0] == digests[1]
    return digests[0]


@each_grouping
def test_diff_has_the_bits_of_the_cpu(gpu_ranks, hosts):
    found = gpu_ranks(4)(_predicted, hosts)
    assert_equal([digests for digests, _ in found])
    assert any(nbytes for _, nbytes in found)


def _disagree():
    hosts = TWO_BY_TWO if dist.get_rank() else INTERLEAVED
    with pytest.raises(cccl.MismatchError, match="rank 0 has") as caught:
        cccl.torch.all_reduce(torch.ones(7000, device="cuda"), config=settings(hosts))
    tensor = torch.ones(7000, device="cuda")
    cccl.torch.all_reduce(tensor, config=settings())
    return str(caught.value), digest(tensor)


def test_other_hosts_on_one_rank_are_a_mismatch_on_all(gpu_ranks):
    assert_equal(gpu_ranks(4)(_disagree))


def _non_finite(hosts):
    rank = dist.get_rank()
    tensor = gradient(rank, 10_000, torch.float32).cuda()
    if rank == 1:
        tensor[200] = float("inf")
    with pytest.raises(cccl.NonFiniteError, match=r"has a non-finite value$"):
        cccl.torch.all_reduce(tensor, config=settings(hosts, non_finite="raise"))
    clean = gradient(rank, 10_000, torch.float32).cuda()
    cccl.torch.all_reduce(clean, config=settings(hosts, non_finite="raise"))
    assert clean.isfinite().all()
    return digest(clean)


@each_grouping
def test_a_non_finite_value_is_raised_on_all_ranks(gpu_ranks, hosts):
    assert_equal(gpu_ranks(4)(_non_finite, hosts))


def _left_alone(hosts, victim, kill):
    """The victim does not come to the second collective, or dies before it; then all recover."""
    config = settings(hosts, deadline=DEADLINE)
    first = gradient(dist.get_rank(), 1 << 20, torch.float32).cuda()
    cccl.torch.all_reduce(first, config=config)
    torch.cuda.synchronize()
    kinds, seconds = [], 0.0
    if dist.get_rank() == victim:
        stay_away(DEADLINE + 8, kill)
    else:
        tensor, begun = first.clone(), time.monotonic()
        while cccl.ClosedError not in kinds and time.monotonic() - begun < 60:
            try:
                cccl.torch.all_reduce(tensor, config=config)
                torch.cuda.synchronize()  # comes back: nothing hangs on the device
            except cccl.Error as error:
                seconds = seconds or time.monotonic() - begun
                kinds.append(type(error))
        assert tensor.isnan().any()
    if kill:
        return kinds, seconds, None
    cccl.torch.recover(deadline=30.0)
    again = gradient(dist.get_rank(), 1 << 20, torch.float32).cuda()
    cccl.torch.all_reduce(again, config=config)
    return kinds, seconds, torch.equal(again, first)


@pytest.mark.parametrize(("hosts", "victim"), [(TWO_BY_TWO, 1), (UNEVEN, 3), (UNEVEN, 2)], ids=str)
@pytest.mark.parametrize("kill", [True, False], ids=["killed", "late"])
def test_all_ranks_of_all_hosts_get_an_error(own_ranks, hosts, victim, kill):
    found = own_ranks(4, backend=BOTH).outcomes(_left_alone, hosts, victim, kill, seconds=120)
    left = found.pop(victim)
    if kill:
        assert isinstance(left, Died)
    else:
        assert left[2], left
    for outcome in found:
        assert not isinstance(outcome, Exception), outcome
        kinds, seconds, recovered = outcome
        assert issubclass(kinds[0], cccl.TransportError)
        # What was raised by a wait may be told once more, by the call after it.
        assert kinds[-1] is cccl.ClosedError and len(kinds) <= 3
        assert seconds < DEADLINE + 5
        assert recovered is not False
