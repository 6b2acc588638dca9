"""Collectives on tensors: right within the stated bound, and the same bits on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import EVERYTHING, allowed, assert_equal, check, digest, gradient, rows_of

import cccl
import cccl.torch

WORLDS = (1, 2, 3, 5)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COUNTS = (0, 1, 2, 3, 7, 129, 2305, 65537)
CODECS = (
    ("block_float8", {}),
    ("block_float4", {}),
    ("block_float4", {"level": "best", "block_size": 32}),
    ("block_float8", {"rounding": "stochastic"}),
    ("cast_fp16", {}),
    ("cast_bf16", {}),
)

each_world = pytest.mark.parametrize("world", WORLDS)
each_codec = pytest.mark.parametrize(("codec", "options"), CODECS, ids=str)


def settings(codec: str, options: dict, **more) -> cccl.Config:
    return cccl.Config(compression_type=codec, collective_filter=EVERYTHING, **options, **more)


def _all_reduce(codec, options):
    config, world, found = settings(codec, options), dist.get_world_size(), []
    for dtype in FLOATS:
        for count in COUNTS:
            parts = [gradient(r, count, dtype) for r in range(world)]
            mean = sum(p.double() for p in parts) / world
            bound = allowed(codec, parts, **options)
            for op, factor in (("avg", 1), ("sum", world)):
                mine = parts[dist.get_rank()].clone()
                assert cccl.torch.all_reduce(mine, op, config=config) is None
                # What the mean may be off by, the sum may be off by as often as there are ranks.
                check(mine, mean * factor, bound * factor, f"{dtype} x {count} {op}")
                assert mine.dtype is dtype
                found.append(digest(mine))
        assert all(row["plain"] == (world == 1) for row in rows_of("all_reduce", dtype))
    return found


@each_codec
@each_world
def test_all_reduce_is_within_the_bound_and_bitwise_equal(ranks, world, codec, options):
    """F006, F023, F024, F025, F030, F034: odd counts on odd worlds, no silent fallback."""
    assert_equal(ranks(world)(_all_reduce, codec, options))


def _reduce_scatter_and_gather(codec, options):
    config, world, rank = settings(codec, options), dist.get_world_size(), dist.get_rank()
    coder, gathered = cccl.codec(codec, **options), []
    for dtype in FLOATS:
        for count in (0, 1, 7, 129, 2305):
            wholes = [gradient(r, count * world, dtype) for r in range(world)]
            mine = torch.empty(count, dtype=dtype)
            cccl.torch.reduce_scatter(mine, wholes[rank].clone(), config=config)
            parts = [w[rank * count : (rank + 1) * count] for w in wholes]
            exact = sum(p.double() for p in parts) / world
            check(mine, exact, allowed(codec, parts, **options), f"scatter {dtype} x {count}")

            parts = [gradient(r, count, dtype) for r in range(world)]
            whole = torch.empty(world * count, dtype=dtype)
            cccl.torch.all_gather(whole, parts[rank].clone(), config=config)
            bound = [torch.from_numpy(coder.error_bound(p)) for p in parts]
            check(whole, torch.cat(parts).double(), torch.cat(bound), f"gather {dtype} x {count}")
            gathered.append(digest(whole))
    return gathered


@each_codec
@each_world
def test_reduce_scatter_and_all_gather_are_within_the_bound(ranks, world, codec, options):
    """F006, F024, F030"""
    assert_equal(ranks(world)(_reduce_scatter_and_gather, codec, options))


def _broadcast(codec, options):
    config, world, rank, found = (
        settings(codec, options),
        dist.get_world_size(),
        dist.get_rank(),
        [],
    )
    for dtype in FLOATS:
        for count in (0, 1, 129, 2305):
            for source in {0, world - 1}:
                sent = gradient(source, count, dtype)
                mine = gradient(rank, count, dtype)
                cccl.torch.broadcast(mine, source, config=config)
                bound = torch.from_numpy(cccl.codec(codec, **options).error_bound(sent))
                check(mine, sent.double(), bound, f"broadcast {dtype} x {count}")
                found.append(digest(mine))
    return found


@each_codec
@each_world
def test_broadcast_gives_every_rank_the_decoded_values(ranks, world, codec, options):
    """F006: the source too."""
    assert_equal(ranks(world)(_broadcast, codec, options))


def _weights_go_plain():
    cccl.configure({"compression_type": "block_float4", "attach_ddp": False, "strict": True})
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = [gradient(r, 100, torch.float32) for r in range(world)]
    whole, first = torch.empty(100 * world), parts[rank].clone()
    cccl.torch.all_gather(whole, parts[rank])
    cccl.torch.broadcast(first, 0)
    assert digest(whole) == digest(torch.cat(parts))
    assert digest(first) == digest(parts[0])
    assert rows_of("broadcast", torch.float32)[0]["reason"] == "not in collective_filter"
    assert cccl.stats()["total"]["plain_calls"] == 2


def test_broadcast_and_all_gather_lose_no_bit_unless_asked(ranks):
    """F081: and are counted as plain."""
    ranks(2)(_weights_go_plain)


def _one_rank():
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    for op in ("avg", "sum"):
        for dtype in FLOATS:
            tensor = bits.view(dtype).clone()
            cccl.torch.all_reduce(tensor, op, config=settings("block_float4", {}))
            assert torch.equal(tensor.view(torch.int32), bits), f"{op} {dtype}"
    assert cccl.stats()["total"]["bytes_sent"] == 0


def test_a_world_of_one_changes_no_bit(ranks):
    """F097: NaN payloads and denormals too."""
    ranks(1)(_one_rank)


def _large_means(codec, options):
    world, found = dist.get_world_size(), []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensor = torch.full((5000,), 20000.0).to(dtype)
        bound = allowed(codec, [tensor] * world, **options)
        for algorithm in ("one_shot", "two_shot"):
            for window in (1, 4):
                mine = tensor.clone()
                config = settings(
                    codec, options, algorithm=algorithm, window=window, chunk_size=4096
                )
                cccl.torch.all_reduce(mine, config=config)
                check(mine, tensor.double(), bound, f"{codec} {dtype} {algorithm}")
                found.append(digest(mine))
    total = torch.full((500,), 20000.0, dtype=torch.float16)
    cccl.torch.all_reduce(total, "sum", config=settings(codec, options))
    assert not total.isfinite().any(), "80000 is beyond fp16"
    return [*found, digest(total)]


@each_codec
def test_the_mean_of_large_values_is_finite_though_their_sum_is_not(ranks, codec, options):
    """F001: four ranks; eight are tested over loopback."""
    assert_equal(ranks(4)(_large_means, codec, options))


def _tiny_terms():
    value = 1.0 if dist.get_rank() == 0 else 2.0**-9
    tensor = torch.full((300,), value, dtype=torch.bfloat16)
    cccl.torch.all_reduce(tensor, "sum", config=settings("cast_fp16", {}))
    exact = torch.tensor(1 + (dist.get_world_size() - 1) * 2.0**-9).to(torch.bfloat16)
    assert (tensor == exact).all()


@pytest.mark.parametrize("world", [2, 4])
def test_bfloat16_is_summed_in_fp32_and_rounded_once(ranks, world):
    """F014"""
    ranks(world)(_tiny_terms)


def _legs():
    config = cccl.Config(compression_type="block_float4", result_type="cast_bf16")
    parts = [gradient(r, 10007, torch.float32) for r in range(3)]
    mine = parts[dist.get_rank()].clone()
    cccl.torch.all_reduce(mine, config=config)
    assert "->" in rows_of("all_reduce", torch.float32)[0]["codec"]
    exact = sum(p.double() for p in parts) / 3
    bound = sum(torch.from_numpy(cccl.codec("block_float4").error_bound(p)) for p in parts) / 3
    check(mine, exact, bound + (exact.abs() + bound) * 2.0**-7, "4 bits, then bf16")
    return digest(mine)


def test_each_leg_has_its_own_codec(ranks):
    """F112"""
    assert_equal(ranks(3)(_legs))


def _seeded(seed):
    config = settings("block_float4", {"rounding": "stochastic"}, seed=seed)
    mine = gradient(dist.get_rank(), 5000, torch.float32)
    group = dist.new_group()  # a communicator of its own: calls are counted from 0
    cccl.torch.all_reduce(mine, group=group, config=config)
    dist.destroy_process_group(group)
    return digest(mine)


def test_stochastic_rounding_is_reproducible_by_its_seed(ranks):
    """F017"""
    pool = ranks(2)
    first = pool(_seeded, 1)
    assert_equal(first)
    assert pool(_seeded, 1) == first
    assert pool(_seeded, 2) != first
