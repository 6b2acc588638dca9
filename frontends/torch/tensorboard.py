"""Statistics of compressed collectives as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .._stats import stats
from ..errors import ConfigError, UnsupportedError
from ..monitor import since


class Callback:
    """Call it after each step; every `every` steps it writes scalars of what happened since.

    `writer` is a `torch.utils.tensorboard.SummaryWriter`, or the folder of a new one. Under
    `cccl/<label>/<collective>`: `ratio` (bytes of a plain ring over bytes sent), `ms_per_call`,
    `waiting` (share of the collective's time that it waited for the network), `encode_ms`,
    `decode_ms` (sums included), `relative_error`; under `cccl`: `sent_mb` per step, `pool_mb`.
    """

    def __init__(self, writer: Any, *, every: int = 10):
        if every < 1:
            raise ConfigError(f"every = {every}; allowed: steps, from 1")
        if isinstance(writer, str | Path):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ModuleNotFoundError as error:
                raise UnsupportedError(
                    f"TensorBoard needs {error.name}: pip install tensorboard"
                ) from error
            writer = SummaryWriter(str(writer))
        self.writer, self.every = writer, every
        self._before, self._last = stats(), 0

    def __call__(self, step: int) -> None:
        """After step number `step`."""
        if step - self._last < self.every:
            return
        now = stats()
        rows = since(self._before, now)
        for row in rows:
            name, calls = f"cccl/{row['label'] or 'unnamed'}/{row['collective']}", row["calls"]
            sent, busy = row["bytes_sent"], row["total_seconds"]
            scalars = {
                "ratio": row["plain_bytes"] / sent if sent else 1.0,
                "ms_per_call": 1e3 * row["latency_seconds"] / calls,
                "relative_error": row["relative_error"],
            }
            if busy:
                scalars["waiting"] = row["exposed_seconds"] / busy
                scalars["encode_ms"] = 1e3 * row["encode_seconds"] / calls
                both = row["reduce_seconds"] + row["decode_seconds"]
                scalars["decode_ms"] = 1e3 * both / calls
            for key, value in scalars.items():
                self.writer.add_scalar(f"{name}/{key}", value, step)
        sent = sum(row["bytes_sent"] for row in rows) / (step - self._last)
        self.writer.add_scalar("cccl/sent_mb", sent / 1e6, step)
        self.writer.add_scalar("cccl/pool_mb", now["total"]["pool_bytes"] / 1e6, step)
        self._before, self._last = now, step
