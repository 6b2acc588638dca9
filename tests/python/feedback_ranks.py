"""Loopback ranks that keep residuals, and their arithmetic in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from conformance import reference
from conformance.codec_cases import DTYPES, Case
from loopback_ranks import Ranks, assert_same_bits

from cccl import _core

TYPES = ("float32", "bfloat16", "block_float8")


class Remembering(Ranks):
    """Ranks with a store each. `legs` is "sender" or "both"."""

    def __init__(self, world: int, codec: Any, result: Any = None, *, legs: str = "both",
                 type: str = "float32", decay: float = 1.0):  # fmt: skip
        super().__init__(world)
        self.codec, self.result = codec, result or codec
        self.stores = [_core.StateStore() for _ in range(world)]
        self.feedback = _core.FeedbackSettings(True, legs == "both", type, decay)
        self.step = 0

    def submit_in_step(self, arrays: list[np.ndarray], dtype: str, layout: list, **settings: Any):
        """Every rank's call, in place, as a part of the step under way."""
        held = _core.Layout(layout)
        return [
            self.submit(
                rank, "all_reduce", arrays[rank], arrays[rank], dtype, self.codec, self.result,
                store=self.stores[rank], layout=held, feedback=self.feedback, step=self.step,
                **settings,
            )
            for rank in range(self.world)
        ]  # fmt: skip

    def reduce(self, arrays: list[np.ndarray], dtype: str = "float32", layout: Any = None,
               **settings: Any) -> np.ndarray:  # fmt: skip
        """A step of one all_reduce; the output, which all ranks hold alike."""
        self.step += 1
        copies = [array.copy() for array in arrays]
        layout = layout or [("w", arrays[0].size)]
        for work in self.submit_in_step(copies, dtype, layout, **settings):
            assert work.wait(60.0), "the collective did not end"
        assert_same_bits(copies)
        return copies[0]

    def senders(self, name: str = "w") -> np.ndarray:
        """What each rank keeps of the contributions of a parameter, as floats."""
        return np.stack([_kept(store.save(), name) for store in self.stores])


def residual_of(fields: dict[str, Any]) -> np.ndarray:
    """A saved residual's values."""
    if fields["type"] == "float32":
        return np.frombuffer(fields["bytes"], np.float32)
    if fields["type"] == "bfloat16":
        return reference.load(np.frombuffer(fields["bytes"], np.uint16), "bfloat16")
    model = reference.model("block_float8", {}, "float32")
    return model.values(fields["bytes"], fields["count"])


def _kept(states: list[dict[str, Any]], name: str) -> np.ndarray:
    for state in states:
        first = 0
        for piece, count in state["layout"]:
            if piece == name:
                return residual_of(state["sender"])[first : first + count]
            first += count
    raise AssertionError(f"no residual of {name!r}")


class Model:
    """What `Remembering` ranks must do: docs/feedback.md in NumPy."""

    def __init__(self, case: Case, second: Case, dtype: str, world: int, count: int, *,
                 legs: str, type: str, decay: float):  # fmt: skip
        self.first, self.second = (
            reference.model(c.name, c.options, dtype) for c in (case, second)
        )
        self.lossless = [c.core.lossless for c in (case, second)]
        self.dtype, self.type, self.legs, self.count = dtype, type, legs, count
        kind = np.float64 if dtype == "float64" else np.float32
        self.decay = np.float32(decay).astype(kind)
        self.senders = [np.zeros(count, np.float32) for _ in range(world)]
        self.owner = np.zeros(count, np.float32)

    def reduce(self, arrays: list[np.ndarray]) -> np.ndarray:
        number, dtype, count = DTYPES[self.dtype][0], self.dtype, self.count
        payloads = []
        for rank, array in enumerate(arrays):
            corrected = reference.load(array, dtype)
            if not self.lossless[0]:
                corrected = corrected + self.decay * self.senders[rank]
            payloads.append(reference.payload(self.first, corrected, number))
            lost = corrected - reference.decoded(self.first, payloads[-1], count)
            self.senders[rank] = self._stored(lost)
        mean = reference.mean(self.first, payloads, len(arrays), dtype, count)
        remembers = self.legs == "both" and not self.lossless[1]
        if remembers:
            mean = mean + self.decay * self.owner
        values = self.second.values(self.second.body(mean, 0, 0), count)
        if dtype == "float16":
            values = np.where(np.isfinite(values), values.clip(-65504, 65504), values)
        out = reference.store(values, dtype)
        if remembers:
            self.owner = self._stored(mean - reference.load(out, dtype))
        return out

    def _stored(self, lost: np.ndarray) -> np.ndarray:
        lost = lost.astype(np.float32)
        if self.type == "float32":
            return lost
        if self.type == "bfloat16":
            return reference.load(reference.store(lost, "bfloat16"), "bfloat16")
        model = reference.model("block_float8", {}, "float32")
        return model.values(model.body(lost, 0, 0), self.count)
