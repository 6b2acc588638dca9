"""Values as the accumulators hold them, and the types of tensors."""

from __future__ import annotations

import numpy as np

_F = np.float32


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


def to_single(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(_F)
