"""The narrowest codecs whose error, or whose bits, stay within a budget. Knows no framework.

In some steps a bucket goes as `compression_type`, and each rank tries the narrower codecs on values
of the mean that it got. All ranks hold the same bits of it: they measure and decide alike, without
a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._arrays import dtype_named
from ._by_parameter import Way
from ._ways import bits_per_value, with_way

if TYPE_CHECKING:
    from ._config import Config

_PIECES, _PIECE = 16, 1024  # blocks and transforms of all codecs end at multiples of a piece

Key = tuple[int, str, int]  # of a bucket: its number, its first parameter's name, its values


class Sample(NamedTuple):
    """Of a mean of `total` values: some of them, as float32."""

    total: int
    values: np.ndarray


class Measured(NamedTuple):
    """Of a bucket: its number of values, their mean square, and of each codec the squared error
    over the squared values."""

    total: int
    square: float
    errors: dict[str, float]


def pieces_of(count: int) -> tuple[int, int, int]:
    """Which of so many values to look at: how many pieces, their values, and the distance from the
    beginning of one to that of the next."""
    if count <= _PIECES * _PIECE:
        return 1, count, count
    return _PIECES, _PIECE, (count - _PIECE) // (_PIECES - 1) // _PIECE * _PIECE


def measure(sample: Sample, codecs: Mapping[str, Any]) -> Measured | None:
    """With codecs of the core. None where a value is not finite, or all are zero: nothing is known
    then."""
    values = np.ascontiguousarray(sample.values, np.float32)
    if not np.isfinite(values).all():
        return None
    number, errors, squares = dtype_named("float32").number, {}, 0.0
    for name, codec in codecs.items():
        lost, squares = codec.error_sums(values.ctypes.data, values.size, number)
        errors[name] = lost / squares if squares > 0 else 0.0
    return Measured(sample.total, squares / values.size, errors) if squares > 0 else None


def bits_of(config: Config) -> dict[str, float]:
    """Bits per value, as the mean of both legs, of the codecs to choose from: the narrowest first,
    `compression_type` last."""
    number, second = dtype_named("float32").number, config.result_type
    bits = {
        name: bits_per_value(with_way(config, Way(name, second)), number, 4)
        for name in (*config.adaptive_codecs, config.compression_type)
    }
    own = bits.pop(config.compression_type)
    narrower = sorted(bits, key=bits.__getitem__)
    return {name: bits[name] for name in narrower} | {config.compression_type: own}


def within_error(found: Measured, limit: float) -> str:
    """The first codec whose relative error is at most `limit`; the last where none is."""
    names = list(found.errors)
    return next((n for n in names if math.sqrt(found.errors[n]) <= limit), names[-1])


def within_bits(
    found: Mapping[Key, Measured], bits: Mapping[str, float], target: float
) -> dict[Key, str]:
    """Codecs of all buckets that together take at most `target` bits per value, as exact as that
    allows: the bits go where each takes most from the sum of squared errors. The narrowest
    everywhere if even these take more."""
    names = list(bits)
    chosen = dict.fromkeys(found, 0)
    left = sum(one.total * (target - bits[names[0]]) for one in found.values())
    while True:
        steps = []
        for order, (key, one) in enumerate(found.items()):
            for better in range(chosen[key] + 1, len(names)):
                now, then = names[chosen[key]], names[better]
                cost = one.total * (bits[then] - bits[now])
                gain = one.total * one.square * (one.errors[now] - one.errors[then])
                if 0 < cost <= left and gain > 0:
                    steps.append((-gain / cost, order, better, key, cost))
        if not steps:
            return {key: names[place] for key, place in chosen.items()}
        _, _, better, key, cost = min(steps, key=lambda step: step[:3])
        chosen[key], left = better, left - cost


class Budget:
    """What a model's buckets go as, while ranks make the same steps."""

    def __init__(self) -> None:
        self._config: Config | None = None
        self._first = 0  # step that it began with
        self._bits: dict[str, float] = {}
        self._codecs: dict[str, Any] = {}
        self._found: dict[Key, Measured] = {}
        self._choices: dict[Key, str] = {}

    def begin(self, samples: Mapping[Key, Sample], step: int, config: Config) -> bool:
        """At a step, with what was kept of the one before. Whether this one is to be measured."""
        if not config.is_adaptive:
            return False
        if self._config is not config:
            self._config, self._first = config, max(step, config.start_step)
            self._bits = bits_of(config)
            self._codecs = {name: config.codec(name) for name in self._bits}
            self._found, self._choices = {}, {}
        elif samples:
            self._choose(samples, config)
        since = step - self._first
        early = since < config.measure_every and since & (since - 1) == 0  # 0, 1, 2, 4, 8, ...
        return since >= 0 and (early or since % config.measure_every == 0)

    def choice(self, key: Key) -> str | None:
        """The codec of a bucket; None: not known yet."""
        return self._choices.get(key)

    def _choose(self, samples: Mapping[Key, Sample], config: Config) -> None:
        found = {}  # others are of buckets that are no more
        for key, sample in sorted(samples.items(), key=lambda item: item[0]):  # on all ranks alike
            measured = measure(sample, self._codecs) or self._found.get(key)
            if measured is not None:
                found[key] = measured
        self._found = found
        if config.max_relative_error is not None:
            limit = config.max_relative_error
            self._choices = {key: within_error(one, limit) for key, one in found.items()}
        elif config.target_bits is not None:
            self._choices = within_bits(found, self._bits, config.target_bits)
