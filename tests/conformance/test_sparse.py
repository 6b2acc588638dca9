"""sparse: its size follows the data, what it drops is what it says, and bad cells are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import reference
from codec_cases import Case, bound_of, decode, encode, reduce, reduce_encode, round_trip

import cccl

CELL = 2048
EXACT = Case("sparse", {})


def with_zeros(n: int, zeros: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = np.abs(rng.standard_normal(n)) + 1e-3
    return np.where(rng.random(n) < zeros, 0, values).astype(np.float32)


@pytest.mark.parametrize(
    ("zeros", "share"), [(0.0, 1.001), (0.6, 0.44), (0.9, 0.14), (0.99, 0.016), (1.0, 0.001)]
)
def test_the_size_follows_the_share_of_zeros(zeros, share):
    raw = with_zeros(1 << 18, zeros)
    payload = encode(EXACT.core, raw, "float32")
    assert len(payload) <= share * raw.nbytes
    assert decode(EXACT.core, payload, raw.size, "float32").tobytes() == raw.tobytes()


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.95, 1.0])
def test_a_cell_is_dense_unless_its_share_of_zeros_exceeds_the_threshold(threshold):
    core = Case("sparse", {"sparsity_threshold": threshold}).core
    dense = 64 + 4 + 4 * CELL
    for held in range(0, CELL + 1, 128):
        raw = np.zeros(CELL, np.float32)
        raw[:held] = 1
        size = len(encode(core, raw, "float32"))
        pays = 256 + 4 * held < 4 * CELL or held < 256
        assert (size < dense) == (CELL - held > threshold * CELL and pays)


@pytest.mark.parametrize("n", [1, 255, 256, 257, CELL - 1, CELL, CELL + 1, 3 * CELL])
def test_a_single_value_is_found_wherever_it_is(n):
    """Gaps of a byte, skips, and the ends of cells."""
    for at in {0, n // 2, n - 1, min(n - 1, 255), min(n - 1, 510)}:
        raw = np.zeros(n, np.float32)
        raw[at] = np.pi
        assert round_trip(EXACT.core, raw, "float32").tobytes() == raw.tobytes()


def test_minus_zero_is_a_value_where_values_are_exact_and_a_zero_elsewhere():
    raw = np.zeros(CELL, np.float32)
    raw[7::100] = -0.0
    raw[9] = 1
    assert round_trip(EXACT.core, raw, "float32").tobytes() == raw.tobytes()
    for options in ({"threshold": 1e-45}, {"top_k": 0.5}, {"inner": "cast_bf16"}):
        back = round_trip(Case("sparse", options).core, raw, "float32")
        assert (back == raw).all() and not np.signbit(back).any()


def test_a_sum_keeps_the_sign_of_zero_that_a_dense_sum_has():
    """-0.0 of all ranks stays, beside a rank's plain zero it does not."""
    first, second = np.zeros(CELL, np.float32), np.zeros(CELL, np.float32)
    first[[3, 5]], second[5] = -0.0, -0.0
    payloads = [encode(EXACT.core, raw, "float32") for raw in (first, second)]
    found = reduce(EXACT.core, payloads, 1.0, CELL, "float32")
    assert found.tobytes() == (first + second).tobytes()
    assert np.signbit(found[5]) and not np.signbit(found[3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("top_k", [1e-6, 0.001, 0.1, 0.3])
def test_top_k_keeps_the_largest_of_every_cell(top_k, dtype):
    """Of equals the first; a cell that is too short to gain from it is kept as a whole."""
    raw = np.random.default_rng(1).integers(-40, 41, 3 * CELL + 100).astype(dtype)
    back = round_trip(Case("sparse", {"top_k": top_k}).core, raw, dtype)
    for first in range(0, raw.size, CELL):
        cell, found = raw[first : first + CELL], back[first : first + CELL]
        keep = np.argsort(-np.abs(cell), kind="stable")[: int(np.ceil(top_k * cell.size))]
        expected = np.zeros_like(cell)
        expected[keep] = cell[keep]
        assert (found == expected).all()


def test_what_is_dropped_is_below_the_threshold_and_no_infinity_is():
    raw = np.linspace(-1, 1, 4 * CELL, dtype=np.float32)
    raw[[3, CELL, 2 * CELL + 5]] = np.inf, np.nan, -np.inf
    back = round_trip(Case("sparse", {"threshold": 0.9}).core, raw, "float32")
    dropped = np.abs(raw) < np.float32(0.9)
    assert (back[dropped] == 0).all()
    assert back[~dropped].tobytes() == raw[~dropped].tobytes()
    kept = round_trip(Case("sparse", {"top_k": 0.0001}).core, raw, "float32")
    assert (np.isfinite(kept) == np.isfinite(raw)).all()


def test_the_bound_says_what_was_dropped():
    raw = np.random.default_rng(3).standard_normal(5 * CELL).astype(np.float32)
    for options in ({"top_k": 0.05}, {"threshold": 1.5, "inner": "block_float4"}):
        core = Case("sparse", options).core
        error = np.abs(round_trip(core, raw, "float32") - raw)
        bound = bound_of(core, raw, "float32")
        assert (error <= bound).all() and (bound <= np.abs(raw).max()).all()
        assert (bound == np.abs(raw))[error == np.abs(raw)].all()


def test_a_sums_form_is_chosen_anew():
    """Each rank has another tenth of the values: the sum is dense."""
    raws = [np.where(np.arange(CELL) % 10 == rank, 1, 0).astype(np.float32) for rank in range(10)]
    payloads = [encode(EXACT.core, raw, "float32") for raw in raws]
    assert max(map(len, payloads)) < 64 + 0.14 * 4 * CELL
    found = reduce_encode(EXACT.core, EXACT.core, payloads, 1.0, CELL, "float32")
    assert len(found) == 64 + 4 + 4 * CELL
    assert (decode(EXACT.core, found, CELL, "float32") == 1).all()


@pytest.mark.parametrize("first", [Case("sparse", {}), Case("cast_bf16", {}), Case("identity", {})])
@pytest.mark.parametrize(
    "second", [Case("sparse", {}), Case("sparse", {"inner": "block_float4"}), Case("cast_bf16", {})]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_sums_pass_between_sparse_and_dense_codecs(first, second, dtype):
    raws = [with_zeros(5000, zeros, seed) for seed, zeros in enumerate((0.95, 0.0, 1.0))]
    raws = [reference.store(raw.astype(np.float64), dtype) for raw in raws]
    payloads = [encode(first.core, raw, dtype) for raw in raws]
    model = [reference.model(case.name, case.options, dtype) for case in (first, second)]
    mean = reference.mean(model[0], payloads, 3.0, dtype, 5000)
    found = reduce_encode(first.core, second.core, payloads, 3.0, 5000, dtype, position=CELL)
    assert found[64:] == model[1].body(mean, CELL, 0)


def test_sizes_beyond_2_to_the_31_values_are_computed_in_64_bits():
    codec = cccl.codec("sparse")
    for count in (2**31 + 1, 2**40 + 1):
        assert codec.max_encoded_bytes(count) == 64 + 4 * (count // CELL + 1) + 4 * count


def _damaged(raw: np.ndarray, edit) -> bytes:
    """A payload with other bytes behind its header, under good check values."""
    payload = bytearray(encode(EXACT.core, raw, "float32"))
    edit(payload)
    body = bytes(payload[64:])
    struct.pack_into("<Q", payload, 16, len(body))
    struct.pack_into("<Q", payload, 48, reference.checksum(body))
    struct.pack_into("<Q", payload, 56, reference.checksum(bytes(payload[:56])))
    return bytes(payload)


GAPS, BITMAP, DENSE = (with_zeros(CELL + 1000, z) for z in (0.98, 0.7, 0.0))
EDITS = {
    "an unknown form": (GAPS, lambda p: p.__setitem__(66, 3)),
    "more values than the cell has": (GAPS, lambda p: struct.pack_into("<H", p, 64, CELL + 1)),
    "one value less": (GAPS, lambda p: p.__setitem__(64, p[64] - 1)),
    "one skip more": (GAPS, lambda p: p.__setitem__(67, p[67] + 1)),
    "a place beyond the cell": (GAPS, lambda p: p.__setitem__(slice(72, 112), b"\xfe" * 40)),
    "a skip instead of a value": (GAPS, lambda p: p.__setitem__(72, 255)),
    "a bit more": (BITMAP, lambda p: p.__setitem__(72, p[72] ^ 1)),
    "a bitmap that skips": (BITMAP, lambda p: p.__setitem__(67, 1)),
    "dense with fewer values": (DENSE, lambda p: struct.pack_into("<H", p, 64, 5)),
    "a byte more": (DENSE, lambda p: p.extend(b"\0")),
    "nothing but half a row": (GAPS, lambda p: p.__delitem__(slice(66, None))),
    "another inner codec": (GAPS, lambda p: p.__setitem__(27, 2)),
    "itself as the inner codec": (GAPS, lambda p: p.__setitem__(27, 10)),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_cell_that_contradicts_itself_is_refused(name):
    raw, edit = EDITS[name]
    assert decode(EXACT.core, _damaged(raw, lambda p: None), raw.size, "float32").size == raw.size
    payload = _damaged(raw, edit)
    with pytest.raises(cccl.CorruptPayloadError):
        decode(EXACT.core, payload, raw.size, "float32")
    with pytest.raises(cccl.CorruptPayloadError):
        reduce(EXACT.core, [payload, payload], 1.0, raw.size, "float32")
    if name != "another inner codec":  # whose payload it then is
        with pytest.raises(cccl.CorruptPayloadError):
            cccl.decode(payload)
