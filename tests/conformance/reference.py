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

    def values(self, body: bytes, count: int) -> np.ndarray:
        kind = np.uint16 if self.dtype == "bfloat16" else self.dtype
        return load(np.frombuffer(body, kind), self.dtype)


class Cast:
    params = (0, 0, 0, 0)

    def __init__(self, to: str):
        self.to, self.number = to, {"float16": 2, "bfloat16": 3}[to]

    def body(self, values: np.ndarray, position: int, seed: int) -> bytes:
        return store(_single(values), self.to).tobytes()

    def values(self, body: bytes, count: int) -> np.ndarray:
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


class BlockFloat:
    def __init__(self, bits: int, block_size: int = 128, rounding: str = "nearest",
                 level: str = "fast"):  # fmt: skip
        self.bits, self.block, self.half = bits, block_size, 1 << (bits - 1)
        self.stochastic = rounding == "stochastic"
        self.searched = level == "best" and bits == 4
        self.number = {8: 4, 4: 5}[bits]
        self.params = (bits, block_size.bit_length() - 1, int(self.searched), 0)

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

    def _linear(
        self,
        x: np.ndarray,
        extreme: np.ndarray,
        opposite: np.ndarray,
        mirrored: np.ndarray,
        position: int,
        seed: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        reach = self.half - (1.0 if self.stochastic else 0.5)
        needed = np.maximum(extreme * _F(1 / self.half), opposite * (_F(1) / _F(reach)))
        scale = self._scale_bits(needed, self.bits)
        scale[(scale == 0) & (extreme > 0)] = 1
        scale |= np.where(mirrored, 0x8000, 0).astype(np.uint16)
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
        reaching = np.maximum(extreme * (_F(1) / _F(127)), opposite * (_F(0.97) / _F(107)))
        tried = [self._try(x, extreme, mirrored, reaching * clip) for clip in (_F(1), _F(0.92))]
        (first, first_codes, first_scale), (second, second_codes, second_scale) = tried
        better = second < first
        return (
            np.where(better[:, None], second_codes, first_codes),
            np.where(better, second_scale, first_scale),
        )

    def _try(self, x: np.ndarray, extreme: np.ndarray, mirrored: np.ndarray,
             magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
        """Error, codes and scale of the codebook with a scale made from `magnitude`."""
        with np.errstate(divide="ignore", over="ignore"):
            weight = np.where(extreme > _F(2.0**-120), _F(1) / extreme, _F(2.0**120)).astype(_F)
        scale = self._scale_bits(magnitude, 8)
        scale[(scale == 0) & (extreme > 0)] = 1
        scale |= np.where(mirrored, 0x8000, 0).astype(np.uint16)
        value = self._value(scale)
        linear = np.clip(np.rint(self._scaled(x, value)) + 128, 0, 255)
        codes = np.searchsorted(CUTS, linear, side="left")
        error = ((x - LEVELS[codes] * value[:, None]) * weight[:, None]) ** 2
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
        bad = ~np.isfinite(x).all(axis=1)
        x[bad] = 0
        top, bottom = (
            np.maximum(x.max(axis=1, initial=0), 0),
            np.maximum(-x.min(axis=1, initial=0), 0),
        )
        mirrored = top > bottom
        extreme, opposite = np.where(mirrored, [top, bottom], [bottom, top])
        if self.searched:
            codes, scale = self._search(x, extreme, opposite, mirrored)
        else:
            codes, scale = self._linear(x, extreme, opposite, mirrored, position, seed)
        codes, scale = codes.astype(np.uint8), scale.astype(np.uint16)
        codes[bad], scale[bad] = self.half, 0x7FC0
        codes = codes.ravel()[:count]
        if self.bits == 4:
            pairs = np.concatenate([codes, np.zeros(count % 2, np.uint8)])
            codes = pairs[::2] | pairs[1::2] << 4
        return codes.tobytes() + bytes(codes.size % 2) + scale.astype("<u2").tobytes()

    def values(self, body: bytes, count: int) -> np.ndarray:
        used = (count * self.bits + 7) // 8
        codes = np.frombuffer(body, np.uint8, used)
        if self.bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=1).ravel()[:count]
        scale = self._value(np.frombuffer(body, "<u2", offset=(used + 1) // 2 * 2))
        level = LEVELS[codes] if self.searched else codes.astype(_F) - _F(self.half)
        return level * np.repeat(scale, self.block)[:count] + _F(0)


def model(name: str, options: dict[str, Any], dtype: str) -> Any:
    if name == "identity":
        return Identity(dtype)
    if name.startswith("cast_"):
        return Cast({"fp16": "float16", "bf16": "bfloat16"}[name.removeprefix("cast_")])
    return BlockFloat(int(name.removeprefix("block_float")), **options)


def payload(codec: Any, values: np.ndarray, dtype_number: int, *, position: int = 0, seed: int = 0,
            origin: int = 0) -> bytes:  # fmt: skip
    """Header and body of accumulator values."""
    body = codec.body(values, position, seed)
    bad = origin or not np.isfinite(values).all()
    flags = _HAS_CHECKSUM | (_HAS_NON_FINITE if bad else 0)
    fields = [MAGIC, 1, codec.number, dtype_number, flags, values.size, len(body), *codec.params,
              origin, 0, 0, checksum(body)]  # fmt: skip
    head = HEADER.pack(*fields, 0)[:-8]
    return head + struct.pack("<Q", checksum(head)) + body


def mean(codec: Any, payloads: list[bytes], divisor: float, dtype: str, count: int) -> np.ndarray:
    """Decoded, summed in rank order and divided once, all in the accumulator's type."""
    real = np.float64 if dtype == "float64" else _F
    total = None
    with np.errstate(over="ignore", invalid="ignore"):
        for data in payloads:
            term = codec.values(data[64:], count).astype(real)
            total = term if total is None else total + term
        if divisor != 1:
            total = total / real(divisor)
        if dtype == "float16":
            total = np.where(np.abs(total) >= 65520, np.copysign(np.inf, total), total).astype(real)
    return total
