"""What the jobs of these tests share; each runs on every rank."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np

import cccl.cupy

EVERYTHING = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send")


def communicator(folder: Any, **options: Any) -> cccl.cupy.Communicator:
    """This process's end of a group of all ranks, which meet in a folder."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options.setdefault("deadline", 20.0)
    where = folder if isinstance(folder, str) else f"file://{folder}"
    return cccl.cupy.Communicator(rank, world, where, **options)


def settings(codec: str = "block_float8", **more: Any) -> cccl.Config:
    """That codec for all collectives."""
    return cccl.Config(compression_type=codec, collective_filter=EVERYTHING, **more)


def values(rank: int, shape: Any, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """A rank's input, which every rank can make."""
    found = np.random.default_rng((seed, rank)).standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * np.random.default_rng((seed, rank, 1)).standard_normal(shape)
    return np.asarray(found, dtype)


def digest(array: np.ndarray) -> str:
    """Of its bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def assert_equal(found: list[Any]) -> None:
    """On all ranks."""
    assert all(one == found[0] for one in found), found
