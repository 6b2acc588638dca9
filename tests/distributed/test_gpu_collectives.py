"""Collectives of CUDA tensors over NCCL: the same bits as on the CPU, in the order of streams."""

from __future__ import annotations

import gc

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
    rows_of,
)

import cccl
import cccl.torch
from cccl import _core

pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COUNTS = (0, 1, 3, 129, 2305, 65537, 1_000_003)
CODECS = (
    ("block_float8", {}),
    ("block_float4", {}),
    ("block_float4", {"level": "best", "block_size": 32}),
    ("block_float5", {}),
    ("block_float3", {"rotation": "hadamard", "rounding": "stochastic"}),
    ("cast_bf16", {}),
)

each_world = pytest.mark.parametrize("world", (2, 3, 4))
each_codec = pytest.mark.parametrize(("codec", "options"), CODECS, ids=str)


def settings(codec: str = "block_float8", **more) -> cccl.Config:
    return cccl.Config(compression_type=codec, collective_filter=EVERYTHING, strict=True, **more)


def _like_the_cpu(codec, options):
    """Every collective on both devices; returns digests of what all ranks hold alike."""
    config, world, rank = settings(codec, **options), dist.get_world_size(), dist.get_rank()
    found = []
    for dtype in FLOATS:
        for count in COUNTS:
            mine = gradient(rank, count, dtype)
            cpu, gpu = mine.clone(), mine.cuda()
            for tensor in (cpu, gpu):
                cccl.torch.all_reduce(tensor, config=config)
            assert digest(gpu.cpu()) == digest(cpu), f"all_reduce {dtype} x {count}"
            found.append(digest(cpu))

            gathered = gathered_like_the_cpu(dtype, count, config)

            sent = [gradient(rank, count, dtype).to(d) for d in ("cpu", "cuda")]
            for tensor in sent:
                cccl.torch.broadcast(tensor, world - 1, config=config)
            assert digest(sent[1].cpu()) == digest(sent[0]), f"broadcast {dtype} x {count}"
            found += [digest(gathered), digest(sent[0])]
        assert not any(row["plain"] for row in rows_of("all_reduce", dtype))
    return found


@each_codec
@each_world
def test_cuda_tensors_get_the_bits_of_cpu_tensors(gpu_ranks, world, codec, options):
    """F006, F023: and the same on every rank."""
    assert_equal(gpu_ranks(world)(_like_the_cpu, codec, options))


def _chunked():
    expected = None
    mine = gradient(dist.get_rank(), 300_001, torch.float32)
    for chunk in ("auto", "64KiB", "200KiB", "4MiB"):
        for window in ("auto", 1, 3):
            for algorithm in ("two_shot", "one_shot"):
                for debug in (False, True):
                    tensor = mine.cuda()
                    cccl.torch.all_reduce(tensor, config=settings(
                        chunk_size=chunk, window=window, algorithm=algorithm, debug=debug
                    ))  # fmt: skip
                    expected = expected or digest(tensor.cpu())
                    assert digest(tensor.cpu()) == expected, (chunk, window, algorithm, debug)
    return expected


def test_performance_settings_change_no_bit(gpu_ranks):
    assert_equal(gpu_ranks(3)(_chunked))


def _streams():
    """The input is written on one stream just before, the result is read on another just after."""
    config = settings(chunk_size="256KiB")
    exact = gradient(0, 1 << 20, torch.float32).cuda()
    want = exact.clone()
    cccl.torch.all_reduce(want, config=config)  # of equal inputs
    torch.cuda.synchronize()
    check_order_of_streams(exact, want, config, 8)
    kept = [torch.randn(1 << 18, device="cuda") for _ in range(4)]
    for tensor in kept:  # nobody waits, and the memory is used again
        cccl.torch.all_reduce(tensor, config=config, async_op=True)
    del kept, tensor
    others = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert all((other == 7).all() for other in others)


def _staged_late():
    """What a copy reads before it is sent is written late: of a transposed tensor."""
    exact = gradient(0, 1 << 20, torch.float32).cuda().view(1 << 10, -1)
    want = exact.t().contiguous()
    cccl.torch.all_reduce(want, config=settings())  # of equal inputs
    parts = torch.empty(2, 1 << 10, 1 << 10, device="cuda")
    cccl.torch.all_gather(parts, exact.t().contiguous(), config=settings())
    for _ in range(4):
        base, gathered = torch.full_like(exact, float("nan")), torch.zeros_like(parts)
        torch.cuda._sleep(20_000_000)
        base.copy_(exact)
        cccl.torch.all_gather(gathered, base.t(), config=settings())
        cccl.torch.all_reduce(base.t(), config=settings())
        assert torch.equal(gathered, parts)
        assert torch.equal(base.t(), want)


