"""Codecs chosen within a budget of error or of bits, without ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cccl
from cccl import Config
from cccl._budget import (
    Budget,
    Measured,
    Sample,
    bits_of,
    measure,
    pieces_of,
    within_bits,
    within_error,
)
from cccl._by_parameter import Way

BUCKETS = [(0, "first", 10**6), (1, "second", 10**6), (2, "third", 10**6)]
ADAPTIVE = {"compression_type": "block_float8", "max_relative_error": 0.05}


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def codecs_of(config: Config) -> dict:
    return {name: config.codec(name) for name in bits_of(config)}


@given(st.integers(0, 1 << 31))
def test_pieces_lie_in_the_values_and_begin_at_blocks(count):
    pieces, size, stride = pieces_of(count)
    assert (pieces - 1) * stride + size <= count
    assert pieces * size == min(count, 1 << 14)
    assert pieces == 1 or (stride >= size and stride % 1024 == 0)


@pytest.mark.parametrize("name", ["block_float3", "block_float4", "block_float6", "block_float8"])
def test_what_is_measured_is_the_norm_of_the_error_over_that_of_the_values(name):
    values = normal(5000)
    found = measure(Sample(5000, values), codecs_of(Config(**ADAPTIVE)))
    codec = cccl.codec(name)
    lost = codec.decode(codec.encode(values)).astype(np.float64) - values
    expected = np.linalg.norm(lost) / np.linalg.norm(values.astype(np.float64))
    assert math.sqrt(found.errors[name]) == pytest.approx(expected, rel=1e-9)
    assert found.square == pytest.approx(np.mean(values.astype(np.float64) ** 2), rel=1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_not_finite_tells_nothing(value):
    values = normal(3000)
    values[2999] = value
    assert measure(Sample(3000, values), codecs_of(Config(**ADAPTIVE))) is None


def test_zeros_tell_nothing():
    values = np.zeros(100, np.float32)
    assert measure(Sample(100, values), codecs_of(Config(**ADAPTIVE))) is None


def test_codecs_are_in_the_order_of_their_bits():
    names = ("block_float6", "block_float8", "block_float2")
    config = Config(**ADAPTIVE | {"compression_type": "cast_bf16", "adaptive_codecs": names})
    assert [*bits_of(config)] == ["block_float2", "block_float6", "block_float8", "cast_bf16"]


@given(
    st.lists(st.floats(1e-9, 0.9), min_size=1, max_size=6),
    st.floats(1e-4, 0.99),
)
def test_the_narrowest_codec_within_the_error_is_taken(errors, limit):
    found = Measured(1000, 1.0, {f"codec {i}": error for i, error in enumerate(errors)})
    taken = within_error(found, limit)
    fits = [name for name, error in found.errors.items() if math.sqrt(error) <= limit]
    assert taken == (fits[0] if fits else f"codec {len(errors) - 1}")


BITS = {"a": 2.0, "b": 3.0, "c": 4.5, "d": 8.0}


@given(
    st.dictionaries(
        st.integers(0, 20),
        st.tuples(
            st.integers(1, 10**6), st.floats(1e-12, 1e6),
            st.lists(st.floats(1e-6, 0.5), min_size=4, max_size=4),
        ),
        min_size=1, max_size=6,
    ),
    st.floats(1.0, 9.0),
)  # fmt: skip
def test_bits_go_where_they_take_most_of_the_error_and_no_further(buckets, target):
    found = {
        key: Measured(count, square, dict(zip(BITS, sorted(errors, reverse=True), strict=True)))
        for key, (count, square, errors) in buckets.items()
    }
    chosen = within_bits(found, BITS, target)
    assert [*chosen] == [*found]
    total = sum(one.total for one in found.values())
    spent = sum(found[key].total * BITS[name] for key, name in chosen.items())
    if target < BITS["a"]:
        assert {*chosen.values()} == {"a"}
        return
    assert spent <= target * total * (1 + 1e-9)
    left = target * total - spent
    for key, name in chosen.items():
        for other, bits in BITS.items():
            cost = found[key].total * (bits - BITS[name])
            better = found[key].errors[other] < found[key].errors[name]
            assert not (better and 0 < cost < left * (1 - 1e-9)), "it could be more exact"


def test_bits_are_spent_on_what_is_large():
    errors = {"a": 0.1, "b": 0.03, "c": 0.01, "d": 1e-5}
    found = {"large": Measured(1000, 100.0, errors), "small": Measured(1000, 0.01, errors)}
    assert within_bits(found, BITS, 5.0) == {"large": "d", "small": "a"}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 99), st.sampled_from([1.0, 1e-20, math.nan, math.inf, 0.0])),
        min_size=1, max_size=40,
    ),
    st.sampled_from(
        [{"max_relative_error": 0.02}, {"max_relative_error": 0.2}, {"target_bits": 5}]
    ),
)  # fmt: skip
def test_ranks_that_hold_the_same_values_decide_alike(steps, budget):
    """Each with a configuration of its own; whatever values are not finite, and from what step."""
    configs = [Config(compression_type="block_float8", measure_every=4, **budget) for _ in range(2)]
    ranks = [Budget() for _ in configs]
    samples: list[dict] = [{}, {}]
    for step, (seed, scale) in enumerate(steps):
        decided = []
        for rank, config in enumerate(configs):
            due = ranks[rank].begin(samples[rank], step, config)
            choices = [None if due else ranks[rank].choice(key) for key in BUCKETS]
            decided.append((due, choices))
            samples[rank] = {}
            for bucket in range(3) if due else ():
                values = normal(1500, seed + bucket)
                values[: 500 * bucket] *= np.float32(scale)
                samples[rank][BUCKETS[bucket]] = Sample(10**6, values)
        assert decided[0] == decided[1]
        assert {way for way in decided[0][1] if way} <= {Way(name) for name in bits_of(configs[0])}


def test_what_was_known_stays_where_a_measurement_tells_nothing():
    budget, config = Budget(), Config(**ADAPTIVE, measure_every=4)
    assert budget.begin({}, 7, config), "the first step is measured"
    assert budget.choice(BUCKETS[0]) is None
    assert budget.begin({BUCKETS[0]: Sample(5000, normal(5000))}, 8, config)
    known = budget.choice(BUCKETS[0])
    assert known in (Way("block_float5"), Way("block_float6"))
    assert budget.begin({BUCKETS[0]: Sample(5000, np.full(5000, np.nan))}, 9, config)
    assert budget.choice(BUCKETS[0]) == known
    assert not budget.begin({}, 10, config), "the third is not"
    assert budget.begin({}, 11, config), "but every fourth"
    assert budget.choice(BUCKETS[0]) == known


def test_it_waits_for_start_step():
    budget, config = Budget(), Config(**ADAPTIVE, start_step=5, measure_every=100)
    measured = [step for step in range(240) if budget.begin({}, step, config)]
    assert measured == [5, 6, 7, 9, 13, 21, 37, 69, 105, 205]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"max_relative_error": 0}, "max_relative_error = 0"),
        ({"max_relative_error": 1.0}, "max_relative_error = 1.0"),
        ({"target_bits": -1}, "target_bits = -1"),
        ({"adaptive_codecs": []}, "adaptive_codecs = ()"),
        ({"adaptive_codecs": ["block_float44"]}, "adaptive_codecs = ('block_float44',)"),
        ({"measure_every": 1}, "measure_every = 1"),
        ({"max_relative_error": 0.1, "target_bits": 4}, "allowed is one of them"),
        ({"max_noise_share": 0.1, "target_bits": 4}, "allowed is one of them"),
        ({"max_noise_share": 0.1, "max_relative_error": 0.1}, "allowed is one of them"),
        ({"max_noise_share": 0}, "max_noise_share = 0"),
        ({"max_noise_share": 1.5}, "max_noise_share = 1.5"),
        ({"max_noise_share": 0.1, "compression_type": "none"}, "max_noise_share needs a codec"),
        ({"max_noise_share": 0.1, "schedule": [[5, "block_float4"]]}, "beside schedule"),
        ({"max_noise_share": 0.1, "result_type": "cast_bf16"}, "beside result_type = 'cast_bf16'"),
        ({"max_noise_share": 0.1, "hierarchy": 2}, "max_noise_share beside hierarchy = 2"),
        ({"max_noise_share": 0.1, "compression_type": "sparse"}, "cannot choose 'sparse'"),
        ({"max_relative_error": 0.1, "compression_type": "none"}, "needs a codec named"),
        ({"target_bits": 4, "compression_type": "auto"}, "target_bits needs a codec named"),
        ({"target_bits": 4, "schedule": [[5, "block_float4"]]}, "target_bits beside schedule"),
        ({"target_bits": 4, "adaptive_codecs": ["sparse"]}, "cannot choose 'sparse'"),
        ({"target_bits": 4, "compression_type": "identity"}, "cannot choose 'identity'"),
        ({"target_bits": 4, "compression_type": "block_float5"}, "'block_float6' takes more bits"),
        ({"max_relative_error": 0.1, "adaptive_codecs": ["diff"]}, "cannot choose 'diff'"),
    ],
)
def test_what_cannot_be_kept_is_refused(wrong, said):
    with pytest.raises(cccl.ConfigError) as caught:
        Config(**wrong)
    assert said in str(caught.value)


def test_they_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("CCCL_MAX_RELATIVE_ERROR", "0.05")
    monkeypatch.setenv("CCCL_ADAPTIVE_CODECS", "block_float2, block_float4")
    monkeypatch.setenv("CCCL_MEASURE_EVERY", "64")
    config = Config.load(None)
    assert (config.max_relative_error, config.measure_every) == (0.05, 64)
    assert config.adaptive_codecs == ("block_float2", "block_float4")
