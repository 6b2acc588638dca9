"""Codecs chosen within a share of the gradients' noise, and what collectives measure of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_ranks import Ranks

import cccl
from cccl import Config, _core, _history
from cccl._budget import (
    Budget,
    Measured,
    Noise,
    Sample,
    bits_of,
    bits_of_ways,
    lost,
    measure,
    within_noise,
)
from cccl._by_parameter import Way

SHARE = {"compression_type": "block_float8", "max_noise_share": 0.1}
KEY = (0, "weight", 10**6)
WIDEST = Way("block_float8")


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def sample(relative: float, ranks: int = 4, seed: int = 0) -> Sample:
    """Whose noise is so large, relative to the mean's square."""
    return Sample(10**6, normal(20_000, seed), Noise(relative * ranks, 1.0, 0.0, ranks))


def chosen(relative: float, ranks: int = 4, **more: object) -> tuple[Way, Measured, Config]:
    config = Config(**SHARE | more)
    budget = Budget()
    assert budget.begin({}, 0, config)
    budget.begin({KEY: sample(relative, ranks)}, 1, config)
    way = budget.choice(KEY)
    codecs = {name: config.codec(name) for name in bits_of(config)}
    found = measure(sample(relative, ranks), codecs, config.compression_type)
    assert way is not None and found is not None
    return way, found, config


@settings(max_examples=40, deadline=None)
@given(
    relative=st.floats(-9, 1).map(lambda power: 10.0**power),
    ranks=st.integers(2, 64),
    share=st.floats(0.01, 1),
)
def test_the_fewest_bits_within_the_share_are_taken(relative, ranks, share):
    """And of ways of as many bits the most exact; the widest where none is within it."""
    way, found, config = chosen(relative, ranks, max_noise_share=share)
    bits = bits_of_ways(config)
    limit = share * relative * (1 + 1e-9)
    within = {one for one in bits if lost(found, one) <= limit}
    if not within:
        assert way == WIDEST
        return
    assert way in within
    assert bits[way] == min(bits[one] for one in within)
    assert lost(found, way) == min(lost(found, one) for one in within if bits[one] == bits[way])


@given(
    errors=st.lists(st.floats(1e-6, 0.5), min_size=4, max_size=4, unique=True),
    relative=st.floats(1e-6, 10),
    ranks=st.integers(2, 100),
    shares=st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)),
)
def test_a_larger_share_never_takes_more_bits(errors, relative, ranks, shares):
    names = [f"codec {i}" for i in range(4)]
    by_name = dict(zip(names, sorted(errors, reverse=True), strict=True))
    found = Measured(1000, 1.0, by_name, Noise(relative * ranks, 1.0, 0.0, ranks))
    bits = {Way(a, b): float(names.index(a) + names.index(b)) for a in names for b in names}
    small, large = (bits[within_noise(found, share, bits)] for share in sorted(shares))
    assert large <= small


def test_much_noise_takes_few_bits_and_little_takes_many():
    ways = [chosen(relative)[0] for relative in (10.0, 0.5, 0.05, 0.005, 1e-4, 1e-8)]
    bits = [bits_of_ways(Config(**SHARE))[way] for way in ways]
    assert ways[0] == Way("block_float3")
    assert ways[-1] == WIDEST
    assert bits == sorted(bits) and len({*bits}) >= 5


def test_legs_may_differ():
    """With many ranks and little noise, what the first leg loses is averaged, and the second's is
    not."""
    way, found, _ = chosen(0.02, 64)
    assert way.result_type is not None and way.result_type != way.compression_type
    assert found.errors[way.compression_type] > found.errors[way.result_type]


@pytest.mark.parametrize("noise", [None, Noise(0.0, 1.0, 0.0, 4), Noise(1.0, 0.0, 1.0, 4)])
def test_without_noise_the_widest_is_taken(noise):
    config, budget = Config(**SHARE), Budget()
    budget.begin({}, 0, config)
    budget.begin({KEY: Sample(1000, normal(1000), noise)}, 1, config)
    assert budget.choice(KEY) == WIDEST


def test_noise_that_is_not_finite_tells_nothing():
    config, budget = Config(**SHARE), Budget()
    budget.begin({}, 0, config)
    budget.begin({KEY: sample(0.5)}, 1, config)
    known = budget.choice(KEY)
    assert known not in (None, WIDEST)
    nan = Noise(math.nan, math.nan, 0.0, 4)
    budget.begin({KEY: Sample(10**6, normal(1000), nan)}, 2, config)
    assert budget.choice(KEY) == known


def test_what_the_model_expects_is_what_two_legs_lose():
    """Of values of ranks that differ, through both codecs."""
    rng, ranks, count = np.random.default_rng(5), 4, 30_000
    values = rng.standard_normal(count) + 2 * rng.standard_normal((ranks, count))
    mean = values.mean(axis=0)
    noise = Noise(float(values.var(axis=0, ddof=1).mean()), float(np.mean(mean**2)), 0.0, ranks)
    codecs = {name: Config().codec(name) for name in ("block_float3", "block_float4")}
    found = measure(Sample(count, mean.astype(np.float32), noise), codecs)
    assert found is not None
    for first, second in (("block_float3", "block_float4"), ("block_float4", "block_float3")):
        coders = cccl.codec(first), cccl.codec(second)
        sent = np.mean(
            [coders[0].decode(coders[0].encode(v.astype(np.float32))) for v in values], axis=0
        )
        result = coders[1].decode(coders[1].encode(sent.astype(np.float32)))
        expected = np.mean((result - mean) ** 2) / np.mean(mean**2)
        assert lost(found, Way(first, second)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["block_float8", "block_float5", "cast_bf16"])