def test_a_staging_copy_waits_for_late_values(gpu_ranks):
    """F065"""
    gpu_ranks(2)(_staged_late)


def _same_memory():
    """Collectives of one tensor keep their order though nobody waits between them."""
    config = settings(chunk_size="64KiB")
    mine = gradient(dist.get_rank(), 1 << 19, torch.float32)
    want = mine.cuda()
    for _ in range(3):
        cccl.torch.all_reduce(want, "sum", config=config)
        torch.cuda.synchronize()
    x, y, z = (mine.cuda() for _ in range(3))
    torch.cuda.synchronize()
    for tensor in (x, y, z, x, x):
        cccl.torch.all_reduce(tensor, "sum", config=config, async_op=True)
    torch.cuda.synchronize()
    assert torch.equal(x, want)
    return digest(x.cpu())


def test_collectives_of_one_tensor_keep_their_order(gpu_ranks):
    assert_equal(gpu_ranks(2)(_same_memory))


def _lanes(lanes):
    """Ranks that have nothing to move in a step of a broadcast stay in step."""
    rank, found = dist.get_rank(), []
    group = dist.new_group()
    for window in (1, 2, 3):
        for root in range(dist.get_world_size()):
            for count in (100, 100_000):
                config = settings("cast_bf16", nccl_lanes=lanes, window=window, deadline=20.0)
                tensor = gradient(rank, count, torch.float32).cuda()
                cccl.torch.broadcast(tensor, root, group, config=config)
                want = gradient(root, count, torch.float32).bfloat16().float()
                assert torch.equal(tensor.cpu(), want), (window, root, count)
                cccl.torch.all_reduce(tensor, group=group, config=config)
                found.append(digest(tensor.cpu()))
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_and_windows_keep_ranks_in_step(gpu_ranks, lanes):
    assert_equal(gpu_ranks(3)(_lanes, lanes))


def test_results_are_ordered_with_the_callers_streams(gpu_ranks):
    """F063"""
    gpu_ranks(2)(_streams)


def _layouts():
    rank, config = dist.get_rank(), settings()
    mine = gradient(rank, (64, 48), torch.float32)
    cpu, gpu = mine.clone(), mine.cuda()
    for tensor in (cpu, gpu):
        cccl.torch.all_reduce(tensor.t(), config=config)
    assert digest(gpu.cpu()) == digest(cpu)
    base = torch.zeros(1001, device="cuda")  # an odd start
    base[1:] = gradient(rank, 1000, torch.float32).cuda()
    cccl.torch.all_reduce(base[1:], config=config)
    flat = gradient(rank, 1000, torch.float32)
    cccl.torch.all_reduce(flat, config=config)
    assert digest(base[1:].cpu()) == digest(flat)
    values = gradient(rank, 100, torch.complex64)
    cpu, gpu = values.clone(), values.cuda()
    for tensor in (cpu, gpu):
        cccl.torch.all_reduce(tensor, config=config)
    assert digest(gpu.cpu()) == digest(cpu)
    integers = torch.arange(10, device="cuda")
    cccl.torch.all_reduce(integers, "sum", config=cccl.Config())
    assert torch.equal(integers.cpu(), torch.arange(10) * dist.get_world_size())


def test_any_layout_and_dtype(gpu_ranks):
    """F027: and any start."""
    gpu_ranks(2)(_layouts)


def _subgroup():
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    tensor = gradient(rank, 5000, torch.float32).cuda()
    cccl.torch.all_reduce(tensor, group=group, config=settings())
    found = digest(tensor.cpu())
    dist.destroy_process_group(group)
    return found


def test_no_rank_outside_a_group_takes_part(gpu_ranks):
    found = gpu_ranks(3)(_subgroup)
    assert found[1] is None
    assert found[0] == found[2]


def _refused():
    config = settings()
    ours = torch.ones(8, device="cuda")
    with pytest.raises(cccl.UnsupportedError, match="same device"):
        cccl.torch.reduce_scatter(torch.ones(4), ours, config=config)
    with pytest.raises(cccl.ConfigError, match="nccl_lanes = 9; allowed: an integer from 1 to 8"):
        cccl.Config(nccl_lanes=9)
    count = 77_000 + dist.get_rank()
    with pytest.raises(cccl.MismatchError, match="rank 0 has 77000, rank 1 has 77001"):
        cccl.torch.all_reduce(torch.ones(count, device="cuda"), config=config)
    tensor = torch.ones(1000, device="cuda")
    cccl.torch.all_reduce(tensor, config=config)  # the group goes on
    return digest(tensor.cpu())


