"""Non-finite values surface, zeros stay zero, lossless keeps every bit, integers stay exact."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import (
    CASES,
    CASES_BY_DTYPE,
    FLOATS,
    INTEGERS,
    LOSSY,
    decode,
    encode,
    narrow,
    reduce,
    round_trip,
    storage,
    supported,
    unsigned,
    widen,
)
from hypothesis import given
from hypothesis import strategies as st
from inputs import make

import cccl
from cccl import _core

each_codec_and_dtype = pytest.mark.parametrize(("case", "dtype"), CASES_BY_DTYPE, ids=str)
lossy_block_codecs = pytest.mark.parametrize(
    ("case", "dtype"), [(c, d) for c, d in CASES_BY_DTYPE if "block" in c.name], ids=str
)
lossy_block_codecs_by_default = pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (c, d)
        for c, d in CASES_BY_DTYPE
        if "block" in c.name and not {"level", "rounding", "rotation"} & {*c.options}
    ],
    ids=str,
)
BAD = (np.nan, np.inf, -np.inf)


@lossy_block_codecs
@pytest.mark.parametrize("bad", BAD)
def test_a_block_with_a_non_finite_value_becomes_nan_and_no_other_block_changes(case, dtype, bad):
    """F009, F010: no finite number may come out of a block that overflowed."""
    core, block = case.core, case.core.granularity
    values = np.random.default_rng(1).standard_normal(4 * block + 5)
    clean = round_trip(core, narrow(values, dtype), dtype)
    for at in (0, block + 3, 2 * block - 1, 4 * block + 4):
        broken = values.copy()
        broken[at] = bad
        back = round_trip(core, narrow(broken, dtype), dtype)
        first = at // block * block
        inside = np.zeros(values.size, bool)
        inside[first : first + block] = True
        assert np.isnan(widen(back, dtype)[inside]).all()
        assert back[~inside].tobytes() == clean[~inside].tobytes()


@each_codec_and_dtype
@pytest.mark.parametrize("bad", BAD)
def test_a_non_finite_value_never_becomes_a_number(case, dtype, bad):
    """F010"""
    values = np.linspace(-1, 1, 300)
    values[131] = bad
    back = widen(round_trip(case.core, narrow(values, dtype), dtype), dtype)
    assert not np.isfinite(back[131])


@each_codec_and_dtype
def test_the_header_says_whether_values_were_non_finite(case, dtype):
    values = np.linspace(-1, 1, 300)
    for bad in (0.5, *BAD):
        values[299] = bad
        payload = encode(case.core, narrow(values, dtype), dtype)
        held = np.frombuffer(payload, np.uint8)
        header = _core.header_of(held.ctypes.data, held.size)
        assert header["non_finite"] == (not np.isfinite(bad))


@each_codec_and_dtype
@pytest.mark.parametrize("huge", [7e4, 3.4e38, 1e300])
def test_the_header_says_so_when_a_value_is_beyond_what_the_codec_can_hold(case, dtype, huge):
    """F010: such a value arrives as no number, so that a policy of 'raise' must see it."""
    values = np.linspace(-1, 1, 300)
    values[7] = huge
    raw = narrow(values, dtype)
    payload = encode(case.core, raw, dtype)
    arrived = widen(decode(case.core, payload, raw.size, dtype), dtype)
    held = np.frombuffer(payload, np.uint8)
    assert np.isfinite(arrived).all() == (
        not _core.header_of(held.ctypes.data, held.size)["non_finite"]
    )


@each_codec_and_dtype
def test_zeros_come_back_as_exact_zeros(case, dtype):
    """F003, F004: whole blocks of them, and single ones beside large values, which a rotation
    spreads over their block."""
    values = np.zeros(3000)
    values[1024:1500:3] = 123.0
    back = widen(round_trip(case.core, narrow(values, dtype), dtype, seed=3), dtype)
    kept = values == 0
    if "rotation" in case.options:
        kept[1024:2048] = False
    assert (back[kept] == 0).all() and not np.signbit(back[kept]).any()


@lossy_block_codecs
def test_a_zero_of_a_lossy_block_codec_is_positive_and_its_rank_mean_too(case, dtype):
    """F003: equal bytes for equal values, whatever the sign of the block's scale."""
    raw = narrow(np.array([-0.0, 5.0] * 64 + [-0.0] * 2048), dtype)
    payload = encode(case.core, raw, dtype)
    for back in (decode(case.core, payload, raw.size, dtype),
                 reduce(case.core, [payload] * 3, 3.0, raw.size, dtype)):  # fmt: skip
        found = widen(back, dtype)
        assert not np.signbit(found[found == 0]).any()
        assert (found == 0).sum() >= 1024


