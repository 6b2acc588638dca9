"""Weights over NCCL: every bit arrives, in messages as long as their payloads."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from expect import (
    EVERYTHING,
    KINDS,
    assert_equal,
    bits,
    check_spoiled,
    digest,
    error_of,
    gradient,
    rows_of,
    weights,
)
from ranks import Died, stay_away

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WEIGHTS = {"compression_type": "none", "weights_type": "lossless", "strict": True}
DEADLINE = 4.0
BOTH = "cpu:gloo,cuda:nccl"


def settings(**more) -> cccl.Config:
    return cccl.Config(
        compression_type="lossless", collective_filter=EVERYTHING, strict=True, **more
    )


def _every_bit(more):
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    config = cccl.Config(**{**WEIGHTS, **more})
    for dtype in DTYPES:
        for kind in KINDS:
            parts = [weights(r, kind, dtype) for r in range(world)]
            for root in {0, world - 1}:
                sent = parts[rank].cuda()
                cccl.torch.broadcast(sent, root, config=config)
                assert torch.equal(bits(sent.cpu()), bits(parts[root])), (dtype, kind, root)
            gathered = torch.empty(world * parts[0].numel(), dtype=dtype, device="cuda")
            cccl.torch.all_gather(gathered, parts[rank].cuda(), config=config)
            assert torch.equal(bits(gathered.cpu()), bits(torch.cat(parts))), (dtype, kind)
            found.append(digest(sent) + digest(gathered))
    return found


@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize(
    "more", ({}, {"chunk_size": "64KiB", "window": 3, "level": "best"}, {"window": 1}), ids=str
)
def test_every_bit_arrives(gpu_ranks, world, more):
    """F041"""
    assert_equal(gpu_ranks(world)(_every_bit, more))


def _like_the_cpu(algorithm):
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    config = settings(chunk_size="128KiB", algorithm=algorithm)
    for dtype in DTYPES:
        for count in (0, 1, 4097, 300_001):
            whole = gradient(rank, count * world, dtype)
            results = []
            for device in ("cpu", "cuda"):
                mean = whole.to(device, copy=True)
                part = torch.empty(count, dtype=dtype, device=device)
                cccl.torch.reduce_scatter(part, mean, config=config)
                cccl.torch.all_reduce(mean, config=config)
                results.append((digest(mean), digest(part)))
            assert results[0] == results[1], (dtype, count)
            found.append(results[0][0])
    return found


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("algorithm", ("two_shot", "one_shot"))
def test_sums_have_the_bits_of_the_cpu(gpu_ranks, world, algorithm):
    assert_equal(gpu_ranks(world)(_like_the_cpu, algorithm))


def _bytes(density):
    """Of both devices, in each collective. `density`: how much of its values each rank has."""
    rank, world, rows = dist.get_rank(), dist.get_world_size(), {}
    mine = (torch.randn(1 << 20) * 0.02).bfloat16()
    if density == "mixed":  # nothing but zeros, weights, and bits of which none can be left out
        kinds = (torch.zeros_like(mine), mine, weights(rank, "any bits", torch.bfloat16))
        mine = kinds[rank % 3].repeat(11)[: 1 << 20]
    config = settings(chunk_size="256KiB", window=2, algorithm="two_shot")
    for device in ("cpu", "cuda"):
        cccl.reset_stats()
        own = mine.to(device, copy=True)
        gathered = torch.empty(world << 20, dtype=mine.dtype, device=device)
        cccl.torch.all_gather(gathered, own, config=config)
        cccl.torch.broadcast(own.clone(), world - 1, config=config)
        cccl.torch.reduce_scatter(own.clone(), gathered, config=config)
        work = cccl.torch.all_reduce(own.clone(), config=config, async_op=True)
        work.wait(30.0)  # the host: all that came before is counted
        names = ("all_gather", "broadcast", "reduce_scatter", "all_reduce")
        for name in names:
            (row,) = rows_of(name, torch.bfloat16)
            found = row["bytes_sent"], row["bytes_received"], row["plain_bytes"]
            rows.setdefault(name, []).append(found)
    return rows


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("density", ("weights", "mixed"))
def test_messages_are_as_long_as_their_payloads(gpu_ranks, world, density):
    """Not as long as the longest: what is sent on a GPU has the bytes of what is sent on a CPU."""
    for rows in gpu_ranks(world)(_bytes, density):
        for name, (cpu, gpu) in rows.items():
            assert gpu == cpu, name
            sent, _, plain = gpu
            if density == "weights" and name == "all_gather":
                assert 0.66 * plain < sent < 0.69 * plain


def _in_step(lanes):
    """With codecs of fixed size in turn, nobody waiting in between."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.new_group()
    found = []
    for window in (1, 2, 3):
        more = {"nccl_lanes": lanes, "window": window, "chunk_size": "64KiB", "deadline": 20.0}
        config, other = cccl.Config(**{**WEIGHTS, **more}), cccl.Config(**more)
        for count in (100, 200_000):
            for root in range(world):
                tensor = weights(rank, "weights", torch.bfloat16)[:count].cuda()
                mean = gradient(rank, count, torch.float32).cuda()
                parts = torch.empty(world * tensor.numel(), dtype=tensor.dtype, device="cuda")
                cccl.torch.all_gather(parts, tensor, group, config=config, async_op=True)
                cccl.torch.all_reduce(mean, group=group, config=other, async_op=True)
                cccl.torch.broadcast(tensor, root, group, config=config)
                want = [weights(r, "weights", torch.bfloat16)[:count] for r in range(world)]
                torch.cuda.synchronize()
                assert torch.equal(parts.cpu(), torch.cat(want)), (window, count, root)
                assert torch.equal(tensor.cpu(), want[root]), (window, count, root)
                found.append(digest(mean))
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("lanes", (1, 2, 3))
def test_lanes_and_windows_keep_ranks_in_step(gpu_ranks, lanes):
    assert_equal(gpu_ranks(3)(_in_step, lanes))


