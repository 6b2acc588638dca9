"""Decoding gives back the values within what the codec states, in any size, place and order."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools

import numpy as np
import pytest
from codec_cases import (
    CASES,
    CASES_BY_DTYPE,
    ISAS,
    SIZES,
    bound_of,
    decode,
    encode,
    narrow,
    round_trip,
    widen,
)
from hypothesis import given
from hypothesis import strategies as st
from inputs import KINDS, finite_only, finite_values, make

from cccl import _core

each_codec_and_dtype = pytest.mark.parametrize(("case", "dtype"), CASES_BY_DTYPE, ids=str)
seeds = st.integers(0, 2**64 - 1)


@each_codec_and_dtype
@given(data=st.data(), seed=seeds)
def test_the_error_stays_within_the_stated_bound(case, dtype, data, seed):
    raw = data.draw(finite_values(dtype))
    core = case.core
    bound = bound_of(core, raw, dtype)
    error = np.abs(widen(round_trip(core, raw, dtype, seed=seed), dtype) - widen(raw, dtype))
    inside = np.isfinite(bound)
    assert (error[inside] <= bound[inside]).all(), (error[inside] / bound[inside]).max()


@each_codec_and_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_finite_values_stay_finite(case, dtype, kind):
    """F004: also of constant, zero, denormal and single-spike blocks. Only what is beyond the
    codec's own range, whose bound is infinite, may leave it."""
    raw = make(kind, 1500, dtype, np.random.default_rng(1))
    bound = bound_of(case.core, raw, dtype)
    granularity = case.core.granularity
    for first in range(0, raw.size, granularity):
        part = slice(first, first + granularity)
        if np.isfinite(bound[part]).all():
            assert np.isfinite(widen(round_trip(case.core, raw[part], dtype), dtype)).all()


@each_codec_and_dtype
@given(data=st.data(), seed=seeds)
def test_every_instruction_set_makes_the_same_bytes(case, dtype, data, seed):
    """F021: exact ties, extremes and denormals among them."""
    raw = data.draw(finite_values(dtype))
    core, made = case.core, set()
    for isa in ISAS:
        _core.force_isa(isa)
        payload = encode(core, raw, dtype, seed=seed)
        made.add((payload, decode(core, payload, raw.size, dtype).tobytes()))
    assert len(made) == 1


@each_codec_and_dtype
def test_encoding_twice_gives_the_same_bytes(case, dtype):
    raw = make("heavy", 5000, dtype, np.random.default_rng(2))
    assert encode(case.core, raw, dtype, seed=7) == encode(case.core, raw, dtype, seed=7)


@each_codec_and_dtype
@pytest.mark.parametrize("n", SIZES)
def test_any_size_round_trips_without_padding_to_see(case, dtype, n):
    """F023, F030: 0, 1, odd, prime and block-crossing counts."""
    raw = make("normal", n, dtype, np.random.default_rng(n))
    back = round_trip(case.core, raw, dtype)
    assert back.size == n
    error = np.abs(widen(back, dtype) - widen(raw, dtype))
    assert (error <= bound_of(case.core, raw, dtype)).all()


@each_codec_and_dtype
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_memory_may_have_any_alignment(case, dtype, offset):
    """F027: input, payload and output begin `offset` bytes past an aligned address."""
    raw = make("normal", 1031, dtype, np.random.default_rng(offset))
    aligned = encode(case.core, raw, dtype)
    assert encode(case.core, raw, dtype, offset=offset) == aligned
    moved = decode(case.core, aligned, raw.size, dtype, offset=offset)
    assert moved.tobytes() == decode(case.core, aligned, raw.size, dtype).tobytes()


