"""diff with a prediction on a CUDA device: the bytes, values and errors of a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from codec_cases import (
    CASES,
    DTYPES,
    FLOATS,
    Case,
    OnCuda,
    decode,
    encode,
    guarded,
    narrow,
    reduce,
    reduce_encode,
    storage,
)
from hypothesis import given
from hypothesis import strategies as st
from inputs import KINDS, finite_values, make

import cccl
from cccl import _core

pytestmark = pytest.mark.skipif(
    not _core.cuda_device_count(),
    reason="no CUDA device" if _core.cuda_built() else "a build without CUDA",
)
DIFFS = [case for case in CASES if case.name == "diff" and case.device == "cpu"]
each_case = pytest.mark.parametrize("case", DIFFS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", FLOATS)
COUNTS = (0, 1, 15, 16, 17, 129, 2047, 2048, 2049, 5000, 16 * 2048, 40_001)


class Predicting:
    """A codec on each device, with the same prediction of a whole tensor."""

    def __init__(self, case: Case, known: np.ndarray, dtype: str, number: int = 3):
        self.memory, self.cores = [], []
        for core in (case.core, case.on("cuda").core):
            held = guarded(core, known.nbytes, 0, known.tobytes())
            place = (held.address, known.size, DTYPES[dtype][0], number)
            self.memory.append(held)
            if isinstance(core, OnCuda):
                core.codec = core.codec.with_prediction(*place)
                self.cores.append(core)
            else:
                self.cores.append(core.with_prediction(*place))


def factors(payload: bytes, n: int) -> np.ndarray:
    return np.frombuffer(payload, np.int8, -(-n // 2048), 64 + 16)


def alike(known: np.ndarray, dtype: str, seed: int, noise: float = 0.2) -> np.ndarray:
    """Values of which the prediction says much, but for every third cell."""
    rng = np.random.default_rng(seed)
    values = known.astype(np.float64) * rng.uniform(-1.8, 1.8) + noise * rng.standard_normal(
        known.size
    )
    for first in range(2 * 2048, known.size, 3 * 2048):
        values[first : first + 2048] = rng.standard_t(3, values[first : first + 2048].size)
    return narrow(values, dtype)


def predictions(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, n).clip(-50, 50)


def assert_same(pair: Predicting, raw: np.ndarray, dtype: str, **where: int) -> bytes:
    on_cpu, on_cuda = pair.cores
    payload = encode(on_cpu, raw, dtype, **where)
    assert encode(on_cuda, raw, dtype, **where) == payload
    offset = where.get("offset", 0)
    back = decode(on_cuda, payload, raw.size, dtype, offset=offset)
    assert back.tobytes() == decode(on_cpu, payload, raw.size, dtype).tobytes()
    return payload


@each_dtype
@each_case
def test_every_kernel_once(case, dtype):
    """Short enough to run under compute-sanitizer."""
    for n, offset in ((0, 0), (3 * 2048 + 77, 0), (2048 + 333, 1)):
        known = predictions(n, 1)
        pair = Predicting(case, narrow(known, dtype), dtype)
        payload = assert_same(pair, alike(known, dtype, 2), dtype, offset=offset)
        args = ([payload] * 3, 3.0, n, dtype)
        assert reduce(pair.cores[0], *args).tobytes() == reduce(pair.cores[1], *args).tobytes()
        means = [reduce_encode(core, core, *args) for core in pair.cores]
        assert means[0] == means[1]


@each_dtype
@each_case
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_any_count_at_any_alignment(case, dtype, offset):
    used = 0
    for n in COUNTS:
        known = narrow(predictions(n, n), dtype)
        raw = alike(predictions(n, n), dtype, n)
        payload = assert_same(Predicting(case, known, dtype), raw, dtype, seed=n, offset=offset)
        if n > 2048:
            used += np.count_nonzero(factors(payload, n))
            assert 0 in factors(payload, n) or n < 3 * 2048
    assert used > 8


@each_dtype
@each_case
@given(data=st.data(), position=st.sampled_from([0, 2048, 3 * 2048, 5 * 2048]))
def test_values_of_any_kind_anywhere_in_the_tensor(case, dtype, data, position):
    """Of some of which, or of none, there is a prediction."""
    raw = data.draw(finite_values(dtype, max_size=5000))
    known = data.draw(st.sampled_from(["same", "other", "zeros"]))
    whole = np.zeros(position + 4500, storage(dtype))
    part = whole[position : position + raw.size]
    if known == "same":
        part[:] = raw[: part.size]
    elif known == "other":
        part[:] = make("heavy", raw.size, dtype, np.random.default_rng(1))[: part.size]
    assert_same(Predicting(case, whole, dtype), raw, dtype, position=position, seed=1)


@each_dtype
@each_case
def test_special_values(case, dtype):
    rng = np.random.default_rng(1)
    for kind in KINDS:
        for other in (kind, "normal"):
            raw, known = (make(k, 5000, dtype, rng) for k in (kind, other))
            assert_same(Predicting(case, known, dtype), raw, dtype)
            assert_same(Predicting(case, known, dtype), known, dtype)
    big = {"float16": 6e4, "float64": 1e308}.get(dtype, 3e38)
    for value in (np.nan, -np.nan, np.inf, -np.inf, -0.0, big, -big):
        known = predictions(5000, 4)
        raw = alike(known, dtype, 5)
        raw[1234] = narrow(np.array([value]), dtype)[0]
        assert_same(Predicting(case, narrow(known, dtype), dtype), raw, dtype)
        most = narrow(np.full(5000, value if np.isfinite(value) else 1.0), dtype)
        assert_same(Predicting(case, most, dtype), most, dtype)


@each_dtype
@each_case
@pytest.mark.parametrize("world", [1, 2, 3, 8, 64])
def test_means(case, dtype, world):
    """Of contributions that the prediction helps, or not; encoded by diff too, and by others."""
    n, position = 9000, 2048
    known = predictions(position + n, 7)
    pair = Predicting(case, narrow(known, dtype), dtype)
    raws = [alike(known[position:], dtype, rank) for rank in range(world)]
    payloads = [
        encode(pair.cores[0], raw, dtype, position=position, seed=rank)
        for rank, raw in enumerate(raws)
    ]
    for divisor in (1.0, float(world), 0.3):
        args = (payloads, divisor, n, dtype)
        found = [reduce(core, *args).tobytes() for core in pair.cores]
        assert found[0] == found[1]
        means = [reduce_encode(c, c, *args, position=position, seed=9) for c in pair.cores]
        assert means[0] == means[1]
        plain = Case("block_float8", {})
        firsts, seconds = pair.cores, (plain.core, plain.on("cuda").core)
        means = [reduce_encode(a, b, *args) for a, b in zip(firsts, seconds, strict=True)]
        assert means[0] == means[1]
    plain = [encode(Case("cast_bf16", {}).core, raw, dtype) for raw in raws]
    firsts = (Case("cast_bf16", {}).core, Case("cast_bf16", {}, "cuda").core)
    means = [
        reduce_encode(a, b, plain, float(world), n, dtype, position=position)
        for a, b in zip(firsts, pair.cores, strict=True)
    ]
    assert means[0] == means[1]


@each_case
def test_a_mean_of_contributions_that_are_not_finite(case):
    known = predictions(6000, 1)
    pair = Predicting(case, narrow(known, "float32"), "float32")
    raws = [alike(known, "float32", rank) for rank in range(4)]
    raws[2][3000] = raws[3][3000] = np.nan
    payloads = [encode(pair.cores[0], raw, "float32") for raw in raws]
    args = (payloads, 4.0, 6000, "float32")
    found = [reduce_encode(core, core, *args) for core in pair.cores]
    assert found[0] == found[1]
    sums = [reduce(core, *args) for core in pair.cores]
    assert np.isnan(sums[1][3000])
    assert sums[0].tobytes() == sums[1].tobytes()


def _error(run: Any, *args: Any) -> str:
    with pytest.raises(cccl.CorruptPayloadError) as caught:
        run(*args)
    return str(caught.value)


@each_dtype
def test_another_prediction_is_refused_with_the_words_of_a_cpu(dtype):
    """Another number, fewer values, or none at all: and told once."""
    case, n = Case("diff", {"inner": "block_float4"}), 9000
    known = predictions(n, 2)
    pair = Predicting(case, narrow(known, dtype), dtype)
    raw = alike(known, dtype, 3)
    payload = encode(pair.cores[0], raw, dtype)
    others = (
        Predicting(case, narrow(known, dtype), dtype, number=4),
        Predicting(case, narrow(known[: n - 1000], dtype), dtype),
        Predicting(case, narrow(known, dtype), dtype, number=0),
    )
    for other in others:
        words = [_error(decode, core, payload, n, dtype) for core in other.cores]
        assert words[0] == words[1]
        assert "prediction number 3 of the values from 0 on" in words[0]
        words = [_error(reduce, core, [payload] * 3, 3.0, n, dtype) for core in other.cores]
        assert words[0] == words[1]
        decode(pair.cores[1], payload, n, dtype)
    words = [_error(decode, core, payload, n, dtype) for core in (case.core, case.on("cuda").core)]
    assert words[0] == words[1]
    damaged = bytearray(payload)
    damaged[64] ^= 1  # the position: a checksum that does not match comes first
    words = [_error(decode, core, bytes(damaged), n, dtype) for core in others[0].cores]
    assert words[0] == words[1]


@each_case
def test_a_damaged_payload_is_found(case):
    n = 9000
    known = predictions(n, 2)
    pair = Predicting(case, narrow(known, "float32"), "float32")
    payloads = [encode(pair.cores[0], alike(known, "float32", r), "float32") for r in range(3)]
    rng = np.random.default_rng(4)
    for rank in range(3):
        for at in (*rng.integers(0, 64, 4), *rng.integers(64, len(payloads[rank]), 8), 64, 72, 80):
            damaged = bytearray(payloads[rank])
            damaged[at] ^= 1 << rng.integers(0, 8)
            with_damage = [*payloads[:rank], bytes(damaged), *payloads[rank + 1 :]]
            for run in (reduce, lambda c, *args: reduce_encode(c, c, *args)):
                with pytest.raises(cccl.CorruptPayloadError):
                    run(pair.cores[1], with_damage, 3.0, n, "float32")
            with pytest.raises(cccl.CorruptPayloadError):
                decode(pair.cores[1], bytes(damaged), n, "float32")
    assert np.isfinite(reduce(pair.cores[1], payloads, 3.0, n, "float32")).all()


def test_a_prediction_of_another_dtype_is_refused():
    case, known = Case("diff", {}), np.ones(3000, np.float32)
    core = Predicting(case, known, "float32").cores[1]
    with pytest.raises(cccl.UnsupportedError, match="a prediction of float16 values has that"):
        encode(core, np.ones(3000, np.float16), "float16")
