"""sparse: its size follows the data, what it drops is what it says, and bad cells are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import reference
from codec_cases import (
    DEVICES,
    DTYPES,
    FLOATS,
    Case,
    bound_of,
    decode,
    encode,
    reduce,
    reduce_encode,
    round_trip,
    storage,
    unsigned,
)

import cccl

CELL = 2048
EXACT = Case("sparse", {})
each_device = pytest.mark.parametrize("device", DEVICES)


def with_zeros(n: int, zeros: float, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = np.abs(rng.standard_normal(n)) + 1e-3
    return np.where(rng.random(n) < zeros, 0, values).astype(np.float32)


@each_device
@pytest.mark.parametrize(
    ("zeros", "share"), [(0.0, 1.001), (0.6, 0.44), (0.9, 0.14), (0.99, 0.016), (1.0, 0.001)]
)
def test_the_size_follows_the_share_of_zeros(device, zeros, share):
    raw = with_zeros(1 << 18, zeros)
    payload = encode(EXACT.on(device).core, raw, "float32")
    assert len(payload) <= share * raw.nbytes
    assert decode(EXACT.on(device).core, payload, raw.size, "float32").tobytes() == raw.tobytes()


@each_device
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.95, 1.0])
def test_a_cell_is_dense_unless_its_share_of_zeros_exceeds_the_threshold(device, threshold):
    core = Case("sparse", {"sparsity_threshold": threshold}, device).core
    dense = 64 + 4 + 4 * CELL
    for held in range(0, CELL + 1, 128):
        raw = np.zeros(CELL, np.float32)
        raw[:held] = 1
        size = len(encode(core, raw, "float32"))
        pays = 256 + 4 * held < 4 * CELL or held < 256
        assert (size < dense) == (CELL - held > threshold * CELL and pays)


@each_device
@pytest.mark.parametrize("n", [1, 255, 256, 257, CELL - 1, CELL, CELL + 1, 3 * CELL])
def test_a_single_value_is_found_wherever_it_is(device, n):
    """Gaps of a byte, skips, and the ends of cells."""
    for at in {0, n // 2, n - 1, min(n - 1, 255), min(n - 1, 510)}:
        raw = np.zeros(n, np.float32)
        raw[at] = np.pi
        assert round_trip(EXACT.on(device).core, raw, "float32").tobytes() == raw.tobytes()


@each_device
def test_minus_zero_is_a_value_where_values_are_exact_and_a_zero_elsewhere(device):
    raw = np.zeros(CELL, np.float32)
    raw[7::100] = -0.0
    raw[9] = 1
    assert round_trip(EXACT.on(device).core, raw, "float32").tobytes() == raw.tobytes()
    for options in ({"threshold": 1e-45}, {"top_k": 0.5}, {"inner": "cast_bf16"}):
        back = round_trip(Case("sparse", options, device).core, raw, "float32")
        assert (back == raw).all() and not np.signbit(back).any()


@each_device
def test_a_sum_keeps_the_sign_of_zero_that_a_dense_sum_has(device):
    """-0.0 of all ranks stays, beside a rank's plain zero it does not."""
    first, second = np.zeros(CELL, np.float32), np.zeros(CELL, np.float32)
    first[[3, 5]], second[5] = -0.0, -0.0
    payloads = [encode(EXACT.on(device).core, raw, "float32") for raw in (first, second)]
    found = reduce(EXACT.on(device).core, payloads, 1.0, CELL, "float32")
    assert found.tobytes() == (first + second).tobytes()
    assert np.signbit(found[5]) and not np.signbit(found[3])


@each_device
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("top_k", [1e-6, 0.001, 0.1, 0.3])
def test_top_k_keeps_the_largest_of_every_cell(device, top_k, dtype):
    """Of equals the first; a cell that is too short to gain from it is kept as a whole."""
    raw = np.random.default_rng(1).integers(-40, 41, 3 * CELL + 100).astype(dtype)
    back = round_trip(Case("sparse", {"top_k": top_k}, device).core, raw, dtype)
    for first in range(0, raw.size, CELL):
        cell, found = raw[first : first + CELL], back[first : first + CELL]
        keep = np.argsort(-np.abs(cell), kind="stable")[: int(np.ceil(top_k * cell.size))]
        expected = np.zeros_like(cell)
        expected[keep] = cell[keep]
        assert (found == expected).all()