def _captured():
    tensor = weights(0, "weights", torch.bfloat16).cuda()
    want = tensor.clone()
    cccl.torch.broadcast(tensor, 0, config=WEIGHTS)
    refused = pytest.raises(cccl.UnsupportedError, match="codec of fixed size")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        cccl.torch.broadcast(tensor, 0, config=WEIGHTS)
    cccl.torch.broadcast(tensor, 0, config=WEIGHTS)  # the group goes on
    assert torch.equal(tensor, want)


def test_a_capture_is_refused(gpu_ranks):
    gpu_ranks(2)(_captured)


def _late_values():
    """The caller's own work, however long, does not count for the deadline; nor earlier calls."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {**WEIGHTS, "deadline": 1.0}
    exact = weights(rank, "weights", torch.bfloat16).cuda()
    parts = torch.empty(world * exact.numel(), dtype=exact.dtype, device="cuda")
    cccl.torch.all_gather(parts, exact, config=WEIGHTS)  # connects
    want, late = parts.clone(), torch.full_like(exact, float("nan"))
    dist.barrier()
    torch.cuda._sleep(5_000_000_000)  # cycles: some seconds
    late.copy_(exact)
    for _ in range(2):
        cccl.torch.all_gather(parts.zero_(), late, config=config, async_op=True)
    torch.cuda.synchronize()
    assert torch.equal(parts, want)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="ranks that take turns on one GPU end their own work seconds apart",
)
def test_values_may_come_late(own_ranks):
    """F063"""
    own_ranks(2, backend=BOTH)(_late_values)


def _left_alone(collective, kill):
    """Rank 1 does not come to the second collective, or dies before it."""
    config = {**WEIGHTS, "deadline": DEADLINE}
    tensor = torch.randn(1 << 20, device="cuda").bfloat16()
    parts = torch.empty(dist.get_world_size() << 20, dtype=tensor.dtype, device="cuda")

    def call(out):
        if collective == "all_gather":
            cccl.torch.all_gather(out, tensor, config=config)
        else:
            cccl.torch.broadcast(out[: 1 << 20], 0, config=config)

    parts[: 1 << 20] = tensor
    call(parts.clone())
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        return stay_away(DEADLINE + 6, kill)
    begun, before = time.monotonic(), parts.clone()
    known = error_of(lambda: call(parts))
    torch.cuda.synchronize()  # comes back: nothing hangs on the device
    error = known or error_of(lambda: call(before.clone()))
    torch.cuda.synchronize()
    written = 1 << 20 if collective == "broadcast" else parts.numel()
    if collective == "broadcast" and dist.get_rank() == 0 and not parts[0].isnan():
        assert torch.equal(parts[:written], tensor)  # all was sent, to whoever reads it
    else:
        check_spoiled(parts[:written], before[:written], known)
    return type(error), str(error), time.monotonic() - begun


@pytest.mark.parametrize("kill", (False, True))
@pytest.mark.parametrize("collective", ("all_gather", "broadcast"))
def test_a_rank_that_does_not_come_meets_the_deadline(own_ranks, collective, kill):
    """A root only sends: it waits for nobody, keeps its values, and is told later if at all."""
    found = own_ranks(3, backend=BOTH).outcomes(_left_alone, collective, kill)
    assert isinstance(found[1], Died) == kill
    for rank in (0, 2):
        assert not isinstance(found[rank], Exception), found[rank]
        kind, text, seconds = found[rank]
        if collective == "all_gather" or rank == 2:
            assert issubclass(kind, cccl.TransportError), text
        assert seconds < DEADLINE + 10
