"""lossless: every bit comes back in few bytes; bodies that contradict themselves are refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import reference
from codec_cases import CASES, ISAS, Case, decode, encode, reduce, round_trip, storage, unsigned
from hypothesis import given
from hypothesis import strategies as st
from inputs import hardly_shorter

import cccl
from cccl import _core

BLOCK = 4096
CODED = {"bfloat16": 2, "float16": 2, "float32": 4}
FAST = Case("lossless", {})
OURS = [case for case in CASES if case.name == "lossless"]
each_case = pytest.mark.parametrize("case", OURS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", CODED)


def of_weights(n: int, dtype: str, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(n) * 0.02
    return reference.store(values.astype(np.float32), dtype).view(storage(dtype))


def any_bits(n: int, dtype: str, seed: int = 0) -> np.ndarray:
    word = unsigned(dtype)
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << (8 * word.itemsize), n, word).view(storage(dtype))


KINDS = {
    "weights": of_weights,
    "any bits": any_bits,
    "zeros": lambda n, dtype: np.zeros(n, storage(dtype)),
    "NaN": lambda n, dtype: (~np.zeros(n, unsigned(dtype))).view(storage(dtype)),
    "every exponent": lambda n, dtype: (
        np.arange(n) << {"bfloat16": 7, "float16": 10, "float32": 23}[dtype]
    ).astype(unsigned(dtype)).view(storage(dtype)),
    "blocks of both forms": lambda n, dtype: np.where(
        np.arange(n) // BLOCK % 2, any_bits(n, dtype).view(unsigned(dtype)),
        of_weights(n, dtype).view(unsigned(dtype)),
    ).view(storage(dtype)),
}  # fmt: skip
COUNTS = (1, 15, 16, 17, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 2049)


@each_case
@each_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_comes_back_in_no_more_bytes_than_promised(case, dtype, kind):
    """F041: input, header, and 4 bytes for each block behind the first."""
    for n in COUNTS:
        raw = KINDS[kind](n, dtype)
        payload = encode(case.core, raw, dtype)
        directory = (4 * ((n - 1) // BLOCK) + 15) // 16 * 16
        assert len(payload) <= 64 + raw.nbytes + directory
        assert n < 8 * BLOCK or len(payload) <= 64 + 1.001 * raw.nbytes
        assert decode(case.core, payload, n, dtype).tobytes() == raw.tobytes()


@each_case
@each_dtype
def test_every_bit_comes_back_where_coding_hardly_pays(case, dtype):
    """F041: a coded block that fills up to as many bytes as its values must not pass for them."""
    values = hardly_shorter(dtype, **case.options)
    for isa in ISAS:
        _core.force_isa(isa)
        payload = encode(case.core, values, dtype)
        assert decode(case.core, payload, values.size, dtype).tobytes() == values.tobytes()
        assert payload[64:] == _body(reference.model(case.name, case.options, dtype), values)
    _core.force_isa("auto")


@each_case
@each_dtype
@given(data=st.data())
def test_bytes_are_those_of_the_specification_for_any_bits(case, dtype, data):
    """F021, F108: NaN payloads too, and blocks of both forms in one payload."""
    n = data.draw(st.sampled_from(COUNTS))
    kind = KINDS[data.draw(st.sampled_from(["any bits", "blocks of both forms", "every exponent"]))]
    raw = kind(n, dtype)
    model = reference.model(case.name, case.options, dtype)
    expected = _body(model, raw)
    for isa in ISAS:
        _core.force_isa(isa)
        found = encode(case.core, raw, dtype)
        assert found[64:] == expected
    _core.force_isa("auto")


def _body(model: Any, raw: np.ndarray) -> bytes:
    """What it makes of elements as they are: NumPy's conversions do not keep the bits of a NaN."""
    model.elements.body = lambda values, *_: raw.tobytes()
    return model.body(raw, 0, 0)


@each_dtype
def test_the_reference_decoder_reads_any_bits(dtype):
    """A second implementation, written from FORMAT.md."""
    model = reference.model("lossless", {}, dtype)
    for kind in KINDS.values():
        for n in COUNTS:
            raw = kind(n, dtype)
            held = []
            model.elements.values = lambda data, *_, held=held: held.append(data)
            model.values(encode(FAST.core, raw, dtype)[64:], n)
            assert held == [raw.tobytes()]


@pytest.mark.parametrize(
    ("dtype", "least"), [("bfloat16", 1.47), ("float16", 1.15), ("float32", 1.19)]
)
def test_normal_weights_take_little_more_than_their_entropy(dtype, least):
    raw = of_weights(1 << 20, dtype)
    exponents, _ = reference.Lossless(dtype)._split(raw.tobytes())
    share = np.bincount(exponents) / raw.size
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    ideal = raw.nbytes / (raw.nbytes - raw.size * ((5 if dtype == "float16" else 8) - entropy) / 8)
    ratio = {
        level: raw.nbytes / len(encode(Case("lossless", {"level": level}).core, raw, dtype))
        for level in ("fast", "best")
    }
    assert ratio["best"] > ratio["fast"] > least
    assert ratio["best"] > 0.975 * ideal


