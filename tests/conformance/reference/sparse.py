"""core/codecs/sparse/FORMAT.md"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .copies import Identity
from .values import store

_F = np.float32


class Sparse:
    """Cells of 2048 values: dense, or values and where they are, by a bitmap or gaps."""

    number, cell = 10, 2048
    own = "sparsity_threshold", "top_k", "threshold"

    def __init__(self, dtype: str, inner: Any, sparsity_threshold: float = 0.5,
                 top_k: float = 0.0, threshold: float = 0.0):  # fmt: skip
        self.inner, self.dtype = inner, dtype
        self.exact = isinstance(inner, Identity)
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
