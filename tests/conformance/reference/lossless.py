"""core/codecs/lossless/FORMAT.md"""

from __future__ import annotations

import struct

import numpy as np

from .copies import Identity


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
