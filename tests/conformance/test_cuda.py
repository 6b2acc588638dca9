"""On a CUDA device every codec makes the bytes, and the values, that it makes on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from codec_cases import (
    CASES,
    DTYPES,
    FLOATS,
    INTEGERS,
    SIZES,
    Case,
    decode,
    encode,
    narrow,
    reduce,
    reduce_encode,
    storage,
    supported,
    unsigned,
    widen,
)
from hypothesis import given
from hypothesis import strategies as st
from inputs import KINDS, finite_values, hardly_shorter, make

import cccl
from cccl import _core

pytestmark = pytest.mark.skipif(
    not _core.cuda_device_count(),
    reason="no CUDA device" if _core.cuda_built() else "a build without CUDA",
)
# Of those that run on both; all where nothing here runs.
ON_CUDA = {str(case) for case in CASES if case.device == "cuda"}
ON_CPU = [
    case
    for case in CASES
    if case.device == "cpu" and (not ON_CUDA or str(case.on("cuda")) in ON_CUDA)
]
each_codec = pytest.mark.parametrize("case", ON_CPU, ids=str)
each_dtype = pytest.mark.parametrize("dtype", FLOATS)
seeds = st.integers(0, 2**64 - 1)
# Around the ends of rows, tiles and what a thread block does at once.
COUNTS = (*SIZES, 1023, 1024, 1025, 4096 + 129, 8192, 8192 * 3 + 1)


def assert_same(case: Case, raw: np.ndarray, dtype: str, **where: int) -> bytes:
    """Encodes on both; decodes on both. Returns the payload."""
    payload = encode(case.core, raw, dtype, **where)
    assert encode(case.on("cuda").core, raw, dtype, **where) == payload
    offset = where.get("offset", 0)
    back = decode(case.on("cuda").core, payload, raw.size, dtype, offset=offset)
    assert back.tobytes() == decode(case.core, payload, raw.size, dtype).tobytes()
    return payload


@each_dtype
@each_codec
def test_every_kernel_once(case, dtype):
    """Short enough to run under compute-sanitizer."""
    rng = np.random.default_rng(6)
    core = case.on("cuda").core
    for n, offset in ((0, 0), (1, 0), (3072 + 77, 0), (1024 + 333, 1)):
        raw = make("heavy", n, dtype, rng)
        payload = assert_same(case, raw, dtype, seed=1, offset=offset)
        payloads = [payload] * 5
        sums = [reduce(c, payloads, 5.0, n, dtype) for c in (case.core, core)]
        assert sums[0].tobytes() == sums[1].tobytes()
        for second in (case, Case("identity", {})):
            args = (payloads, 5.0, n, dtype)
            expected = reduce_encode(case.core, second.core, *args)
            assert reduce_encode(core, second.on("cuda").core, *args) == expected


@each_dtype
@each_codec
@given(data=st.data(), seed=seeds, position=st.integers(0, 2**40))
def test_values_of_any_kind_make_the_same_bytes(case, dtype, data, seed, position):
    """F021, F108: the whole payload: header, flags, checksum, codes, scales and padding."""
    raw = data.draw(finite_values(dtype, max_size=5000))
    granularity = case.core.granularity
    assert_same(case, raw, dtype, seed=seed, position=position // granularity * granularity)


@each_dtype
@each_codec
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_any_count_at_any_alignment(case, dtype, offset):
    """F023, F027, F030"""
    rng = np.random.default_rng(offset)
    for n in COUNTS:
        assert_same(case, make("heavy", n, dtype, rng), dtype, seed=n, offset=offset)


@each_dtype
@each_codec
def test_special_values(case, dtype):
    """F009: Inf, NaN, zeros of both signs, denormals and the largest numbers, alone and together;
    a NaN's own bits too, where the codec keeps them."""
    rng = np.random.default_rng(1)
    for kind in KINDS:
        bits = make(kind, 3000, dtype, rng).view(unsigned(dtype)).copy()
        for at in rng.integers(0, bits.size, 4):
            bits[at] = rng.integers(0, 1 << (8 * bits.itemsize), dtype=bits.dtype, endpoint=False)
        assert_same(case, bits.view(storage(dtype)), dtype)
    for value in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 65519.0, 65520.0, -3.4e38, 1e300):
        for n in (1, 127, 1500):
            raw = narrow(np.full(n, 0.25), dtype)
            raw[n // 2] = narrow(np.array([value]), dtype)[0]
            assert_same(case, raw, dtype)
            assert_same(case, narrow(np.full(n, value), dtype), dtype)


@pytest.mark.parametrize(
    "case", [case for case in ON_CPU if case.core.granularity == 32 or not case.options], ids=str
)
def test_blocks_of_every_exponent_and_mantissa(case):
    """Each scale that a block can have, and its reciprocal."""
    patterns = (np.arange(0, 0x7F80, dtype=np.uint32) << 16).view(np.float32)
    rng = np.random.default_rng(2)
    block = max(case.core.granularity, 32)
    values = patterns[:, None] * rng.uniform(-1, 1, (patterns.size, block)).astype(np.float32)
    values[:, 0] = patterns * np.where(np.arange(patterns.size) % 2, 1, -1)
    assert_same(case, values.ravel().astype(np.float32), "float32")


@pytest.mark.parametrize("case", [case for case in ON_CPU if case.name == "lossless"], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_blocks_where_coding_hardly_pays(case, dtype):
    """F041: a coded block that fills up to as many bytes as its values must not pass for them."""
    raw = hardly_shorter(dtype, **case.options)
    payload = assert_same(case, raw, dtype)
    assert decode(case.on("cuda").core, payload, raw.size, dtype).tobytes() == raw.tobytes()


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("offset", [0, 1])
def test_integers_are_copied(dtype, offset):
    rng = np.random.default_rng(3)
    for n in COUNTS:
        bits = rng.integers(0, 2 if dtype == "bool" else 256, n * DTYPES[dtype][1], np.uint8)
        assert_same(Case("identity", {}), bits.view(dtype), dtype, offset=offset)


def _contributions(case: Case, dtype: str, world: int, n: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    kinds = ["normal", "heavy", "ties", "denormal"]
    raws = [make(kinds[rank % 4], n, dtype, rng) for rank in range(world)]
    return [encode(case.core, raw, dtype, seed=rank) for rank, raw in enumerate(raws)]


@each_dtype
@each_codec
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 64])
def test_sums_of_up_to_64_ranks(case, dtype, world):
    """F014, F108"""
    for n in (0, 1, 127, 1025, 9000):
        payloads = _contributions(case, dtype, world, n, seed=n)
        for divisor in (1.0, float(world)):
            expected = reduce(case.core, payloads, divisor, n, dtype)
            found = reduce(case.on("cuda").core, payloads, divisor, n, dtype)
            assert found.tobytes() == expected.tobytes()


@each_dtype
@each_codec
@pytest.mark.parametrize("divisor", [3.0, 0.3, 2.0**-50, 2.0**90, 7e30, 3e-39])
def test_a_mean_by_any_divisor(case, dtype, divisor):
    """F108: by divisors whose reciprocal is exact or not, and sums for which it would not do."""
    on_cuda = case.on("cuda").core
    for n in (77, 3 * 1024, 5 * 1024 + 77):
        args = (_contributions(case, dtype, 4, n, seed=n), divisor, n, dtype)
        assert reduce(on_cuda, *args).tobytes() == reduce(case.core, *args).tobytes()
        assert reduce_encode(on_cuda, on_cuda, *args) == reduce_encode(case.core, case.core, *args)


def test_more_ranks_than_a_kernel_takes_are_refused():
    core = Case("block_float8", {}, "cuda").core
    payload = encode(core, np.ones(5, np.float32), "float32")
    with pytest.raises(cccl.UnsupportedError, match="1 to 64 payloads, got 65"):
        reduce(core, [payload] * 65, 1.0, 5, "float32")


SECONDS = [Case(case.name, case.options) for case in ON_CPU if "block_size" not in case.options]


@each_dtype
@each_codec
@pytest.mark.parametrize("second", SECONDS, ids=str)
def test_a_mean_is_encoded_as_on_a_cpu(case, second, dtype):
    """F014, F108: by every codec, from contributions of every codec."""
    for world, n in ((1, 300), (3, 2305), (4, 8192)):
        payloads = _contributions(case, dtype, world, n, seed=n)
        where = {"seed": 5, "position": 1 << 20}
        args = (payloads, float(world), n, dtype)
        expected = reduce_encode(case.core, second.core, *args, **where)
        on_cuda = case.on("cuda").core, second.on("cuda").core
        assert reduce_encode(*on_cuda, *args, **where) == expected


@each_codec
def test_a_mean_of_contributions_that_are_not_finite(case):
    """F010: NaN on every rank from the bad one on, and its number in the header."""
    for bad in (0, 2):
        raws = [np.linspace(-1, 1, 3000, dtype=np.float32) for _ in range(4)]
        for raw in raws[bad:]:
            raw[1500] = np.nan
        payloads = [encode(case.core, raw, "float32") for raw in raws]
        expected = reduce_encode(case.core, case.core, payloads, 4.0, 3000, "float32")
        core = case.on("cuda").core
        found = reduce_encode(core, core, payloads, 4.0, 3000, "float32")
        assert found[:48] == expected[:48]
        sums = [reduce(c, payloads, 4.0, 3000, "float32") for c in (case.core, core)]
        assert np.isnan(sums[1][1500])
        assert np.array_equal(*sums, equal_nan=True)


@each_codec
def test_a_damaged_payload_among_several_is_found(case):
    core = case.on("cuda").core
    n = 5000
    payloads = _contributions(case, "float32", 5, n)
    rng = np.random.default_rng(4)
    for rank in range(5):
        for at in (*rng.integers(0, 64, 4), *rng.integers(64, len(payloads[rank]), 8)):
            damaged = bytearray(payloads[rank])
            damaged[at] ^= 1 << rng.integers(0, 8)
            with_damage = [*payloads[:rank], bytes(damaged), *payloads[rank + 1 :]]
            with pytest.raises(cccl.CorruptPayloadError):
                reduce(core, with_damage, 5.0, n, "float32")
            with pytest.raises(cccl.CorruptPayloadError):
                reduce_encode(core, core, with_damage, 5.0, n, "float32")
    assert np.isfinite(widen(reduce(core, payloads, 5.0, n, "float32"), "float32")).all(), (
        "an error is reported once"
    )


def test_every_codec_has_a_cuda_build():
    assert {str(case) for case in CASES if case.device == "cuda"} == {
        str(case.on("cuda")) for case in CASES if case.device == "cpu"
    }
    for case in ON_CPU:
        assert supported(case) == supported(case.on("cuda"))


@pytest.mark.parametrize("name", ["identity", "block_float8", "block_float5", "block_float4"])
def test_more_than_2_to_the_31_elements(name):
    """F028: the values around 2^31 and at the end are encoded as a CPU encodes them alone, the
    checksum is the whole body's, and all decode as their pieces do."""
    torch = pytest.importorskip("torch", reason="fills the device's memory")
    n, block = (1 << 31) + 4096 + 77, 128
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("needs 16 GiB of device memory")
    values = torch.randn(1 << 20, dtype=torch.float16, device="cuda").repeat(n // (1 << 20) + 1)[:n]
    values[1 << 31 :] *= 3
    codec = cccl.codec(name)
    payload = codec.encode(values)
    body = payload._data[64:]
    bits = 16 if name == "identity" else int(name[-1])
    scales = (n * bits // 8 + 2) // 2 * 2 if n * bits % 16 else n * bits // 8
    for first, last in (((1 << 31) - 1024, (1 << 31) + 1024), (n - 1101, n)):
        piece = bytes(codec.encode(values[first:last].cpu()))[64:]
        codes = (last - first) * bits // 8
        assert bytes(body[first * bits // 8 :][:codes].cpu().numpy()) == piece[:codes]
        if name != "identity":
            found = body[scales + 2 * (first // block) :][: 2 * -(-(last - first) // block)]
            assert bytes(found.cpu().numpy()) == piece[-found.numel() :]
    padded = torch.nn.functional.pad(body, (0, -body.numel() % 4)).view(torch.int32)
    total = 0
    for at in range(0, padded.numel(), 1 << 26):
        words = padded[at : at + (1 << 26)].long() & 0xFFFFFFFF
        places = torch.arange(at, at + words.numel(), device="cuda")
        total += int((words * ((2 * places + 1) & 0xFFFFFFFF)).sum())
    assert total % 2**64 == int.from_bytes(bytes(payload._data[48:56].cpu().numpy()), "little")
    decoded = codec.decode(payload)
    for first, last in (((1 << 31) - 1024, (1 << 31) + 1024), (n - 1101, n)):
        piece = values[first:last].contiguous()
        assert torch.equal(decoded[first:last], codec.decode(codec.encode(piece)))


def test_sparse_with_more_than_2_to_the_31_elements():
    """F028: rows and cells around 2^31 and at the end are those that a CPU makes of them alone."""
    torch = pytest.importorskip("torch", reason="fills the device's memory")
    n, cell = (1 << 31) + 4096 + 77, 2048
    if torch.cuda.mem_get_info()[0] < 10 * n:
        pytest.skip("needs 20 GiB of device memory")
    some = torch.randn(1 << 20, dtype=torch.float16, device="cuda")
    some[torch.rand(1 << 20, device="cuda") < 0.9] = 0
    values = some.repeat(n // (1 << 20) + 1)[:n]
    values[1 << 31 :] *= 3
    codec = cccl.codec("sparse")
    payload = codec.encode(values)
    body = payload._data[64:]
    for first, last in (((1 << 31) - 2 * cell, (1 << 31) + cell), ((1 << 31) - cell, n)):
        piece = bytes(codec.encode(values[first:last].cpu()))[64:]
        rows = 4 * -(-(last - first) // cell)
        assert bytes(body[4 * (first // cell) :][:rows].cpu().numpy()) == piece[:rows]
        if last == n:
            assert bytes(body[rows - len(piece) :].cpu().numpy()) == piece[rows:]
    assert torch.equal(codec.decode(payload), values)