def test_bad_input_is_refused_and_the_group_goes_on(gpu_ranks):
    assert_equal(gpu_ranks(2)(_refused))


def _non_finite():
    rank = dist.get_rank()
    tensor = gradient(rank, 4096, torch.float32).cuda()
    if rank == 1:
        tensor[200] = float("inf")
    quiet = tensor.clone()
    cccl.torch.all_reduce(quiet, config=settings())
    assert quiet[128:256].isnan().all()
    assert quiet[:128].isfinite().all()
    torch.cuda.synchronize()
    with pytest.raises(cccl.NonFiniteError, match="first from rank 1"):
        cccl.torch.all_reduce(tensor, config=settings(non_finite="raise"))
    clean = gradient(rank, 4096, torch.float32).cuda()
    cccl.torch.all_reduce(clean, config=settings(non_finite="raise"))
    assert clean.isfinite().all()


def test_a_non_finite_value_surfaces(gpu_ranks):
    gpu_ranks(2)(_non_finite)


def _captured():
    rank, config = dist.get_rank(), settings(chunk_size="256KiB")
    inputs = [gradient(rank, 200_000, torch.float32, seed).cuda() for seed in range(3)]
    static, fresh = inputs[0].clone(), torch.ones(77, device="cuda")
    small = torch.full((100,), float(rank), device="cuda")
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(cccl.UnsupportedError, match="once before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        cccl.torch.all_reduce(fresh, config=config)
    for tensor in (static, small):
        cccl.torch.all_reduce(tensor.clone(), config=config)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cccl.torch.all_reduce(static, config=config)
        doubled = static * 2
        cccl.torch.all_reduce(small, config=config)
    for values in inputs:
        eager = values.clone()
        cccl.torch.all_reduce(eager, config=config)
        static.copy_(values)
        graph.replay()
        assert torch.equal(static, eager)
        assert torch.equal(doubled, 2 * eager)
    assert small.unique().numel() == 1
    found = digest(static.cpu())
    del graph
    gc.collect()
    return found


def test_a_cuda_graph_replays_a_collective(gpu_ranks):
    """F060, F067: and says before the first use what it needs."""
    assert_equal(gpu_ranks(2)(_captured))


def _rounded_anew():
    config = settings("block_float4", rounding="stochastic")
    values = gradient(dist.get_rank(), 1 << 14, torch.float32).cuda()
    mean = values.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    static = values.clone()
    cccl.torch.all_reduce(values.clone(), config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cccl.torch.all_reduce(static, config=config)
    found = []
    for _ in range(64):
        static.copy_(values)
        graph.replay()
        found.append(static.clone())
    assert not torch.equal(found[0], found[1])
    error = [(sum(found[:n]) / n - mean).norm().item() for n in (1, 64)]
    assert error[1] < error[0] / 4  # of independent errors a mean has an eighth
    return digest(torch.stack(found).cpu())


def test_a_cuda_graph_rounds_anew_at_every_replay(gpu_ranks):
    assert_equal(gpu_ranks(2)(_rounded_anew))


def _counted():
    cccl.reset_stats()
    for _ in range(40):
        tensor = gradient(dist.get_rank(), 1 << 20, torch.float32).cuda()
        cccl.torch.all_reduce(tensor, config=settings(), label="counted")
    work = cccl.torch.all_reduce(tensor, config=settings(), async_op=True, label="last")
    work.wait(30.0)  # the host: all that came before is counted
    rows = {row["label"]: row for row in cccl.stats()["rows"]}
    row = rows["counted"]
    assert row["calls"] == 40
    assert row["failures"] == 0
    assert 3.5 < row["ratio"] < 4
    assert 1e-4 < row["relative_error"] < 2e-2
    for name in ("encode", "reduce", "decode", "exposed"):
        assert 0 < row[f"{name}_seconds"] < row["total_seconds"]
    return cccl.stats()["total"]["pool_bytes"]


def test_statistics_say_what_was_done(gpu_ranks):
    """Promise 7; and 9: memory is flat."""
    pool = gpu_ranks(2)
    first = pool(_counted)
    assert pool(_counted) == first
    assert 0 < first[0] < 64 << 20


def _scaled():
    """Of two PREMUL_SUMs, which are equal to each other, each has its own factor."""
    none = cccl.Config(compression_type="none")
    for factor in (0.5, 0.5, 0.25, 2.0):
        tensor = torch.full((1000,), 4.0, device="cuda")
        op = dist._make_nccl_premul_sum(factor)
        cccl.torch.all_reduce(tensor, op, config=none)
        assert (tensor == 4.0 * factor * dist.get_world_size()).all()


def test_a_factor_of_the_backends_own_goes_along(gpu_ranks):
    gpu_ranks(2)(_scaled)
