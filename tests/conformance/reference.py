"""The payload formats in NumPy, written from their specification: no code is shared with the core.

Values travel as float32, those of float64 tensors as float64, as the accumulators do.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

HEADER = struct.Struct("<IBBBBQQ4BIQQQQ")
MAGIC = 0x504C4343
LEVELS = np.array(
    [-127, -97, -77, -61, -47, -33, -21, -10, 0, 12, 23, 35, 49, 65, 84, 107], np.float32
)
_HAS_CHECKSUM, _HAS_NON_FINITE = 1, 2
_F = np.float32
CUTS = 128 + np.floor((LEVELS[1:] + LEVELS[:-1]) / 2)


def checksum(data: bytes) -> int:
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint64)
    with np.errstate(over="ignore"):
        return int((words * (2 * np.arange(words.size, dtype=np.uint64) + 1)).sum(dtype=np.uint64))


def load(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(_F)
    return raw.astype(np.float64 if dtype == "float64" else _F)


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to nearest even, once."""
    with np.errstate(over="ignore"):
        return _to_bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(_F).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _single(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(_F)


class Identity:
    number, params = 1, (0, 0, 0, 0)

    def __init__(self, dtype: str):
        self.dtype = dtype

    def body(self, values: np.ndarray, position: int, seed: int) -> bytes:
        return store(values, self.dtype).tobytes()

    def values(self, body: bytes, count: int, seed: int = 0) -> np.ndarray:
        kind = np.uint16 if self.dtype == "bfloat16" else self.dtype
        return load(np.frombuffer(body, kind), self.dtype)


class Cast:
    params = (0, 0, 0, 0)

    def __init__(self, to: str):
        self.to, self.number = to, {"float16": 2, "bfloat16": 3}[to]

    def body(self, values: np.ndarray, position: int, seed: int) -> bytes:
        return store(_single(values), self.to).tobytes()

    def values(self, body: bytes, count: int, seed: int = 0) -> np.ndarray:
        kind = np.uint16 if self.to == "bfloat16" else self.to
        return load(np.frombuffer(body, kind), self.to)


def random_bits(position: int, count: int, seed: int) -> np.ndarray:
    """32 random bits for each position: two rounds of lowbias32 (C. Wellons)."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = x ^ (x >> 16)
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> 15)
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> 16)

    at = np.uint64(position) + np.arange(count, dtype=np.uint64)
    low, high = at.astype(np.uint32), (at >> 32).astype(np.uint32)
    with np.errstate(over="ignore"):
        key = mix(np.uint32(seed >> 32) + np.uint32(0x9E3779B9) * (high + np.uint32(1)))
        return mix(mix(low ^ np.uint32(seed & 0xFFFFFFFF)) + key)


def _hadamard(rows: np.ndarray) -> np.ndarray:
    """Of each row, in float32: sums and differences at distances 1, 2, 4 ... in turn."""
    count, length = rows.shape
    distance = 1
    while distance < length:
        pairs = rows.reshape(count, length // (2 * distance), 2, distance)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([first + second, first - second], axis=2).reshape(count, length)
        distance *= 2
    return rows


class BlockFloat:
    def __init__(self, bits: int, block_size: int = 128, rounding: str = "nearest",
                 level: str = "fast", rotation: str = "none"):  # fmt: skip
        self.bits, self.block, self.half = bits, block_size, 1 << (bits - 1)
        self.stochastic = rounding == "stochastic"
        self.best = level == "best" and bits <= 4
        self.codebook = self.best and bits == 4
        self.rotated = rotation == "hadamard"
        self.number = {8: 4, 4: 5, 6: 6, 5: 7, 3: 8, 2: 9}[bits]
        log2_block = block_size.bit_length() - 1
        self.params = (bits, log2_block, int(self.codebook), int(self.rotated))

    def signs(self, seed: int) -> np.ndarray:
        words = random_bits(1 << 63, self.block // 32, seed)
        bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
        return np.where(bits.ravel(), _F(-1), _F(1))

    def _scale_bits(self, magnitude: np.ndarray, bits: int) -> np.ndarray:
        """bfloat16, rounded up; small enough that 2^(bits-1) x scale is finite."""
        up = (magnitude.astype(_F).view(np.uint32).astype(np.uint64) + 0xFFFF) >> 16
        return np.minimum(up, 0x7F7F - ((bits - 1) << 7)).astype(np.uint16)

    @staticmethod
    def _value(scale: np.ndarray) -> np.ndarray:
        return (scale.astype(np.uint32) << 16).view(_F)

    def _scaled(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """x / scale as the product with the reciprocal, lifted where that would overflow."""
        tiny = np.abs(scale) < _F(2.0**-100)
        lift = np.where(tiny, _F(2.0**64), _F(1))
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(scale == 0, _F(0), _F(1) / (scale * lift)).astype(_F)
        return (x * lift[:, None]) * inverse[:, None]

    def _scale(self, needed: np.ndarray, extreme: np.ndarray, mirrored: np.ndarray,
               bits: int) -> np.ndarray:  # fmt: skip
        scale = self._scale_bits(needed, bits)
        scale[(scale == 0) & (extreme > 0)] = 1
        return scale | np.where(mirrored, 0x8000, 0).astype(np.uint16)

    def _needed(self, extreme: np.ndarray, opposite: np.ndarray) -> np.ndarray:
        reach = self.half - (1.0 if self.stochastic else 0.5)
        return np.maximum(extreme * _F(1 / self.half), opposite * (_F(1) / _F(reach)))

    def _linear(
        self,
        x: np.ndarray,
        extreme: np.ndarray,
        opposite: np.ndarray,
        mirrored: np.ndarray,
        position: int,
        seed: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        scale = self._scale(self._needed(extreme, opposite), extreme, mirrored, self.bits)
        scaled = self._scaled(x, self._value(scale))
        if self.stochastic:
            random = random_bits(position, x.size, seed).reshape(x.shape)
            scaled = np.floor(scaled + (random >> 8).astype(_F) * _F(2.0**-24))
        else:
            scaled = np.rint(scaled)
        return np.clip(scaled + self.half, 0, 2 * self.half - 1), scale

    def _search(self, x: np.ndarray, extreme: np.ndarray, opposite: np.ndarray,
                mirrored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """The scale that reaches the extremes, or a smaller one if its squared error is less."""
        reaching = self._needed(extreme, opposite)
        if self.codebook:
            reaching = np.maximum(extreme * (_F(1) / _F(127)), opposite * (_F(0.97) / _F(107)))
        clip = {4: 0.92, 3: 0.8, 2: 0.65}[self.bits]
        tried = [self._try(x, extreme, mirrored, reaching * share) for share in (_F(1), _F(clip))]
        (first, first_codes, first_scale), (second, second_codes, second_scale) = tried
        better = second < first
        return (
            np.where(better[:, None], second_codes, first_codes),
            np.where(better, second_scale, first_scale),
        )

    def _try(self, x: np.ndarray, extreme: np.ndarray, mirrored: np.ndarray,
             magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
        """Error, codes and scale with a scale made from `magnitude`."""
        with np.errstate(divide="ignore", over="ignore"):
            weight = np.where(extreme > _F(2.0**-120), _F(1) / extreme, _F(2.0**120)).astype(_F)
        bits = 8 if self.codebook else self.bits
        scale = self._scale(magnitude, extreme, mirrored, bits)
        value = self._value(scale)
        half = 1 << (bits - 1)
        codes = np.clip(np.rint(self._scaled(x, value)) + half, 0, 2 * half - 1).astype(int)
        if self.codebook:
            codes = np.searchsorted(CUTS, codes, side="left")
        error = ((x - self._levels(codes) * value[:, None]) * weight[:, None]) ** 2
        sums = np.zeros((x.shape[0], 32), _F)
        for column in range(0, x.shape[1], 32):
            sums += error[:, column : column + 32]
        while sums.shape[1] > 1:
            sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
        return sums[:, 0], codes, scale

    def body(self, values: np.ndarray, position: int, seed: int) -> bytes:
        single = _single(values)
        count = single.size
        blocks = -(-count // self.block)
        x = np.zeros((blocks, self.block), _F)
        x.ravel()[:count] = single
        if self.rotated:
            whole = count // self.block
            with np.errstate(invalid="ignore"):
                x[:whole] = _hadamard(x[:whole] * (self.signs(seed) * _F(1 / self.block)))
        bad = ~np.isfinite(x).all(axis=1)
        x[bad] = 0
        top, bottom = (
            np.maximum(x.max(axis=1, initial=0), 0),
            np.maximum(-x.min(axis=1, initial=0), 0),
        )
        mirrored = top > bottom
        extreme, opposite = np.where(mirrored, [top, bottom], [bottom, top])
        if self.best:
            codes, scale = self._search(x, extreme, opposite, mirrored)
        else:
            codes, scale = self._linear(x, extreme, opposite, mirrored, position, seed)
        codes, scale = codes.astype(np.uint8), scale.astype(np.uint16)
        codes[bad], scale[bad] = self.half, 0x7FC0
        string = np.unpackbits(
            codes.ravel()[:count, None], axis=1, count=self.bits, bitorder="little"
        )
        packed = np.packbits(string, bitorder="little")
        return packed.tobytes() + bytes(packed.size % 2) + scale.astype("<u2").tobytes()

    def _levels(self, codes: np.ndarray) -> np.ndarray:
        return LEVELS[codes] if self.codebook else codes.astype(_F) - _F(self.half)

    def values(self, body: bytes, count: int, seed: int = 0) -> np.ndarray:
        used = (count * self.bits + 7) // 8
        string = np.unpackbits(np.frombuffer(body, np.uint8, used), bitorder="little")
        fields = string[: count * self.bits].reshape(count, self.bits)
        codes = np.packbits(fields, axis=1, bitorder="little").ravel()
        scale = self._value(np.frombuffer(body, "<u2", offset=(used + 1) // 2 * 2))
        values = self._levels(codes) * np.repeat(scale, self.block)[:count] + _F(0)
        if self.rotated:
            whole = count // self.block
            rows = values[: whole * self.block].reshape(whole, self.block)
            self._rotate_back(rows, scale[:whole, None], seed)
        return values

    def _rotate_back(self, rows: np.ndarray, scale: np.ndarray, seed: int) -> None:
        huge = np.abs(scale) >= _F(2.0**100)
        rows *= np.where(huge, _F(1 / self.block), _F(1))
        most = _F((2 - 2**-7) * 2.0**127)
        with np.errstate(over="ignore"):
            back = _hadamard(rows) * (self.signs(seed) * np.where(huge, _F(self.block), _F(1)))
        rows[:] = np.clip(back, -most, most) + _F(0)


class Sparse:
    """Cells of 2048 values: dense, or values and where they are, by a bitmap or gaps."""

    number, cell = 10, 2048

    def __init__(self, dtype: str, inner: str = "identity", sparsity_threshold: float = 0.5,
                 top_k: float = 0.0, threshold: float = 0.0, **options: Any):  # fmt: skip
        self.inner, self.dtype = model(inner, options, dtype), dtype
        self.exact = inner == "identity"
        self.share, self.top_k, self.threshold = sparsity_threshold, top_k, threshold
        self.params = (*self.inner.params[:3], self.inner.number)

    def _kept(self, values: np.ndarray) -> np.ndarray:
        if self.exact and not self.top_k and not self.threshold:
            raw = store(values, self.dtype)
            return raw.view(f"u{raw.itemsize}") != 0
        magnitude = np.abs(values)
        if self.threshold:
            return ~(magnitude < values.dtype.type(self.threshold)) & (magnitude != 0)
        kept = magnitude != 0
        limit = int(np.ceil(self.top_k * values.size)) if self.top_k else values.size
        if kept.sum() > limit:
            order = np.argsort(-np.nan_to_num(magnitude, nan=np.inf), kind="stable")
            kept[order[limit:]] = False
            kept |= ~np.isfinite(values)
        return kept

    def _cell(self, values: np.ndarray, position: int, seed: int) -> tuple[bytes, bytes]:
        """Its row in the directory, and its bytes."""

        def padded(data: bytes) -> bytes:
            return data + bytes(-len(data) % 4)

        places = np.flatnonzero(self._kept(values))
        dense = padded(self.inner.body(values, position, seed))
        if values.size - places.size > self.share * values.size:
            gaps = np.diff(places, prepend=-1) - 1
            skips = int((gaps // 255).sum())
            where = b"".join(b"\xff" * (gap // 255) + bytes([gap % 255]) for gap in gaps.tolist())
            form = 2
            if -(-values.size // 8) <= len(where):
                bits = np.zeros(values.size, np.uint8)
                bits[places] = 1
                where, form, skips = np.packbits(bits, bitorder="little").tobytes(), 1, 0
            held = padded(where) + padded(self.inner.body(values[places], position, seed))
            if len(held) < len(dense):
                return struct.pack("<HBB", places.size, form, skips), held
        return struct.pack("<HBB", values.size, 0, 0), dense

    def body(self, values: np.ndarray, position: int, seed: int) -> bytes:
        cells = [
            self._cell(values[first : first + self.cell], position + first, seed)
            for first in range(0, values.size, self.cell)
        ]
        return b"".join(row for row, _ in cells) + b"".join(held for _, held in cells)

    def _inner_bytes(self, count: int) -> int:
        empty = np.zeros(count, np.float64 if self.dtype == "float64" else _F)
        return len(self.inner.body(empty, 0, 0))

    def values(self, body: bytes, count: int, seed: int = 0) -> np.ndarray:
        found = np.zeros(count, np.float64 if self.dtype == "float64" else _F)
        at = 4 * -(-count // self.cell)
        for index, first in enumerate(range(0, count, self.cell)):
            cell = found[first : first + self.cell]
            held, form, skips = struct.unpack_from("<HBB", body, 4 * index)
            size = {0: 0, 1: -(-cell.size // 8), 2: held + skips}[form]
            where = np.frombuffer(body, np.uint8, size, at)
            places = np.arange(cell.size)
            if form == 1:
                places = np.flatnonzero(np.unpackbits(where, bitorder="little"))
            elif form == 2:
                ends = np.cumsum(where.astype(int) + (where < 255))
                places = ends[where < 255] - 1
            at += size + -size % 4
            size = self._inner_bytes(held)
            if held:
                cell[places] = self.inner.values(body[at : at + size], held)
            at += size + -size % 4
        return found


class Diff:
    """core/codecs/diff/FORMAT.md; `prediction` is one of the whole tensor."""

    number = 12

    def __init__(self, dtype: str, inner: str = "block_float8", **options: Any):
        self.inner = model(inner, options, dtype)
        self.real = np.float64 if dtype == "float64" else _F
        self.params = (*self.inner.params[:3], self.inner.number)
        self.prediction: np.ndarray | None = None
        self.prediction_number = 0

    def _factor(self, x: np.ndarray, p: np.ndarray) -> int:
        def product(a: np.ndarray, b: np.ndarray) -> Any:
            terms = np.zeros((-(-a.size // 16), 16), a.dtype)
            terms.reshape(-1)[: a.size] = a * b
            sums = np.zeros(16, a.dtype)
            for row in terms:
                sums = sums + row
            total = a.dtype.type(0)
            for one in sums:
                total = total + one
            return total

        def blocks(values: np.ndarray) -> Any:
            total = x.dtype.type(0)
            for first in range(0, values.size, 128):
                most = np.abs(values[first : first + 128]).max()
                total = total + most * most
            return total

        with np.errstate(all="ignore"):
            squares = product(p, p)
            wanted = x.dtype.type(64) * (product(x, p) / squares)
            if not (squares > 0 and np.isfinite(wanted)):
                return 0
            code = int(np.rint(np.clip(wanted, -127, 127)))
            rest = x - x.dtype.type(code / 64) * p
            return code if blocks(rest) < blocks(x) else 0

    def body(self, values: np.ndarray, position: int, seed: int) -> bytes:
        if values.size == 0:
            return b""
        codes, rest = [], values.copy()
        for first in range(0, values.size, 2048):
            x = values[first : first + 2048]
            codes.append(0)
            if self.prediction is not None:
                begin = position + first
                p = self.prediction[begin : begin + x.size].astype(x.dtype)
                codes[-1] = self._factor(x, p)
                with np.errstate(all="ignore"):
                    if codes[-1]:
                        rest[first : first + 2048] = x - x.dtype.type(codes[-1] / 64) * p
        factors = np.array(codes, np.int8).tobytes()
        front = struct.pack("<QQ", position, self.prediction_number)
        return front + factors + bytes(-len(factors) % 16) + self.inner.body(rest, position, seed)

    def values(self, body: bytes, count: int, seed: int = 0) -> np.ndarray:
        if count == 0:
            return np.empty(0, self.real)
        position, _ = struct.unpack_from("<QQ", body)
        cells = -(-count // 2048)
        codes = np.frombuffer(body, np.int8, cells, 16)
        values = self.inner.values(body[16 + -(-cells // 16) * 16 :], count, seed)
        values = values.astype(self.real)
        for cell, code in enumerate(codes):
            if code:
                part = values[2048 * cell : 2048 * (cell + 1)]
                begin = position + 2048 * cell
                p = self.prediction[begin : begin + part.size].astype(part.dtype)
                most = np.finfo(part.dtype).max
                with np.errstate(all="ignore"):
                    total = (part + part.dtype.type(code / 64) * p).clip(-most, most)
                part[:] = np.where(np.isfinite(part), total, part)
        return values


class Lossless:
    """Blocks of 4096 values: exponents as digits of their rank in the block's table, or raw."""

    number, params, block = 11, (0, 0, 0, 0), 4096
    coded = ("bfloat16", "float16", "float32")

    def __init__(self, dtype: str, level: str = "fast"):
        self.dtype, self.step = dtype, 1 if level == "best" else 8
        self.elements = Identity(dtype)

    @staticmethod
    def _words(bits: np.ndarray) -> bytes:
        return np.packbits(np.pad(bits, (0, -bits.size % 32)), bitorder="little").tobytes()

    def _digits(self, digits: np.ndarray) -> bytes:
        return self._words(np.stack([digits & 1, digits >> 1], axis=1).astype(np.uint8).ravel())

    def _split(self, raw: bytes) -> tuple[np.ndarray, bytes]:
        """Exponents, and the rest of each value."""

        def padded(data: np.ndarray) -> bytes:
            return data.tobytes() + bytes(-data.nbytes % 4)

        if self.dtype == "float16":
            bits = np.frombuffer(raw, "<u2")
            rest = padded(bits.astype(np.uint8)) + self._digits(bits >> 8 & 3)
            return bits >> 10 & 31, rest + self._words((bits >> 15).astype(np.uint8))
        low = b""
        if self.dtype == "float32":
            halves = np.frombuffer(raw, "<u2").reshape(-1, 2)
            low, bits = padded(halves[:, 0]), halves[:, 1]
        else:
            bits = np.frombuffer(raw, "<u2")
        return bits >> 7 & 255, low + padded((bits >> 8 & 128 | bits & 127).astype(np.uint8))

    def _block(self, raw: bytes) -> bytes:
        exponents, rest = self._split(raw)
        found, counts = np.unique(exponents[:: self.step], return_counts=True)
        table = found[np.argsort(-counts, kind="stable")][:12]
        ranks = np.full(256, 12)
        ranks[table] = np.arange(table.size)
        rank, parts = ranks[exponents], [rest, table.astype(np.uint8).tobytes().ljust(12, b"\0")]
        for plane in range(4):
            parts.append(self._digits(np.minimum(rank[rank >= 3 * plane] - 3 * plane, 3)))
        escapes = exponents[rank == 12].astype(np.uint8).tobytes()
        coded = b"".join([*parts, escapes, bytes(-len(escapes) % 4)])
        return coded if -(-len(coded) // 16) * 16 < len(raw) else raw

    def body(self, values: np.ndarray, position: int, seed: int) -> bytes:
        raw = self.elements.body(values, position, seed)
        if self.dtype not in self.coded:
            return raw
        size = self.block * (len(raw) // max(values.size, 1))
        blocks = [self._block(raw[first : first + size]) for first in range(0, len(raw), size or 1)]
        at, rows, whole = (4 * max(len(blocks) - 1, 0) + 15) // 16 * 16, [], []
        for block in blocks[:-1]:
            whole.append(block + bytes(-len(block) % 16))
            at += len(whole[-1])
            rows.append(at // 16)
        directory = struct.pack(f"<{len(rows)}I", *rows)
        return b"".join([directory, bytes(-len(directory) % 16), *whole, *blocks[-1:]])

    @staticmethod
    def _bits(data: bytes, at: int, count: int) -> tuple[np.ndarray, int]:
        """`count` bits from byte `at` on, and where the next part begins."""
        size = (count + 31) // 32 * 4
        held = np.frombuffer(data, np.uint8, size, at)
        return np.unpackbits(held, count=count, bitorder="little"), at + size

    def _plane(self, data: bytes, at: int, count: int) -> tuple[np.ndarray, int]:
        bits, at = self._bits(data, at, 2 * count)
        return bits[::2] + 2 * bits[1::2].astype(int), at

    def _elements(self, data: bytes, count: int) -> bytes:
        """Of a block that ends with `data`, or before zeros at its end."""
        at, half = 0, self.dtype == "float16"
        low = np.zeros(count, np.uint16)
        if self.dtype == "float32":
            low, at = np.frombuffer(data, "<u2", count), (2 * count + 3) // 4 * 4
        rest = np.frombuffer(data, np.uint8, count, at).astype(np.uint16)
        at += (count + 3) // 4 * 4
        if half:
            pairs, at = self._plane(data, at, count)
            signs, at = self._bits(data, at, count)
        table, at = np.frombuffer(data, np.uint8, 12, at), at + 12
        rank, places = np.zeros(count, int), np.arange(count)
        for _ in range(4):
            digits, at = self._plane(data, at, places.size)
            rank[places] += digits
            places = places[digits == 3]
        exponents = np.append(table, 0)[rank].astype(np.uint16)
        exponents[places] = np.frombuffer(data, np.uint8, places.size, at)
        if half:
            top = signs.astype(np.uint16) << 15 | exponents << 10 | pairs.astype(np.uint16) << 8
            return (top | rest).tobytes()
        bits = (rest & 128) << 8 | exponents << 7 | rest & 127
        both = np.stack([low, bits], axis=1) if self.dtype == "float32" else bits
        return both.astype("<u2").tobytes()

    def values(self, body: bytes, count: int, seed: int = 0) -> np.ndarray:
        if self.dtype not in self.coded:
            return self.elements.values(body, count)
        blocks = -(-count // self.block)
        rows = np.frombuffer(body, "<u4", max(blocks - 1, 0)) * 16
        begins = [(4 * len(rows) + 15) // 16 * 16, *rows.tolist(), len(body)]
        size, raw = 4 if self.dtype == "float32" else 2, b""
        for index in range(blocks):
            n = min(self.block, count - index * self.block)
            data = body[begins[index] : begins[index + 1]]
            raw += data if len(data) == n * size else self._elements(data, n)
        return self.elements.values(raw, count)


def model(name: str, options: dict[str, Any], dtype: str) -> Any:
    if name == "identity":
        return Identity(dtype)
    if name == "sparse":
        return Sparse(dtype, **options)
    if name == "diff":
        return Diff(dtype, **options)

    if name == "lossless":
        return Lossless(dtype, **options)
    if name.startswith("cast_"):
        return Cast({"fp16": "float16", "bf16": "bfloat16"}[name.removeprefix("cast_")])
    return BlockFloat(int(name.removeprefix("block_float")), **options)


def payload(codec: Any, values: np.ndarray, dtype_number: int, *, position: int = 0, seed: int = 0,
            origin: int = 0) -> bytes:  # fmt: skip
    """Header and body of accumulator values."""
    body = codec.body(values, position, seed)
    bad = origin or not np.isfinite(values).all()
    flags = _HAS_CHECKSUM | (_HAS_NON_FINITE if bad else 0)
    kept = seed if getattr(codec, "rotated", False) else 0
    fields = [MAGIC, 1, codec.number, dtype_number, flags, values.size, len(body), *codec.params,
              origin, kept, 0, checksum(body)]  # fmt: skip
    head = HEADER.pack(*fields, 0)[:-8]
    return head + struct.pack("<Q", checksum(head)) + body


def decoded(codec: Any, payload: bytes, count: int) -> np.ndarray:
    """Not yet rounded to the tensor's type."""
    return codec.values(payload[64:], count, HEADER.unpack_from(payload)[-4])


def mean(codec: Any, payloads: list[bytes], divisor: float, dtype: str, count: int) -> np.ndarray:
    """Decoded, summed in rank order and divided once, all in the accumulator's type."""
    real = np.float64 if dtype == "float64" else _F
    total = None
    with np.errstate(over="ignore", invalid="ignore"):
        for data in payloads:
            term = decoded(codec, data, count).astype(real)
            total = term if total is None else total + term
        if divisor != 1:
            total = total / real(divisor)
        if dtype == "float16":
            total = np.where(np.abs(total) >= 65520, np.copysign(np.inf, total), total).astype(real)
    return total
