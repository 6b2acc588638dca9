"""Steps whose gradients are suddenly huge or not finite. Knows no framework."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._config import Config

_log = logging.getLogger("cccl")
_FEWEST, _MOST = 8, 64  # steps that tell what is usual


class Spikes:
    """Goes by the largest mean gradient of each step. A maximum is the same in whatever order a
    processor takes it, and all ranks hold the same means: so they decide alike."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_MOST)
        self._until = 0

    def found(self, values: Sequence[float], step: int, config: Config) -> bool:
        """Before a step: whether the one before, whose buckets had these largest, had a spike."""
        if not values or config.spike_factor is None:
            return False
        largest = max(values) if all(map(math.isfinite, values)) else math.inf
        known = len(self._usual) >= _FEWEST
        usual = statistics.median(self._usual) if known else math.inf
        if math.isfinite(largest):
            self._usual.append(largest)
            if largest <= config.spike_factor * usual:
                return False
        self._until = step + config.spike_steps
        _log.warning(
            "step %d: the largest mean gradient was %g (usually %s); the next %d steps go as %s",
            step - 1, largest, f"{usual:g}" if known else "not known yet", config.spike_steps,
            config.spike_type,
        )  # fmt: skip
        return True

    def after(self, step: int) -> bool:
        """Whether a step is one of those after a spike."""
        return step < self._until
