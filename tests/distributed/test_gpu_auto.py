"""compression_type auto over NCCL: drifts are noticed, though the host waits for no collective."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _core, _policy
from cccl.torch._groups import existing

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

AUTO = {"compression_type": "auto"}
MIB = 1 << 20
# Seconds at 1 KiB, 1 MiB and above, which no collective takes: plain wins, the codec, and so on.
PLAIN_WINS = {"none": (1e-3, 10.0, 10.0), "block_float8": (2e-3, 20.0, 20.0)}
CODEC_WINS = {"none": (1e-3, 20.0, 20.0), "block_float8": (2e-3, 10.0, 10.0)}


def _sender(way, config, group):
    """What makes a few calls of a MiB or more; they share one label or are a model's buckets."""
    if way == "DDP":
        model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)]).cuda()
        model = DistributedDataParallel(model, bucket_cap_mb=1, process_group=group)
        cccl.torch.compress(model, config)
        return lambda: model(torch.ones(8, 512, device="cuda")).sum().backward()
    tensor = torch.ones(MIB // 4, device="cuda")
    if way == "backend":
        cccl.configure(config)
        ours = dist.new_group(backend="cpu:cccl,cuda:cccl")
        return lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG, group=ours)

    def send():
        work = cccl.torch.all_reduce(tensor, group=group, config=config, async_op=way == "async")
        if work is not None:
            work.wait()

    return send


def _drifting(way):
    """How often ranks had measured by each step."""
    group, tables = dist.new_group(), [PLAIN_WINS, CODEC_WINS]
    measured, steps = [], []

    def calibrate(*_):
        measured.append(tables[len(measured) % 2])
        return _policy.Table((1 << 10, 1 << 20, 1 << 24), measured[-1], measured[-1])

    real = _policy.calibrate, _policy.AT_START
    _policy.calibrate, _policy.AT_START = calibrate, 1e9  # as often as they drift
    try:
        send = _sender(way, cccl.Config.load(AUTO | {"attach_ddp": False}), group)
        for _ in range(80):
            send()
            steps.append(len(measured))
        torch.cuda.synchronize()
    finally:
        _policy.calibrate, _policy.AT_START = real
        dist.destroy_process_group(group)
    return steps


@pytest.mark.parametrize("way", ["waiting", "async", "DDP", "backend"])
def test_times_far_from_the_predicted_ones_are_measured_anew_on_all_ranks(gpu_ranks, way):
    """Those of plain calls, then those of compressed ones."""
    found = gpu_ranks(2)(_drifting, way)
    assert_equal(found)
    assert found[0][0] == 1 and found[0][-1] >= 3, found[0]


def _undisturbed():
    """What measuring found of the smallest plain call, and what one takes."""
    group = dist.new_group()
    tensor = torch.ones(256, device="cuda")
    cccl.torch.all_reduce(tensor, group=group, config=AUTO)
    (policy,) = existing(group, tensor.device)[0].policies.values()
    begun = time.perf_counter()
    for _ in range(50):
        dist.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
    taken = (time.perf_counter() - begun) / 50
    dist.destroy_process_group(group)
    return policy.table.quartiles["none"][0], taken


def test_small_plain_calls_are_measured_as_fast_as_they_are(gpu_ranks):
    for predicted, taken in gpu_ranks(2)(_undisturbed):
        assert predicted < 2 * taken


def _compressed_times():
    config = cccl.Config(compression_type="block_float8")
    group = dist.new_group()
    tensors = [torch.ones(4 * MIB, device="cuda") for _ in range(6)]

    def send():
        return [cccl.torch.all_reduce(t, group=group, config=config, async_op=True)
                for t in tensors]  # fmt: skip

    for work in send():
        work.wait(30.0)
    dist.barrier(group)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    works = send()
    for work in works:
        work.wait(30.0)
    taken = time.perf_counter() - begun
    torch.cuda._sleep(400_000_000)  # the caller's own
    late = cccl.torch.all_reduce(tensors[0], group=group, config=config, async_op=True)
    early = late._core.seconds
    late.wait(30.0)
    found = [work._core.seconds for work in works]
    dist.destroy_process_group(group)
    return found, taken, early, late._core.seconds


def test_a_work_tells_its_own_seconds_on_the_device(gpu_ranks):
    """Neither those of collectives before it (but one that ends before the one before it counts
    whole) nor of what its caller did."""
    for found, taken, early, late in gpu_ranks(2)(_compressed_times):
        assert min(found) > 0 and sum(found) <= 2 * taken
        assert early is None
        assert 0 < late < 0.1


def _plain_times():
    """Of calls that queue behind each other, as a model's buckets do."""
    tensors = [torch.ones(4 * MIB, device="cuda") for _ in range(6)]

    def event():
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def send(clocks):
        works = []
        for tensor in tensors:
            clocks.append(_policy.Between(event, clocks[-1] if clocks else None))
            works.append(dist.all_reduce(tensor, async_op=True))
            clocks[-1].end(works[-1])
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        return [clock.seconds for clock in clocks]

    send([])
    dist.barrier()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    found = send([])
    return found, time.perf_counter() - begun


def test_plain_calls_are_timed_without_those_before_them(gpu_ranks):
    for found, taken in gpu_ranks(2)(_plain_times):
        assert min(found) > 0 and sum(found) <= 1.1 * taken