@each_device
def test_what_is_dropped_is_below_the_threshold_and_no_infinity_is(device):
    raw = np.linspace(-1, 1, 4 * CELL, dtype=np.float32)
    raw[[3, CELL, 2 * CELL + 5]] = np.inf, np.nan, -np.inf
    back = round_trip(Case("sparse", {"threshold": 0.9}, device).core, raw, "float32")
    dropped = np.abs(raw) < np.float32(0.9)
    assert (back[dropped] == 0).all()
    assert back[~dropped].tobytes() == raw[~dropped].tobytes()
    kept = round_trip(Case("sparse", {"top_k": 0.0001}, device).core, raw, "float32")
    assert (np.isfinite(kept) == np.isfinite(raw)).all()
    raw[100:400] = np.resize(np.float32([np.inf, np.nan, -np.inf]), 300)  # more than k
    kept = round_trip(Case("sparse", {"top_k": 0.1}, device).core, raw, "float32")
    assert (
        kept[:CELL].view(np.uint32)
        == np.where(np.isfinite(raw), 0, raw).astype(np.float32).view(np.uint32)[:CELL]
    ).all()


def test_the_bound_says_what_was_dropped():
    raw = np.random.default_rng(3).standard_normal(5 * CELL).astype(np.float32)
    for options in ({"top_k": 0.05}, {"threshold": 1.5, "inner": "block_float4"}):
        core = Case("sparse", options).core
        error = np.abs(round_trip(core, raw, "float32") - raw)
        bound = bound_of(core, raw, "float32")
        assert (error <= bound).all() and (bound <= np.abs(raw).max()).all()
        assert (bound == np.abs(raw))[error == np.abs(raw)].all()


@each_device
def test_a_sums_form_is_chosen_anew(device):
    """Each rank has another tenth of the values: the sum is dense."""
    raws = [np.where(np.arange(CELL) % 10 == rank, 1, 0).astype(np.float32) for rank in range(10)]
    payloads = [encode(EXACT.on(device).core, raw, "float32") for raw in raws]
    assert max(map(len, payloads)) < 64 + 0.14 * 4 * CELL
    found = reduce_encode(
        EXACT.on(device).core, EXACT.on(device).core, payloads, 1.0, CELL, "float32"
    )
    assert len(found) == 64 + 4 + 4 * CELL
    assert (decode(EXACT.on(device).core, found, CELL, "float32") == 1).all()


