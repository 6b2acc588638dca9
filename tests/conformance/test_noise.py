"""What a reduction measures of its values: on every instruction set and device what the format
says, in a payload that is otherwise the same."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import reference
from codec_cases import CASES, CASES_BY_DTYPE, FLOATS, ISAS, Case, encode, reduce_encode
from hypothesis import given
from hypothesis import strategies as st
from inputs import make

import cccl
from cccl import _core

IN_TILES = [case for case in CASES if case.name not in ("sparse", "lossless")]
ON_CPU = [case for case in IN_TILES if case.device == "cpu"]
LOSSY = [case for case in ON_CPU if not case.core.lossless and not case.core.predicts]
# Around the ends of tiles, of pieces that are looked at, and of the distance between them.
COUNTS = (1, 33, 1023, 1025, 2305, 16384, 16385, 16384 + 1030, 3 * 16384 + 2048 + 77)
each_codec_and_dtype = pytest.mark.parametrize(
    ("case", "dtype"), [(c, d) for c, d in CASES_BY_DTYPE if c in ON_CPU], ids=str
)
on_cuda = pytest.mark.skipif(
    not _core.cuda_device_count(),
    reason="no CUDA device" if _core.cuda_built() else "a build without CUDA",
)


def contributions(case: Case, dtype: str, world: int, count: int, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    kinds = ["normal", "heavy", "ties", "denormal", "zeros"]
    raws = [make(kinds[(seed + rank) % 5], count, dtype, rng) for rank in range(world)]
    return [encode(case.core, raw, dtype, seed=seed + rank) for rank, raw in enumerate(raws)]


def word(payload: bytes) -> int:
    return struct.unpack_from("<Q", payload, 40)[0]


def roots(number: int) -> tuple[float, float, float]:
    """Deviation between ranks, root mean square of the mean, and its share of zeros."""
    bits = np.array([number & 0xFFFFFF, number >> 24 & 0xFFFFFF], np.uint32) << 8
    return *map(float, bits.view(np.float32)), (number >> 48) / 65535


def without(payload: bytes) -> bytes:
    """As it is if nothing is measured."""
    head = payload[:40] + bytes(8) + payload[48:56]
    return head + struct.pack("<Q", reference.checksum(head)) + payload[64:]


def expected_word(case: Case, dtype: str, payloads: list[bytes], count: int) -> int:
    model = reference.model(case.name, case.options, dtype)
    real = np.float64 if dtype == "float64" else np.float32
    return reference.statistics([reference.decoded(model, p, count).astype(real) for p in payloads])


@each_codec_and_dtype
@given(
    world=st.sampled_from([1, 2, 3, 5, 8]),
    count=st.sampled_from(COUNTS),
    average=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_header_says_what_the_format_defines(case, dtype, world, count, average, seed):
    """And nothing else of the payload changes."""
    payloads = contributions(case, dtype, world, count, seed)
    args = (payloads, float(world) if average else 1.0, count, dtype)
    found = reduce_encode(case.core, case.core, *args, seed=seed, measures=True)
    assert word(found) == expected_word(case, dtype, payloads, count)
    assert without(found) == reduce_encode(case.core, case.core, *args, seed=seed)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", LOSSY, ids=str)
def test_instruction_sets_measure_alike(case, isa):
    args = (contributions(case, "float32", 5, 40_000, 3), 5.0, 40_000, "float32")
    expected = reduce_encode(case.core, case.core, *args, measures=True)
    _core.force_isa(isa)
    try:
        assert reduce_encode(case.core, case.core, *args, measures=True) == expected
    finally:
        _core.force_isa("auto")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_measure_alike(dtype):
    """In several pieces, with a tail."""
    case, count, usual = Case("block_float8", {}), 600_001, _core.codec_threads()
    args = (contributions(case, dtype, 3, count, 3), 3.0, count, dtype)
    found = set()
    try:
        for threads in (1, 2, 5):
            _core.set_codec_threads(threads)
            found.add(reduce_encode(case.core, case.core, *args, measures=True))
    finally:
        _core.set_codec_threads(usual)
    assert len(found) == 1
    assert word(found.pop()) == expected_word(case, dtype, args[0], count)


@pytest.mark.parametrize("second", ["identity", "sparse", "lossless", "block_float3"])
def test_any_codec_of_the_second_leg_carries_it(second):
    case, to = Case("block_float8", {}), Case(second, {})
    payloads = contributions(case, "float32", 3, 5000, 1)
    found = reduce_encode(case.core, to.core, payloads, 3.0, 5000, "float32", measures=True)
    assert word(found) == expected_word(case, "float32", payloads, 5000)
    assert cccl.decode(found).size == 5000


@pytest.mark.parametrize("world", [2, 3, 8])
def test_it_is_the_variance_between_ranks(world):
    """Of what was looked at, to the digits that there is room for."""
    rng = np.random.default_rng(world)
    count, case = 70_000, Case("identity", {})
    raws = 0.5 + rng.standard_normal((world, count)).astype(np.float32)
    raws[:, :400] = 0
    payloads = [encode(case.core, raw, "float32") for raw in raws]
    found = reduce_encode(
        case.core, case.core, payloads, float(world), count, "float32", measures=True
    )
    seen = raws.astype(np.float64)[:, np.arange(count) % 16384 < 1024]
    deviation, root, zeros = roots(word(found))
    assert deviation == pytest.approx(np.sqrt(seen.var(axis=0, ddof=1).mean()), rel=2**-15)
    assert root == pytest.approx(np.sqrt((seen.mean(axis=0) ** 2).mean()), rel=2**-15)
    assert zeros == pytest.approx(400 / seen.shape[1], abs=2**-15)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_equal_ranks_have_no_noise(scale):
    case = Case("block_float8", {})
    raw = (np.random.default_rng(0).standard_normal(20_000) * scale).astype(np.float32)
    payloads = [encode(case.core, raw, "float32")] * 7
    found = reduce_encode(case.core, case.core, payloads, 7.0, raw.size, "float32", measures=True)
    deviation, root, _ = roots(word(found))
    assert deviation == 0
    assert root == pytest.approx(scale, rel=0.1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_said(value):
    case = Case("block_float8", {})
    raws = [np.ones(3000, np.float32) for _ in range(3)]
    raws[1][100] = value
    payloads = [encode(case.core, raw, "float32") for raw in raws]
    found = reduce_encode(case.core, case.core, payloads, 3.0, 3000, "float32", measures=True)
    assert word(found) & (1 << 48) - 1 == 0x7FC0007FC000
    assert np.isnan(roots(word(found))[:2]).all()


def test_nothing_is_measured_of_no_values():
    case = Case("block_float8", {})
    payload = encode(case.core, np.empty(0, np.float32), "float32")
    assert (
        word(reduce_encode(case.core, case.core, [payload] * 2, 2.0, 0, "float32", measures=True))
        == 0
    )


@pytest.mark.parametrize("name", ["sparse", "lossless"])
def test_codecs_without_tiles_refuse_to_measure(name):
    case = Case(name, {})
    payloads = contributions(case, "float32", 2, 500, 0)
    with pytest.raises(cccl.UnsupportedError, match="block_float8"):
        reduce_encode(case.core, case.core, payloads, 2.0, 500, "float32", measures=True)


@on_cuda
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", LOSSY, ids=str)
@pytest.mark.parametrize("second", [None, "cast_bf16", "block_float3"])
def test_a_cuda_device_measures_alike(case, second, dtype):
    """The whole payload is the same."""
    to = Case(second, {}) if second else case
    for world, count in ((1, 300), (2, 1024), (3, 2305), (8, 16384 * 2 + 77), (64, 5000)):
        payloads = contributions(case, dtype, world, count, world)
        args = (payloads, float(world), count, dtype)
        where = {"seed": 5, "position": 1 << 20, "measures": True}
        expected = reduce_encode(case.core, to.core, *args, **where)
        core = case.on("cuda").core
        assert reduce_encode(core, to.on("cuda").core, *args, **where) == expected


@on_cuda
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_cuda_device_says_what_is_not_finite(value):
    case = Case("block_float8", {})
    raws = [np.ones(3000, np.float32) for _ in range(3)]
    raws[1][100] = value
    payloads = [encode(case.core, raw, "float32") for raw in raws]
    core = case.on("cuda").core
    found = reduce_encode(core, core, payloads, 3.0, 3000, "float32", measures=True)
    assert word(found) & (1 << 48) - 1 == 0x7FC0007FC000


@on_cuda
@pytest.mark.parametrize("name", ["identity", "sparse", "lossless"])
def test_a_cuda_device_refuses_what_it_cannot_measure(name):
    core = Case(name, {}).on("cuda").core
    payload = encode(core, np.ones(500, np.float32), "float32")
    with pytest.raises(cccl.UnsupportedError, match="block_float8"):
        reduce_encode(core, core, [payload] * 2, 2.0, 500, "float32", measures=True)
