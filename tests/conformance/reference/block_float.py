"""core/codecs/block_float/FORMAT.md"""

from __future__ import annotations

import numpy as np

from .values import to_single

LEVELS = np.array(
    [-127, -97, -77, -61, -47, -33, -21, -10, 0, 12, 23, 35, 49, 65, 84, 107], np.float32
)
CUTS = 128 + np.floor((LEVELS[1:] + LEVELS[:-1]) / 2)
_F = np.float32


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
        single = to_single(values)
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
