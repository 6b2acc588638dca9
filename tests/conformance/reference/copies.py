"""Payloads that hold the values themselves, or each in another type."""

from __future__ import annotations

import numpy as np

from .values import load, store, to_single


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
        return store(to_single(values), self.to).tobytes()

    def values(self, body: bytes, count: int, seed: int = 0) -> np.ndarray:
        kind = np.uint16 if self.to == "bfloat16" else self.to
        return load(np.frombuffer(body, kind), self.to)