@each_codec_and_dtype
@given(cuts=st.lists(st.integers(1, 60), max_size=6), seed=seeds, start=st.integers(0, 2**40))
def test_pieces_cut_at_block_multiples_give_the_codes_of_the_whole(case, dtype, cuts, seed, start):
    """F018: stochastic rounding too, since it is keyed by the position in the whole tensor."""
    core = case.core
    block = core.granularity
    raw = make("heavy", 60 * min(block, 128) + 17, dtype, np.random.default_rng(3))
    edges = sorted({0, raw.size, *(c * block for c in cuts if c * block < raw.size)})
    whole = round_trip(core, raw, dtype, seed=seed, position=start)
    pieces = [
        round_trip(core, raw[a:b], dtype, seed=seed, position=start + a)
        for a, b in itertools.pairwise(edges)
    ]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.core.fixed_size and c.name != "diff"], ids=str
)
def test_uneven_chunks_of_a_million_values_have_the_bytes_of_the_whole(case):
    """F018: one call against seven uneven chunks; the bodies are compared code by code. (diff puts
    positions in front: its values are compared above.)"""
    core, n = case.core, 1_000_000
    raw = make("heavy", n, "float32", np.random.default_rng(4))
    edges = [0, *(k * 1024 for k in (3, 50, 51, 400, 700, 976)), n]
    body, bits = encode(core, raw, "float32", seed=9)[64:], core_bits(core)
    codes = (n * bits + 7) // 8
    scales = body[(codes + 1) // 2 * 2 :]
    assembled = [b"", b""]
    for a, b in itertools.pairwise(edges):
        piece = encode(core, raw[a:b], "float32", seed=9, position=a)[64:]
        used = ((b - a) * bits + 7) // 8
        assembled[0] += piece[:used]
        assembled[1] += piece[(used + 1) // 2 * 2 :]
    assert assembled[0] == body[:codes]
    assert assembled[1] == scales


def core_bits(core) -> int:
    """Bits per code: all codecs of fixed size keep codes first, then what blocks share."""
    bits = 8 * (core.max_encoded_bytes(1024, 1) - 64) // 1024
    return int(core.name[-1]) if core.name.startswith("block_float") else bits


@each_codec_and_dtype
def test_the_callers_rounding_mode_changes_nothing(case, dtype):
    raw = make("bits", 3000, dtype, np.random.default_rng(5))
    normal = encode(case.core, raw, dtype)
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    upward = 0x800
    assert libm.fesetround(upward) == 0
    try:
        other = encode(case.core, raw, dtype)
        assert libm.fegetround() == upward, "the caller's own mode must survive"
    finally:
        libm.fesetround(0)
    assert other == normal


@each_codec_and_dtype
def test_the_callers_flushing_of_denormals_changes_nothing(case, dtype):
    torch = pytest.importorskip("torch", reason="sets the processor's flush-to-zero flag")
    raw = make("denormal", 3000, dtype, np.random.default_rng(6))
    normal = encode(case.core, raw, dtype)
    back = decode(case.core, normal, raw.size, dtype)
    torch.set_flush_denormal(True)
    try:
        assert encode(case.core, raw, dtype) == normal
        assert decode(case.core, normal, raw.size, dtype).tobytes() == back.tobytes()
    finally:
        torch.set_flush_denormal(False)


@each_codec_and_dtype
@pytest.mark.parametrize("exponent", [-148, -140, -133, -130, -126, 122, 126, 127])
def test_the_bound_holds_at_both_ends_of_the_range(case, dtype, exponent):
    """F004: scales as coarse as denormals are, and scales that have no room left above them."""
    rng = np.random.default_rng(exponent + 200)
    for _ in range(10):
        values = np.ldexp(rng.uniform(-1.999, 1.999, 300), exponent)
        raw = finite_only(narrow(values, dtype), dtype)
        bound = bound_of(case.core, raw, dtype)
        error = np.abs(widen(round_trip(case.core, raw, dtype, seed=8), dtype) - widen(raw, dtype))
        inside = np.isfinite(bound)
        assert (error[inside] <= bound[inside]).all()


def test_the_bound_holds_where_the_searched_scale_clips_two_extremes():
    """A block full of values that suit a small scale, and one extreme of each sign."""
    core = _core.make_codec("block_float4", {"level": "best", "block_size": 1024})
    levels = np.array([-127, -97, -77, -61, -47, -33, -21, -10, 0, 12, 23, 35, 49, 65, 84, 107])
    rng = np.random.default_rng(0)
    for clip in (0.625, 0.75, 0.875, 1.0):
        for share in (0.3, 0.6, 1.0):
            raw = (rng.choice(levels, 1024) / 127 * clip * share).astype(np.float32)
            raw[:2] = -1, 0.999999
            error = np.abs(round_trip(core, raw, "float32").astype(np.float64) - raw)
            assert (error <= bound_of(core, raw, "float32")).all()
