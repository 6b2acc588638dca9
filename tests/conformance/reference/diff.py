"""core/codecs/diff/FORMAT.md"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

_F = np.float32


class Diff:
    """`prediction` is one of the whole tensor."""

    number = 12
    own = ()

    def __init__(self, dtype: str, inner: Any):
        self.inner = inner
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