@each_codec_and_dtype
def test_negative_zero_stays_a_zero(case, dtype):
    """F041: with its sign where the codec keeps signs of zero."""
    raw = narrow(np.full(130, -0.0), dtype)
    back = widen(round_trip(case.core, raw, dtype), dtype)
    assert (back == 0).all()
    if case.core.lossless or "cast" in case.name:
        assert np.signbit(back).all()


@pytest.mark.parametrize(
    ("case", "dtype"), [(c, d) for c in CASES if c.core.lossless for d in supported(c)], ids=str
)
@given(data=st.data())
def test_a_lossless_codec_gives_back_every_bit(case, dtype, data):
    """F041: NaN payloads, -0.0, sign boundaries and single bytes among them; size as documented."""
    n = data.draw(st.integers(0, 300))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    word = unsigned(dtype)
    if dtype == "bool":
        raw = rng.integers(0, 2, n).astype(bool)
    else:
        raw = rng.integers(0, 1 << (8 * word.itemsize), n, word).view(storage(dtype))
        raw[: n // 2] = np.resize(np.array([127, 128], np.uint8), raw[: n // 2].nbytes).view(
            storage(dtype)
        )
    payload = encode(case.core, raw, dtype)
    assert decode(case.core, payload, n, dtype).tobytes() == raw.tobytes()
    assert len(payload) <= 64 + raw.nbytes + (0 if case.core.fixed_size else 4 + 3)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("case", LOSSY, ids=str)
def test_a_lossy_codec_refuses_integers_and_bools(case, dtype):
    """F040"""
    with pytest.raises(cccl.UnsupportedError, match="never lossy"):
        encode(case.core, np.zeros(5, dtype), dtype)
    with pytest.raises(TypeError, match=dtype):
        cccl.codec(case.name, **case.options).encode(np.zeros(5, dtype))


@pytest.mark.parametrize("case", LOSSY, ids=str)
def test_every_float_dtype_is_taken(case):
    """F034: bfloat16 too."""
    assert [dtype for dtype in FLOATS if dtype in supported(case)] == FLOATS


@lossy_block_codecs_by_default
def test_constant_blocks_keep_their_value(case, dtype):
    """F004: all equal, and a single value that is not zero. The scale is made for the extreme,
    unless it is searched for or rounding is left to chance."""
    single = np.zeros(300)
    single[150] = -0.37
    for values in (np.full(300, -0.37), single):
        raw = narrow(values, dtype)
        exact = widen(raw, dtype)
        back = widen(round_trip(case.core, raw, dtype), dtype)
        assert (np.abs(back - exact) <= 2.0**-7 * np.abs(exact)).all()


@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_float16_saturates_rather_than_overflows(kind):
    """A block's decoded extreme may exceed the value by half a step: not beyond 65504."""
    raw = (make(kind, 4096, "float32", np.random.default_rng(5)) * 1e9).clip(-65504, 65504)
    raw = raw.astype(np.float16)
    for case in LOSSY:
        assert np.isfinite(round_trip(case.core, raw, "float16")).all()
