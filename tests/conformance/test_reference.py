"""The core's bytes and sums equal those of an independent model of the formats."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from codec_cases import (
    CASES,
    CASES_BY_DTYPE,
    DTYPES,
    Case,
    decode,
    encode,
    narrow,
    reduce,
    reduce_encode,
    widen,
)
from hypothesis import given
from hypothesis import strategies as st
from inputs import finite_values, make

each_codec_and_dtype = pytest.mark.parametrize(("case", "dtype"), CASES_BY_DTYPE, ids=str)
seeds = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**40) | st.integers(
    2**32 - 3000, 2**32
)  # the halves meet within a block


def _model(case, dtype):
    return reference.model(case.name, case.options, dtype)


@each_codec_and_dtype
@given(data=st.data(), seed=seeds, position=positions)
def test_encoding_makes_the_specified_bytes(case, dtype, data, seed, position):
    """F021, F108: header, codes, scales and padding, ties and extremes and denormals included."""
    raw = data.draw(finite_values(dtype))
    values = reference.load(raw, dtype)
    expected = reference.payload(
        _model(case, dtype), values, DTYPES[dtype][0], seed=seed, position=position
    )
    found = encode(case.core, raw, dtype, seed=seed, position=position)
    flags = 7  # what a narrower format cannot hold may be flagged as well
    assert found[:flags] == expected[:flags]
    assert found[64:] == expected[64:]
    if np.isfinite(reference.decoded(_model(case, dtype), expected, raw.size)).all():
        assert found == expected


@each_codec_and_dtype
@given(data=st.data(), seed=seeds)
def test_decoding_gives_the_specified_values(case, dtype, data, seed):
    raw = data.draw(finite_values(dtype))
    payload = encode(case.core, raw, dtype, seed=seed)
    values = reference.decoded(_model(case, dtype), payload, raw.size)
    if dtype == "float16":
        values = np.where(np.isfinite(values), values.clip(-65504, 65504), values)
    expected = reference.store(values, dtype)
    assert decode(case.core, payload, raw.size, dtype).tobytes() == expected.tobytes()


def _contributions(case, dtype, world, count, seed):
    rng = np.random.default_rng(seed)
    kinds = ["normal", "heavy", "ties", "denormal"]
    raws = [make(kinds[(seed + r) % 4], count, dtype, rng) for r in range(world)]
    return [encode(case.core, raw, dtype, seed=seed + r) for r, raw in enumerate(raws)]


worlds = st.sampled_from([1, 2, 3, 4, 5, 7, 8])
counts = st.sampled_from([0, 1, 33, 127, 1024, 1025, 2305])


@each_codec_and_dtype
@given(world=worlds, count=counts, average=st.booleans(), seed=st.integers(0, 1000))
def test_a_reduction_is_decode_sum_in_rank_order_divide_once_round_once(
    case, dtype, world, count, average, seed
):
    """F014, F108"""
    payloads = _contributions(case, dtype, world, count, seed)
    divisor = float(world) if average else 1.0
    model = _model(case, dtype)
    expected = reference.store(reference.mean(model, payloads, divisor, dtype, count), dtype)
    assert reduce(case.core, payloads, divisor, count, dtype).tobytes() == expected.tobytes()


SECONDS = [
    Case("identity", {}),
    Case("cast_bf16", {}),
    Case("block_float8", {}),
    Case("block_float4", {"block_size": 32, "level": "best"}),
    Case("block_float8", {"rounding": "stochastic"}),
]


@pytest.mark.parametrize("second", SECONDS, ids=str)
@each_codec_and_dtype
@given(world=worlds, count=counts, seed=st.integers(0, 1000), position=st.integers(0, 2**40))
def test_a_shards_result_is_encoded_once_from_the_unrounded_mean(
    case, dtype, second, world, count, seed, position
):
    """F014, F108: never rounded to the dtype between the sum and the second leg's codec."""
    payloads = _contributions(case, dtype, world, count, seed)
    mean = reference.mean(_model(case, dtype), payloads, float(world), dtype, count)
    expected = reference.payload(
        _model(second, dtype), mean, DTYPES[dtype][0], seed=seed, position=position
    )
    found = reduce_encode(
        case.core,
        second.on(case.device).core,
        payloads,
        float(world),
        count,
        dtype,
        seed=seed,
        position=position,
    )
    assert found[64:] == expected[64:]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_at_their_maximum_on_every_rank_add_up(case, world):
    """F015: codes are never added in their own width."""
    raw = np.full(256, 127.0, np.float32)
    raw[::2] = -128.0
    payloads = [encode(case.core, raw, "float32")] * world
    decoded = decode(case.core, payloads[0], 256, "float32")
    found = reduce(case.core, payloads, 1.0, 256, "float32")
    assert (found == world * decoded).all()


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("name", ["identity", "cast_bf16", "cast_fp16"])
def test_bfloat16_sums_do_not_lose_small_terms(name, world):
    """F014: one rank has 1.0, the others 2^-9: as if summed in fp32 and rounded once."""
    core = Case(name, {}).core
    raws = [
        narrow(np.full(200, 1.0 if rank == 0 else 2.0**-9), "bfloat16") for rank in range(world)
    ]
    payloads = [encode(core, raw, "bfloat16") for raw in raws]
    exact = narrow(np.full(200, 1 + (world - 1) * 2.0**-9), "bfloat16")
    assert (reduce(core, payloads, 1.0, 200, "bfloat16") == exact).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mean_in_range_is_finite_though_the_sum_of_half_precision_is_not(case, dtype):
    """F001: eight times 20000; the sum itself may be Inf in fp16, on all ranks alike."""
    raw = narrow(np.full(300, 20000.0), dtype)
    payloads = [encode(case.core, raw, dtype)] * 8
    mean = widen(reduce(case.core, payloads, 8.0, 300, dtype), dtype)
    once = widen(decode(case.core, payloads[0], 300, dtype), dtype)
    assert (np.abs(mean - once) <= 2.0**-7 * np.abs(once)).all()
    total = widen(reduce(case.core, payloads, 1.0, 300, dtype), dtype)
    overflows = (8 * np.abs(once) >= 65520) & (dtype == "float16")
    assert (np.isinf(total) == overflows).all()
    assert overflows.all() or dtype != "float16" or {"rotation", "top_k"} & {*case.options}


@pytest.mark.parametrize("second", SECONDS[1:], ids=str)
def test_an_overflow_of_the_sum_surfaces_through_a_codec_that_saturates(second):
    """F001: a fp16 sum of 160000 must not arrive as the finite 65504."""
    raw = np.full(128, 20000.0, np.float16)
    core = Case("identity", {}).core
    found = reduce_encode(
        core, second.core, [encode(core, raw, "float16")] * 8, 1.0, 128, "float16"
    )
    assert not np.isfinite(decode(second.core, found, 128, "float16")).any()


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mean_names_the_first_rank_that_was_not_finite(case, bad_rank):
    """F010: in the header of the shard's result."""
    raws = [np.linspace(-1, 1, 200, dtype=np.float32) for _ in range(3)]
    for raw in raws[bad_rank:]:
        raw[3] = np.nan
    payloads = [encode(case.core, raw, "float32") for raw in raws]
    found = reduce_encode(case.core, case.core, payloads, 3.0, 200, "float32")
    assert int.from_bytes(found[28:32], "little") == bad_rank + 1
    assert found[7] & 2
    assert np.isnan(decode(case.core, found, 200, "float32")[3])