@pytest.mark.parametrize("narrow", ["block_float2", "block_float3", "block_float4"])
def test_what_a_codec_loses_is_seen_in_values_that_it_made(name, narrow):
    """Which it would make again without a loss."""
    config = Config(compression_type=name, adaptive_codecs=(narrow,), target_bits=3.0)
    codecs, coder = {n: config.codec(n) for n in bits_of(config)}, cccl.codec(name)
    for exact in (normal(16_384, 1), normal(16_384, 1) ** 3):
        expected = measure(Sample(1, exact), codecs).errors[name]
        made = coder.decode(coder.encode(exact))
        found = measure(Sample(1, made), codecs, name).errors[name]
        assert math.sqrt(found) == pytest.approx(math.sqrt(expected), rel=0.25)
        assert measure(Sample(1, made), codecs).errors[name] < expected / 4


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("settings", [{}, {"chunk_bytes": 4096 * 32}, {"algorithm": "one_shot"}])
def test_all_ranks_read_the_same_noise(world, dtype, settings):
    """That of the values, and results are as without."""
    rng = np.random.default_rng(world)
    arrays = [(0.3 + rng.standard_normal(100_000)).astype(dtype) for _ in range(world)]
    codec = _core.make_codec("block_float8", {})
    with Ranks(world) as ranks:
        plain = ranks.all_reduce(arrays, dtype, codec, **settings)
        copies = [array.copy() for array in arrays]
        works = [
            ranks.submit(
                r, "all_reduce", copies[r], copies[r], dtype, codec, measure_noise=True, **settings
            )
            for r in range(world)
        ]
        assert all(work.wait(60.0) for work in works)
    found = {work.noise for work in works}
    assert len(found) == 1
    ((variance, square, zeros),) = found
    values = np.array(arrays, np.float64)
    assert variance == pytest.approx(values.var(axis=0, ddof=1).mean(), rel=0.05)
    assert square == pytest.approx((values.mean(axis=0) ** 2).mean(), rel=0.05)
    assert zeros < 0.01
    assert {out.tobytes() for out in copies} == {plain[0].tobytes()}


def test_what_was_not_asked_for_is_not_measured():
    codec, array = _core.make_codec("block_float8", {}), normal(5000)
    cccl.reset_stats()
    with Ranks(2) as ranks:
        copies = [array.copy() for _ in range(2)]
        works = [
            ranks.submit(r, "all_reduce", copies[r], copies[r], "float32", codec) for r in (0, 1)
        ]
        assert all(work.wait(60.0) for work in works)
    assert [work.noise for work in works] == [None, None]
    (row,) = cccl.stats()["rows"]
    assert (row["relative_noise"], row["zeros"]) == (0.0, 0.0)


def test_statistics_show_it():
    codec = _core.make_codec("block_float8", {})
    arrays = [normal(50_000, seed) for seed in range(4)]
    for array in arrays:
        array[::2] = 0
    cccl.reset_stats()
    with Ranks(4) as ranks:
        for _ in range(3):
            ranks.all_reduce(arrays, "float32", codec, measure_noise=True)
    (row,) = cccl.stats()["rows"]
    assert row["relative_noise"] == pytest.approx(1.0, rel=0.1), "the mean is all noise"
    assert row["zeros"] == pytest.approx(0.5, abs=0.01)
    assert "noise" in cccl.report().splitlines()[0]


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather", "broadcast"])
def test_other_collectives_refuse(collective):
    codec, array = _core.make_codec("block_float8", {}), normal(1000)
    with Ranks(2) as ranks, pytest.raises(cccl.ConfigError, match=f"not in {collective}"):
        ranks.submit(0, collective, array, array, "float32", codec, measure_noise=True)


def test_a_codec_that_cannot_measure_says_so():
    codec, array = _core.make_codec("sparse", {}), normal(1000)
    with Ranks(2) as ranks:
        copies = [array.copy() for _ in range(2)]
        works = [
            ranks.submit(
                r, "all_reduce", copies[r], copies[r], "float32", codec, measure_noise=True
            )
            for r in (0, 1)
        ]
        with pytest.raises(cccl.UnsupportedError, match="block_float8"):
            works[0].wait(60.0)
        assert works[0].noise is None


def test_ranks_that_differ_in_measuring_are_told():
    codec, array = _core.make_codec("block_float8", {}), normal(100_000)
    with Ranks(2) as ranks:
        copies = [array.copy() for _ in range(2)]
        works = [
            ranks.submit(
                r, "all_reduce", copies[r], copies[r], "float32", codec, measure_noise=r == 1
            )
            for r in (0, 1)
        ]
        for work in works:
            with pytest.raises(cccl.MismatchError, match="measures noise"):
                work.wait(60.0)


def test_the_history_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="draws")
    config, budget = Config(**SHARE, measure_every=4), Budget()
    due = {}
    for step in range(40):
        measures = budget.begin(due, step, config)
        due = {KEY: sample(10.0 ** -(step / 6)), (1, "bias", 10): sample(1.0)} if measures else {}
    history = [*budget.history]
    assert {chosen.bucket for chosen in history} == {0, 1}
    bits = [chosen.bits for chosen in history if chosen.bucket == 0]
    assert bits == sorted(bits) and bits[0] < bits[-1]
    assert all(one.error**2 <= 0.1 * one.noise**2 for one in history if one.way != WIDEST)
    for steps in (history, []):
        picture = tmp_path / "history.png"
        _history.draw(picture, steps, 40)
        assert picture.read_bytes()[:4] == b"\x89PNG"


def test_it_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("CCCL_MAX_NOISE_SHARE", "0.25")
    assert Config.load(None).max_noise_share == 0.25
