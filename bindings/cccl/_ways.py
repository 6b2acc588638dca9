"""How each parameter goes at each step, under one configuration."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ._by_parameter import Rule, Way, first_match, way_at
from .errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from ._config import Config


def ways_of(config: Config) -> Iterator[Way]:
    """All that it names, its own first."""
    yield Way(config.compression_type, config.result_type)
    for entry in config.schedule:
        yield Way(*entry[1:])
    for name in config.adaptive_codecs if config.is_adaptive else ():
        yield Way(name, config.result_type)
    for rule in config.rules:
        yield rule.way
        for entry in rule.schedule:
            yield Way(*entry[1:])


def with_way(config: Config, way: Way) -> Config:
    """The configuration of values that go this way whatever they are. A way that loses nothing has
    no error feedback."""
    first = config.codec(way.compression_type)
    second = config.codec(way.result_type) or first
    idle = (
        first is None
        or second is None
        or (first.lossless and (second.lossless or config.error_feedback == "sender"))
    )
    return dataclasses.replace(
        config, compression_type=way.compression_type, result_type=way.result_type, rules=(),
        start_step=0, schedule=(), spike_factor=None, max_relative_error=None, target_bits=None,
        max_noise_share=None, error_feedback="none" if idle else config.error_feedback,
    )  # fmt: skip


def with_rule(config: Config, rule: Rule) -> Config:
    """The configuration of the collective that a rule is of."""
    assert rule.collective is not None
    way = with_way(config, rule.way)
    return dataclasses.replace(
        config, compression_type=rule.compression_type, result_type=rule.result_type,
        rules=tuple(r for r in config.rules if not r.collective),
        start_step=max(config.start_step, rule.start_step), schedule=rule.schedule,
        collective_filter=(*config.collective_filter, rule.collective),
        max_relative_error=None, target_bits=None, max_noise_share=None,
        error_feedback=config.error_feedback if rule.schedule else way.error_feedback,
    )  # fmt: skip


class Ways:
    """Of a configuration whose codecs depend on parameters or steps."""

    def __init__(self, config: Config):
        self._config = config
        self.rules = [(i, rule) for i, rule in enumerate(config.rules) if not rule.collective]
        steps = [config.start_step, *(entry[0] for entry in config.schedule)]
        for _, rule in self.rules:
            steps += [rule.start_step, *(entry[0] for entry in rule.schedule)]
        self._turns = sorted({*steps})
        self._configs: dict[Way, Config] = {}

    @staticmethod
    def needed(config: Config) -> bool:
        """Whether a configuration has any."""
        return bool(
            any(not rule.collective for rule in config.rules)
            or config.start_step
            or config.schedule
            or config.spike_factor
            or config.is_adaptive
        )

    @property
    def budget(self) -> str:
        """The settings of one, if there is one."""
        config = self._config
        if not config.is_adaptive:
            return ""
        return (
            f"; error {config.max_relative_error}, bits {config.target_bits}, noise "
            f"{config.max_noise_share} of {[*config.adaptive_codecs]} every {config.measure_every}"
        )

    def phase(self, step: int) -> int:
        """A number that is the same for steps at which all goes the same way."""
        return bisect.bisect_right(self._turns, step)

    def rule_of(self, names: Sequence[str], shape: Sequence[int]) -> int | None:
        """Number of the rule that decides on a parameter, if one does."""
        return first_match(self.rules, names, shape)

    def at(self, step: int, rule: int | None = None, choice: Way | None = None) -> Config:
        """How what the rule with that number is of goes at a step; None: what no rule is of, for
        which a budget may have made a choice."""
        config = self._config
        if rule is None:
            own = choice or Way(config.compression_type, config.result_type)
            return self._of(way_at(step, config.start_step, config.schedule, own))
        found = config.rules[rule]
        start = max(config.start_step, found.start_step)
        return self._of(way_at(step, start, found.schedule, found.way))

    @property
    def after_spikes(self) -> Config:
        """How all goes after a spike."""
        return self._of(Way(self._config.spike_type))

    def _of(self, way: Way) -> Config:
        found = self._configs.get(way)
        if found is None:
            found = self._configs[way] = with_way(self._config, way)
        return found


def bits_per_value(config: Config, dtype: int, bytes_per_value: int) -> float:
    """At most, as the mean of both legs, of values of the core's dtype with that number."""
    count = 1 << 16
    if config.codecs is None:
        return 8.0 * bytes_per_value
    return sum(8 * codec.max_encoded_bytes(count, dtype) / count for codec in config.codecs) / 2


def check_sent(config: Config, *collectives: str) -> None:
    """Raises `ConfigError` where none of these, all that a model sends, goes compressed."""
    sent = [config.of(name) for name in collectives if name in config.of(name).collective_filter]
    if config.compresses and not sent:
        raise ConfigError(
            f"collective_filter = {list(config.collective_filter)} names nothing that this model "
            f"sends: add {' or '.join(map(repr, collectives))}"
        )


def check_sharded(config: Config, *, steps: bool = True) -> None:
    """Raises `UnsupportedError` for what has no effect on FSDP's reduce-scatters; `steps`: whether
    they are told apart by step."""
    ways = config.of("reduce_scatter").ways
    if ways is None:
        return
    if ways.rules:
        number, rule = ways.rules[0]
        raise UnsupportedError(
            f"rules[{number}] ({rule}) is of parameters, which FSDP does not hand over one by one: "
            "use rules with a collective, or DistributedDataParallel"
        )
    if config.is_adaptive:
        raise UnsupportedError(
            "max_relative_error, target_bits and max_noise_share are of DistributedDataParallel "
            "models: leave them out"
        )
    if config.spike_factor:
        raise UnsupportedError("spike_factor is of DistributedDataParallel models: leave it out")
    if not steps:
        raise UnsupportedError(
            "start_step and schedule need steps, which FSDP1's hook does not tell apart: use "
            "fully_shard (FSDP2) or DistributedDataParallel"
        )
