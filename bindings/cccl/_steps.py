"""Steps of a model: their count, and what each one's gradients decide about the next. Knows no
framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ._budget import Budget, Chosen, Key, Sample
from ._by_parameter import Way
from ._spikes import Spikes

if TYPE_CHECKING:
    from ._config import Config


class Steps:
    """As one rank counts them. What it decides by, all ranks hold alike."""

    def __init__(self, step: int):
        self.now = self.next = step
        self.measures = False  # whether buckets are to be measured in this one
        self._generation = 0
        self._spikes, self._budget = Spikes(), Budget()

    def begin(
        self,
        largest: Sequence[float],
        samples: Mapping[Key, Sample],
        generation: int,
        config: Config,
    ) -> bool:
        """The next one, with the largest values of the last one's buckets and samples of them, as
        far as they were looked at; whether there was a spike. `generation`: how often the group
        was recovered: in what failed before, some ranks may have got results and others none."""
        self.now, self.next = self.next, self.next + 1
        if generation != self._generation:
            self._generation, largest, samples = generation, (), {}
            self._spikes, self._budget = Spikes(), Budget()
        spike = self._spikes.found(largest, self.now, config)
        due = self._budget.begin(samples, self.now, config)
        self.measures = due and not self.after_spike
        return spike

    @property
    def after_spike(self) -> bool:
        """Whether this is one of those after a spike."""
        return self._spikes.after(self.now)

    def choice(self, key: Key) -> Way | None:
        """The codecs that a budget chose for a bucket; None: its settings' own."""
        return None if self.measures else self._budget.choice(key)

    def measured(self, key: Key, way: Way) -> tuple[float | None, float | None]:
        """Of a bucket that goes this way: relative error and noise, as far as a budget knows."""
        return self._budget.known(key, way)

    @property
    def history(self) -> list[Chosen]:
        """What a budget chose, measurement by measurement."""
        return [*self._budget.history]