@each_device
@pytest.mark.parametrize("first", [Case("sparse", {}), Case("cast_bf16", {}), Case("identity", {})])
@pytest.mark.parametrize(
    "second", [Case("sparse", {}), Case("sparse", {"inner": "block_float4"}), Case("cast_bf16", {})]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_sums_pass_between_sparse_and_dense_codecs(device, first, second, dtype):
    raws = [with_zeros(5000, zeros, seed) for seed, zeros in enumerate((0.95, 0.0, 1.0))]
    raws = [reference.store(raw.astype(np.float64), dtype) for raw in raws]
    payloads = [encode(first.core, raw, dtype) for raw in raws]
    model = [reference.model(case.name, case.options, dtype) for case in (first, second)]
    mean = reference.mean(model[0], payloads, 3.0, dtype, 5000)
    found = reduce_encode(
        first.on(device).core, second.on(device).core, payloads, 3.0, 5000, dtype, position=CELL
    )
    assert found[64:] == model[1].body(mean, CELL, 0)


@each_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_every_dtype_comes_back_bit_by_bit(device, dtype, offset):
    rng = np.random.default_rng(5)
    word = unsigned(dtype)
    for n in (0, 1, 31, CELL - 1, CELL, 5 * CELL + 77):
        bits = rng.integers(0, 2 if dtype == "bool" else 1 << (8 * word.itemsize), n, word)
        for zeros in (0.0, 0.7, 0.97, 1.0):
            raw = np.where(rng.random(n) < zeros, word.type(0), bits).view(storage(dtype))
            payload = encode(EXACT.on(device).core, raw, dtype, offset=offset)
            assert payload == encode(EXACT.core, raw, dtype)
            back = decode(EXACT.on(device).core, payload, n, dtype, offset=offset)
            assert back.tobytes() == raw.tobytes()


@each_device
@pytest.mark.parametrize("threshold", [1e-45, 3e-8, 0.01, 1.0, 65503.9, 65510.0, 1e5, 1e300])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_threshold_between_two_values_of_the_dtype(device, dtype, threshold):
    """Each value and its neighbours in the dtype, and sums that are rounded to it."""
    word = unsigned(dtype)
    near, infinity = (
        int(reference.store(np.array([x]), dtype).view(word)[0]) for x in (threshold, np.inf)
    )
    bits = [min(max(near + step, 0), infinity) for step in range(-3, 4)]
    raw = np.zeros(CELL + 300, word)
    raw[::5] = np.resize(np.array(bits, word), raw[::5].size)
    raw = raw.view(storage(dtype))
    case = Case("sparse", {"threshold": threshold})
    payload = encode(case.core, raw, dtype)
    assert encode(case.on(device).core, raw, dtype) == payload
    sums = [encode(EXACT.core, raw, dtype)] * 3
    expected = reduce_encode(EXACT.core, case.core, sums, 1.5, raw.size, dtype)
    on = EXACT.on(device).core, case.on(device).core
    assert reduce_encode(*on, sums, 1.5, raw.size, dtype) == expected


@each_device
@pytest.mark.parametrize("inner", ["identity", "block_float8"])
def test_more_cells_than_a_thread_block_looks_at_together(device, inner):
    """F074: each rank's cells begin elsewhere; the last cell is short."""
    n, case = 700 * CELL + 5, Case("sparse", {"inner": inner})
    raws = [with_zeros(n, zeros, seed) for seed, zeros in enumerate((0.97, 0.2, 1.0))]
    raws = [reference.store(raw.astype(np.float64), "bfloat16") for raw in raws]
    payloads = [encode(case.core, raw, "bfloat16") for raw in raws]
    core = case.on(device).core
    for raw, payload in zip(raws, payloads, strict=True):
        assert encode(core, raw, "bfloat16") == payload
        expected = decode(case.core, payload, n, "bfloat16")
        assert decode(core, payload, n, "bfloat16").tobytes() == expected.tobytes()
    found = reduce(core, payloads, 3.0, n, "bfloat16")
    assert found.tobytes() == reduce(case.core, payloads, 3.0, n, "bfloat16").tobytes()


def _sealed(payload: bytes, body: bytes) -> bytes:
    """The header of `payload`, made to fit, and a body."""
    header = bytearray(payload[:64])
    struct.pack_into("<Q", header, 16, len(body))
    struct.pack_into("<Q", header, 48, reference.checksum(body))
    struct.pack_into("<Q", header, 56, reference.checksum(bytes(header[:56])))
    return bytes(header) + body


def _by_hand(raw: np.ndarray, form: int) -> bytes:
    """A payload whose cells all have that form, whether it is short or not."""
    rows, cells = [], []
    for cell in np.split(raw, range(CELL, raw.size, CELL)):
        places = np.flatnonzero(cell)
        gaps = (np.diff(places, prepend=-1) - 1).tolist()
        where = b"".join(b"\xff" * (gap // 255) + bytes([gap % 255]) for gap in gaps)
        skips = len(where) - places.size
        if form == 1:
            bits = np.zeros(cell.size, np.uint8)
            bits[places] = 1
            where, skips = np.packbits(bits, bitorder="little").tobytes(), 0
        rows.append(struct.pack("<HBB", places.size, form, skips))
        cells.append(where + bytes(-len(where) % 4) + cell[places].tobytes())
    return _sealed(encode(EXACT.core, raw, "float32"), b"".join(rows + cells))


@each_device
@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("zeros", [0.3, 0.5, 0.999, 1.0])
def test_a_reader_takes_forms_that_are_not_the_shortest(device, form, zeros):
    raw = with_zeros(3 * CELL + 1001, zeros)
    payload = _by_hand(raw, form)
    core = EXACT.on(device).core
    assert decode(core, payload, raw.size, "float32").tobytes() == raw.tobytes()
    assert reduce(core, [payload] * 2, 2.0, raw.size, "float32").tobytes() == raw.tobytes()


def test_sizes_beyond_2_to_the_31_values_are_computed_in_64_bits():
    codec = cccl.codec("sparse")
    for count in (2**31 + 1, 2**40 + 1):
        assert codec.max_encoded_bytes(count) == 64 + 4 * (count // CELL + 1) + 4 * count


def _damaged(raw: np.ndarray, edit) -> bytes:
    """A payload with other bytes behind its header, under good check values."""
    payload = bytearray(encode(EXACT.core, raw, "float32"))
    edit(payload)
    return _sealed(bytes(payload), bytes(payload[64:]))


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


@each_device
@pytest.mark.parametrize("name", EDITS)
def test_a_cell_that_contradicts_itself_is_refused(name, device):
    raw, edit = EDITS[name]
    core = EXACT.on(device).core
    assert decode(core, _damaged(raw, lambda p: None), raw.size, "float32").size == raw.size
    payload = _damaged(raw, edit)
    with pytest.raises(cccl.CorruptPayloadError):
        decode(core, payload, raw.size, "float32")
    with pytest.raises(cccl.CorruptPayloadError):
        reduce(core, [payload, payload], 1.0, raw.size, "float32")
    if name != "another inner codec":  # whose payload it then is
        with pytest.raises(cccl.CorruptPayloadError):
            cccl.decode(payload)