@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8", "bool"])
def test_other_types_are_kept_as_they_are(dtype):
    raw = np.arange(10_000).astype(dtype)
    assert encode(FAST.core, raw, dtype)[64:] == raw.tobytes()


def test_a_payload_beyond_a_directorys_reach_is_refused():
    core = FAST.core
    number = 3  # bfloat16
    with pytest.raises(cccl.UnsupportedError, match="64 GiB"):
        most = core.max_encoded_bytes(1 << 36, number)
        core.encode(0, 1 << 36, number, 0, most, 0, 0, True)


def _resealed(payload: bytearray) -> bytes:
    """With good check values, so that what lies behind those checks is reached."""
    fields = list(reference.HEADER.unpack_from(payload))
    fields[6] = len(payload) - 64
    fields[-2] = reference.checksum(bytes(payload[64:]))
    head = reference.HEADER.pack(*fields)[:-8]
    payload[:64] = head + struct.pack("<Q", reference.checksum(head))
    return bytes(payload)


def _row(index: int, change: int):
    def edit(payload: bytearray) -> None:
        (row,) = struct.unpack_from("<I", payload, 64 + 4 * index)
        struct.pack_into("<I", payload, 64 + 4 * index, (row + change) % (1 << 32))

    return edit


PLANE_0 = 64 + 16 + BLOCK + 12  # of the first block: behind the header, directory, rest and table
EDITS = {
    "a block that begins too late": _row(0, 1),
    "a block that begins too early": _row(0, -1),
    "a block that begins before the one in front": _row(1, -600),
    "a block in the directory": _row(0, -(1 << 31)),
    "a block beyond the body": _row(1, 1 << 20),
    "more digits than there are": lambda p: p.__setitem__(
        slice(PLANE_0, PLANE_0 + 64), b"\xff" * 64
    ),
    "fewer digits than there are": lambda p: p.__setitem__(slice(PLANE_0, PLANE_0 + 64), bytes(64)),
    "a body cut short": lambda p: p.__delitem__(slice(-4, None)),
    "a body without its last byte": lambda p: p.__delitem__(-1),
    "a body that goes on": lambda p: p.extend(bytes(16)),
    "a directory cut short": lambda p: p.__delitem__(slice(68, None)),
    "no body": lambda p: p.__delitem__(slice(64, None)),
    "another option": lambda p: p.__setitem__(24, 1),
}


@each_case
@pytest.mark.parametrize("name", EDITS)
def test_a_body_that_contradicts_itself_is_refused(case, name):
    raw = of_weights(2 * BLOCK + 100, "bfloat16")
    payload = bytearray(encode(case.core, raw, "bfloat16"))
    assert decode(case.core, _resealed(payload), raw.size, "bfloat16").tobytes() == raw.tobytes()
    EDITS[name](payload)
    damaged = _resealed(payload)
    with pytest.raises(cccl.CorruptPayloadError):
        decode(case.core, damaged, raw.size, "bfloat16")
    with pytest.raises(cccl.CorruptPayloadError):
        reduce(case.core, [damaged, damaged], 1.0, raw.size, "bfloat16")


@each_case
def test_random_digits_are_refused_or_decoded_in_bounds(case):
    """Guards around the memory would show a byte written outside."""
    rng = np.random.default_rng(0)
    raw = of_weights(3 * BLOCK, "bfloat16")
    whole = encode(case.core, raw, "bfloat16")
    for _ in range(100):
        payload = bytearray(whole)
        for at in rng.integers(64, len(payload), rng.integers(1, 20)):
            payload[at] = rng.integers(0, 256)
        damaged = _resealed(payload)
        try:
            decode(case.core, damaged, raw.size, "bfloat16")
        except cccl.CorruptPayloadError:
            continue


def test_a_checkpoint_is_an_array_like_any_other():
    torch = pytest.importorskip("torch", reason="bfloat16 in Python")
    weights = (torch.randn(300, 1000) * 0.02).bfloat16()
    payload = cccl.codec("lossless", level="best").encode(weights)
    assert payload.nbytes < weights.nbytes / 1.4
    back = torch.empty_like(weights)
    cccl.decode(bytes(payload), back)
    assert torch.equal(back, weights)


@each_case
def test_blocks_are_coded_alone(case):
    """A tensor cut at multiples of 4096 has the blocks of the whole."""
    raw = of_weights(3 * BLOCK + 7, "float32")
    parts = [
        round_trip(case.core, raw[at : at + BLOCK], "float32") for at in range(0, raw.size, BLOCK)
    ]
    assert np.concatenate(parts).tobytes() == raw.tobytes()
    first = encode(case.core, raw[:BLOCK], "float32")[64:]
    assert encode(case.core, raw, "float32")[80:][: len(first)] == first
