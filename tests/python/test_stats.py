"""The library says what it did: bytes, ratios, codecs and errors are there to read."""

from __future__ import annotations

import numpy as np
import pytest
from conformance.codec_cases import Case
from loopback_ranks import Ranks, all_reduce

import cccl
from cccl._stats import plain_bytes

MILLION = 1_000_000


def _run(world: int, count: int, name: str, **settings) -> dict:
    arrays = [np.random.default_rng(r).standard_normal(count).astype(np.float32)
              for r in range(world)]  # fmt: skip
    all_reduce(world, arrays, "float32", Case(name, {}).core, **settings)
    return cccl.stats()


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("block_float8", 32 / 8.125), ("block_float4", 32 / 4.125), ("cast_bf16", 2), ("identity", 1)],
)
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_the_bytes_on_the_wire_are_the_codecs_ratio(name, ratio, world):
    """F020: within 1 %, headers included; the ratio is computed from bytes really sent."""
    total = _run(world, MILLION, name)["total"]
    assert total["ratio"] == pytest.approx(ratio, rel=0.01)
    assert total["bytes_sent"] == total["bytes_received"]
    assert total["plain_calls"] == 0


def test_bytes_per_rank_do_not_grow_with_the_world():
    """F107: at most twice the payload."""
    payload = cccl.codec("block_float8").encode(np.zeros(MILLION, np.float32)).nbytes
    for world in (2, 3, 5, 8):
        cccl.reset_stats()
        sent = _run(world, MILLION, "block_float8")["total"]["bytes_sent"] / world
        assert sent <= 2 * payload
        assert sent == pytest.approx(2 * (world - 1) / world * payload, rel=0.01)


def test_a_row_tells_label_codec_algorithm_and_error():
    """F081"""
    _run(2, 1000, "block_float8", label="small")
    _run(2, MILLION, "block_float4", label="large")
    rows = {row["label"]: row for row in cccl.stats()["rows"]}
    small, large = rows["small"], rows["large"]
    assert small["codec"].startswith("block_float8(block_size=128")
    assert (small["algorithm"], large["algorithm"]) == ("one_shot", "two_shot")
    assert small["calls"] == 2, "one for each rank of this process"
    assert (small["dtype"], small["world_size"], small["failures"]) == ("float32", 2, 0)
    assert 0 < small["relative_error"] < 0.01 < large["relative_error"] < 0.2
    for key in ("encode_seconds", "reduce_seconds", "decode_seconds", "latency_seconds"):
        assert large[key] > 0
    assert large["exposed_seconds"] <= large["total_seconds"]


def test_the_error_metric_rises_with_the_strength():
    """F012: the relative error of what was sent."""
    errors = []
    for name in ("identity", "cast_fp16", "cast_bf16", "block_float8", "block_float4"):
        cccl.reset_stats()
        errors.append(_run(2, 50_000, name)["rows"][0]["relative_error"])
    assert errors[0] == 0
    assert errors == sorted(errors)
    assert len(set(errors)) == len(errors)


def test_the_report_is_a_table_for_people():
    """F081"""
    _run(2, 10_000, "block_float8", label="bucket 3")
    text = cccl.report()
    assert "bucket 3" in text and "block_float8" in text
    assert "total: 2 collectives (0 plain)" in text


def test_settings_without_effect_are_said_to_have_none():
    """F081: no pretending."""
    try:
        cccl.configure({"sparsity_threshold": 0.7, "top_k": 0.1, "attach_ddp": False})
        assert "sparsity_threshold has no effect" in cccl.report()
        assert "top_k has no effect" in cccl.report()
        cccl.configure(
            {"compression_type": "sparse", "sparsity_threshold": 0.7, "attach_ddp": False}
        )
        assert "no effect" not in cccl.report()
    finally:
        cccl.configure(cccl.Config(attach_ddp=False))
    assert "sparsity_threshold" not in cccl.report()


def test_a_reset_starts_anew():
    _run(2, 1000, "block_float8")
    cccl.reset_stats()
    assert cccl.stats()["rows"] == []
    assert cccl.stats()["total"]["calls"] == 0
    assert cccl.stats()["total"]["ratio"] == 1.0
    assert "0 collectives" in cccl.report()


def test_failures_and_non_finite_values_are_counted():
    core = Case("block_float8", {}).core
    arrays = [np.ones(100, np.float32), np.full(100, np.nan, np.float32)]
    all_reduce(2, arrays, "float32", core, label="nan")
    with Ranks(2, deadline=5.0) as ranks:
        works = [
            ranks.submit(r, "all_reduce", a, a, "float32", core, average=bool(r), label="differs")
            for r, a in enumerate(arrays)
        ]
        for work in works:
            with pytest.raises(cccl.MismatchError):
                work.wait(20.0)
    rows = {row["label"]: row for row in cccl.stats()["rows"]}
    assert rows["nan"]["non_finite"] and rows["nan"]["failures"] == 0
    assert rows["differs"]["failures"] == 2


def test_memory_in_flight_is_reported_and_bounded():
    """F055, F056: by chunks in flight, not by the tensor; flat over calls."""
    core = Case("block_float8", {}).core
    with Ranks(2) as ranks:
        pools = []
        for count in (MILLION, 8 * MILLION, MILLION, 8 * MILLION):
            arrays = [np.ones(count, np.float32)] * 2
            ranks.all_reduce(arrays, "float32", core, chunk_bytes=1 << 20)
            pools.append(cccl.stats()["total"]["pool_bytes"])
    assert len(set(pools[1:])) == 1
    # Per rank: chunks in flight x (outgoing + contributions + results), encoded.
    assert 0 < pools[-1] < 2 * 8 * 3 * (1 << 20)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 3), ("broadcast", 1)],
)
def test_the_plain_baseline_is_that_of_a_ring(collective, factor):
    assert plain_bytes(collective, 4000, 4) == 4000 * factor
    assert plain_bytes(collective, 4000, 1) == 0
