"""A payload is as large as stated, and what is no intact payload is refused."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from codec_cases import CASES, CASES_BY_DTYPE, DTYPES, SIZES, bound_of, decode, encode, round_trip
from hypothesis import given
from hypothesis import strategies as st
from inputs import make

import cccl

HEADER = 64
each_codec = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize(("case", "dtype"), CASES_BY_DTYPE, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_a_payload_is_never_larger_than_stated(case, dtype, n):
    """F041: the memory behind it is guarded, too, by `encode`."""
    core = case.core
    raw = make("bits", n, dtype, np.random.default_rng(n))
    size = len(encode(core, raw, dtype))
    most = core.max_encoded_bytes(n, DTYPES[dtype][0])
    assert size <= most
    assert size == most or not core.fixed_size


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        ("block_float8", "float32", 8.125),
        ("block_float6", "float32", 6.125),
        ("block_float5", "float32", 5.125),
        ("block_float4", "float32", 4.125),
        ("block_float3", "float32", 3.125),
        ("block_float2", "float32", 2.125),
        ("block_float8", "bfloat16", 8.125),
        ("block_float4", "float64", 4.125),
        ("cast_fp16", "float32", 16),
        ("cast_bf16", "float64", 16),
        ("identity", "float32", 32),
        ("identity", "float16", 16),
    ],
)
def test_bits_per_element_are_as_documented(name, dtype, bits):
    """F020: with blocks of 128 a scale adds 2 / 128 bytes per value; the header is 64 bytes."""
    count = 1 << 20
    size = cccl.codec(name).max_encoded_bytes(count, dtype)
    assert size == HEADER + count * bits / 8


@each_codec
def test_every_flipped_bit_is_found(case):
    raw = make("normal", 77, "float32", np.random.default_rng(1))
    payload = encode(case.core, raw, "float32", seed=2)
    for bit in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(cccl.CorruptPayloadError):
            decode(case.core, bytes(damaged), raw.size, "float32")
        with pytest.raises(cccl.CorruptPayloadError):
            cccl.decode(bytes(damaged))


@each_codec
def test_every_truncation_is_found(case):
    raw = make("normal", 77, "float32", np.random.default_rng(1))
    payload = encode(case.core, raw, "float32")
    for length in range(len(payload)):
        with pytest.raises(cccl.CorruptPayloadError, match=r"truncated|damaged|not a CCCL"):
            decode(case.core, payload[:length], raw.size, "float32")
        with pytest.raises(cccl.CorruptPayloadError):
            cccl.decode(payload[:length])


@given(foreign=st.binary(max_size=300))
def test_foreign_bytes_are_refused(foreign):
    with pytest.raises(cccl.CorruptPayloadError):
        cccl.decode(foreign)


@each_codec
@given(data=st.data())
def test_bursts_of_damage_are_found(case, data):
    raw = make("normal", 500, "float32", np.random.default_rng(3))
    payload = bytearray(encode(case.core, raw, "float32"))
    at = data.draw(st.integers(0, len(payload) - 1))
    burst = data.draw(st.binary(min_size=1, max_size=4))[: len(payload) - at]
    if payload[at : at + len(burst)] == burst:
        return
    payload[at : at + len(burst)] = burst
    with pytest.raises(cccl.CorruptPayloadError):
        decode(case.core, bytes(payload), raw.size, "float32")


def _reseal(payload: bytes, **fields: int) -> bytes:
    """A header with other fields and a right check value: what a hostile sender would write."""
    layout = {"codec": (5, "B"), "dtype": (6, "B"), "count": (8, "Q"), "body_bytes": (16, "Q"),
              "params": (24, "I")}  # fmt: skip
    data = bytearray(payload)
    for name, value in fields.items():
        offset, kind = layout[name]
        struct.pack_into("<" + kind, data, offset, value)
    words = struct.unpack_from("<14I", data, 0)
    check = sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64
    struct.pack_into("<Q", data, 56, check)
    return bytes(data)


@each_codec
@pytest.mark.parametrize(
    "fields",
    [
        {"codec": 250},
        {"dtype": 99},
        {"count": 100_000},
        {"count": 2**62},
        {"count": 2**64 - 1},
        {"body_bytes": 0},
        {"body_bytes": 2**64 - 1},
        {"body_bytes": 2**64 - 64},
        {"params": 0xFFFFFFFF},
    ],
    ids=str,
)
def test_a_well_sealed_header_that_lies_is_refused(case, fields):
    raw = make("normal", 77, "float32", np.random.default_rng(1))
    payload = encode(case.core, raw, "float32")
    assert decode(case.core, _reseal(payload), 77, "float32").size == 77
    with pytest.raises(cccl.CorruptPayloadError):
        decode(case.core, _reseal(payload, **fields), raw.size, "float32")
    with pytest.raises(cccl.CorruptPayloadError):
        cccl.decode(_reseal(payload, **fields))


@each_codec
def test_a_payload_of_another_codec_count_or_dtype_is_refused(case):
    raw = make("normal", 77, "float32", np.random.default_rng(1))
    payload = encode(case.core, raw, "float32")
    on_cpu = case.device == "cpu"  # a kernel does not say which
    for other in CASES:
        if other.name != case.name and other.device == case.device:
            with pytest.raises(cccl.CorruptPayloadError, match=r"another codec|truncated"):
                decode(other.core, payload, raw.size, "float32")
    with pytest.raises(cccl.CorruptPayloadError, match="77 values, expected 76" if on_cpu else ""):
        decode(case.core, payload, 76, "float32")
    with pytest.raises(
        cccl.CorruptPayloadError, match="holds float32, expected float16" if on_cpu else ""
    ):
        decode(case.core, payload, 77, "float16")


@each_codec
def test_an_empty_tensor_has_a_payload_of_one_header(case):
    """F030"""
    raw = np.empty(0, np.float32)
    payload = encode(case.core, raw, "float32")
    assert len(payload) == HEADER
    assert decode(case.core, payload, 0, "float32").size == 0


@pytest.mark.parametrize("bits", [8, 6, 5, 4, 3, 2])
def test_offsets_past_4_gib_are_computed_in_64_bits(bits):
    """F028: size arithmetic at and around 2^31 elements."""
    codec = cccl.codec(f"block_float{bits}")
    for count in (2**31 - 1, 2**31, 2**31 + 65, 2**40 + 1):
        codes = -(-count * bits // 8)
        expected = HEADER + (codes + 1) // 2 * 2 + 2 * -(-count // 128)
        assert codec.max_encoded_bytes(count, "float16") == expected


@each_codec
def test_a_payload_can_be_decoded_from_its_bytes_alone(case):
    """The decoder needs no option: block size and codebook stand in the header."""
    raw = make("heavy", 2305, "float32", np.random.default_rng(6))
    payload = cccl.codec(case.name, **case.options).encode(raw, seed=4)
    alone = cccl.decode(bytes(payload))
    assert alone.tobytes() == round_trip(case.core, raw, "float32", seed=4).tobytes()
    assert (np.abs(alone - raw) <= bound_of(case.core, raw, "float32")).all()


@each_codec
def test_a_header_of_the_other_byte_order_is_refused(case):
    """F096: the format is little-endian on every machine."""
    payload = encode(case.core, make("normal", 77, "float32", np.random.default_rng(1)), "float32")
    fields = struct.unpack("<IBBBBQQIIQQQQ", payload[:HEADER])
    swapped = struct.pack(">IBBBBQQIIQQQQ", *fields) + payload[HEADER:]
    with pytest.raises(cccl.CorruptPayloadError, match="not a CCCL payload"):
        cccl.decode(swapped)


FROZEN = {
    "identity": "f99bda8c5e73da75",
    "cast_fp16": "a1ce2185736ec6c1",
    "cast_bf16": "52a68f082bcde100",
    "block_float8": "7095e10cc4a67d2f",
    "block_float4": "cd95c782889f3766",
    "block_float4 best": "22a901bc3b08c63a",
    "block_float4 rotated": "4b5a547e29e90449",
    "block_float6": "df1be09c4027d7c6",
    "block_float5": "8c1e4b7f1f978bba",
    "block_float3": "f70471ac94b94b47",
    "block_float2": "2c681ad312993030",
}


@pytest.mark.parametrize("name", FROZEN)
def test_the_wire_format_is_frozen(name):
    """Bytes that version 1 of the format made; a change needs another version."""
    values = ((np.arange(1000) * 7919 % 2003 - 1001) / 64).astype(np.float32)
    codec, *words = name.split()
    options = {"level": "best"} if "best" in words else {}
    options |= {"rotation": "hadamard"} if "rotated" in words else {}
    payload = cccl.codec(codec, **options).encode(values)
    assert hashlib.sha256(bytes(payload)).hexdigest()[:16] == FROZEN[name]
