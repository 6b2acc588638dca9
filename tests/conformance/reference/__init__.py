"""The payload formats in NumPy, written from their specification: no code is shared with the core.

Values travel as float32, those of float64 tensors as float64, as the accumulators do.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .block_float import BlockFloat, random_bits
from .copies import Cast, Identity
from .diff import Diff
from .lossless import Lossless
from .noise import statistics
from .sparse import Sparse
from .values import load, store

__all__ = ["HEADER", "Lossless", "checksum", "decoded", "load", "mean", "model", "payload",
           "random_bits", "statistics", "store"]  # fmt: skip

HEADER = struct.Struct("<IBBBBQQ4BIQQQQ")
MAGIC = 0x504C4343
_HAS_CHECKSUM, _HAS_NON_FINITE = 1, 2


def checksum(data: bytes) -> int:
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint64)
    with np.errstate(over="ignore"):
        return int((words * (2 * np.arange(words.size, dtype=np.uint64) + 1)).sum(dtype=np.uint64))


def model(name: str, options: dict[str, Any], dtype: str) -> Any:
    if name == "identity":
        return Identity(dtype)
    if name == "sparse":
        return _around("identity", Sparse, options, dtype)
    if name == "diff":
        return _around("block_float8", Diff, options, dtype)
    if name == "lossless":
        return Lossless(dtype, **options)
    if name.startswith("cast_"):
        return Cast({"fp16": "float16", "bf16": "bfloat16"}[name.removeprefix("cast_")])
    return BlockFloat(int(name.removeprefix("block_float")), **options)


def _around(default: str, outer: Any, options: dict[str, Any], dtype: str) -> Any:
    """A codec that holds another, whose options are all that are not its own."""
    rest = dict(options)
    own = {name: rest.pop(name) for name in outer.own if name in rest}
    inner = rest.pop("inner", default)
    return outer(dtype, model(inner, rest, dtype), **own)


def payload(codec: Any, values: np.ndarray, dtype_number: int, *, position: int = 0, seed: int = 0,
            origin: int = 0, statistics: int = 0) -> bytes:  # fmt: skip
    """Header and body of accumulator values."""
    body = codec.body(values, position, seed)
    bad = origin or not np.isfinite(values).all()
    flags = _HAS_CHECKSUM | (_HAS_NON_FINITE if bad else 0)
    kept = seed if getattr(codec, "rotated", False) else 0
    fields = [MAGIC, 1, codec.number, dtype_number, flags, values.size, len(body), *codec.params,
              origin, kept, statistics, checksum(body)]  # fmt: skip
    head = HEADER.pack(*fields, 0)[:-8]
    return head + struct.pack("<Q", checksum(head)) + body


def decoded(codec: Any, payload: bytes, count: int) -> np.ndarray:
    """Not yet rounded to the tensor's type."""
    return codec.values(payload[64:], count, HEADER.unpack_from(payload)[-4])


def mean(codec: Any, payloads: list[bytes], divisor: float, dtype: str, count: int) -> np.ndarray:
    """Decoded, summed in rank order and divided once, all in the accumulator's type."""
    real = np.float64 if dtype == "float64" else np.float32
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
