"""Ranks as objects of one process: NumPy arrays over the loopback transport."""

from __future__ import annotations

from typing import Any

import numpy as np
from conformance.codec_cases import DTYPES

from cccl import _core

WORLDS = (1, 2, 3, 5, 7)


class Ranks:
    """A communicator per rank. `with` closes them."""

    def __init__(self, world: int, deadline: float = 20.0):
        self.world = world
        transports = _core.loopback(world)
        self.communicators = [_core.Communicator(t, deadline) for t in transports]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        for communicator in self.communicators:
            communicator.close()

    def submit(
        self,
        rank: int,
        collective: str,
        array: np.ndarray,
        out: np.ndarray,
        dtype: str,
        codec: Any,
        result: Any = None,
        **settings: Any,
    ) -> Any:
        """Starts one rank's call."""
        return self.communicators[rank].submit(
            collective, array.ctypes.data, array.size, out.ctypes.data, out.size,
            DTYPES[dtype][0], codec, result or codec, **settings,
        )  # fmt: skip

    def run(
        self,
        collective: str,
        arrays: list[np.ndarray],
        outs: list[np.ndarray],
        dtype: str,
        codec: Any,
        result: Any = None,
        **settings: Any,
    ) -> list[np.ndarray]:
        """All ranks' calls, to their end; returns the outputs."""
        works = [
            self.submit(r, collective, arrays[r], outs[r], dtype, codec, result, **settings)
            for r in range(self.world)
        ]
        for work in works:
            assert work.wait(60.0), "the collective did not end"
        return outs

    def all_reduce(
        self, arrays: list[np.ndarray], dtype: str, codec: Any, result: Any = None, **settings: Any
    ) -> list[np.ndarray]:
        """In place on copies."""
        copies = [array.copy() for array in arrays]
        return self.run("all_reduce", copies, copies, dtype, codec, result, **settings)


def all_reduce(world: int, arrays: list[np.ndarray], dtype: str, codec: Any, result: Any = None,
               **settings: Any) -> list[np.ndarray]:  # fmt: skip
    """With ranks of its own."""
    with Ranks(world) as ranks:
        return ranks.all_reduce(arrays, dtype, codec, result, **settings)


def assert_same_bits(arrays: list[np.ndarray]) -> None:
    """Promise 1: every rank holds the same bytes."""
    assert len({array.tobytes() for array in arrays}) == 1
