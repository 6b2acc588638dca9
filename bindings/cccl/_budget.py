"""The narrowest codecs whose error, or whose bits, stay within a budget. Knows no framework.

In some steps a bucket goes as `compression_type`, and each rank tries the narrower codecs on values
of the mean that it got. All ranks hold the same bits of it: they measure and decide alike, without
a message. How far ranks' gradients differ, the owners of shards tell all in the results' headers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ._arrays import dtype_named
from ._by_parameter import Way
from ._ways import bits_per_value, with_way

if TYPE_CHECKING:
    from ._config import Config

_MOST_KEPT = 1 << 16  # choices in the history
_PIECES, _PIECE = 16, 1024  # blocks and transforms of all codecs end at multiples of a piece

Key = tuple[int, str, int]  # of a bucket: its number, its first parameter's name, its values


class Noise(NamedTuple):
    """Of a mean, the same on all ranks: the variance between `ranks` ranks and the square of the
    mean, per value, and the share of zeros in it."""

    variance: float
    square: float
    zeros: float
    ranks: int

    @property
    def relative(self) -> float:
        """The variance of the mean over its square."""
        return self.variance / self.ranks / self.square


class Sample(NamedTuple):
    """Of a mean of `total` values: some of them, as float32, and its noise where that is known."""

    total: int
    values: np.ndarray
    noise: Noise | None = None


class Measured(NamedTuple):
    """Of a bucket: its number of values, their mean square, of each codec the squared error over
    the squared values, and the noise where that is known."""

    total: int
    square: float
    errors: dict[str, float]
    noise: Noise | None = None


class Chosen(NamedTuple):
    """What a bucket goes as from a step on, but for steps that measure: `bits` per value, as the
    mean of both legs. `error` is what the budget limits: the relative error of one encoding or,
    with a noise budget, of the result. `noise` is that of the mean, relative too, where known."""

    step: int
    bucket: int
    parameter: str  # the bucket's first
    way: Way
    bits: float
    error: float
    noise: float | None


def pieces_of(count: int) -> tuple[int, int, int]:
    """Which of so many values to look at: how many pieces, their values, and the distance from the
    beginning of one to that of the next."""
    if count <= _PIECES * _PIECE:
        return 1, count, count
    return _PIECES, _PIECE, (count - _PIECE) // (_PIECES - 1) // _PIECE * _PIECE


def measure(sample: Sample, codecs: Mapping[str, Any], sent: str | None = None) -> Measured | None:
    """With codecs of the core. `sent`: the one that the values were sent with, which would find
    nothing to lose in them: it is tried on values between them and what another makes of them.
    None where a value is not finite, or all are zero: nothing is known then."""
    values, noise = np.ascontiguousarray(sample.values, np.float32), sample.noise
    if not np.isfinite(values).all() or (noise is not None and math.isnan(noise.variance)):
        return None
    number, errors, square = dtype_named("float32").number, {}, 0.0
    other = next((codec for name, codec in codecs.items() if name != sent), None)
    for name, codec in codecs.items():
        tried = values if name != sent or other is None else _between(values, other)
        error, squares = codec.error_sums(tried.ctypes.data, tried.size, number)
        errors[name] = error / squares if squares > 0 else 0.0
        if tried is values:
            square = squares / values.size
    return Measured(sample.total, square, errors, noise) if square > 0 else None


def _between(values: np.ndarray, codec: Any) -> np.ndarray:
    """At a golden section, which is on no grid that a multiple of another's steps is on."""
    number = dtype_named("float32").number
    payload = np.empty(codec.max_encoded_bytes(values.size, number), np.uint8)
    decoded = np.empty_like(values)
    at = values.ctypes.data, values.size, number
    size = codec.encode(*at, payload.ctypes.data, payload.nbytes, 0, 0, False)
    codec.decode(payload.ctypes.data, size, decoded.ctypes.data, values.size, number)
    between: np.ndarray = values + np.float32(0.618034) * (decoded - values)
    return between


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


def bits_of_ways(config: Config) -> dict[Way, float]:
    """The same of all pairs of them for the two legs: that of `compression_type` alone last."""
    number = dtype_named("float32").number
    names = *config.adaptive_codecs, config.compression_type
    ways = [Way(a, b if a != b else None) for a in names for b in names]
    return {way: bits_per_value(with_way(config, way), number, 4) for way in ways}


def within_error(found: Measured, limit: float) -> str:
    """The first codec whose relative error is at most `limit`; the last where none is."""
    names = list(found.errors)
    return next((n for n in names if math.sqrt(found.errors[n]) <= limit), names[-1])


def lost(found: Measured, way: Way) -> float:
    """Expected squared error of a result over the squared mean: that of the ranks' values, which
    their mean averages, and that of the mean. Both are taken to lose the share that was measured
    of the mean; the ranks' values are larger by their noise."""
    first = found.errors[way.compression_type]
    second = found.errors[way.result_type or way.compression_type]
    if found.noise is None or found.noise.square == 0:
        return first + second
    ranks = found.noise.ranks
    return first * (1 + (ranks - 1) * found.noise.relative) / ranks + second


def within_noise(found: Measured, share: float, bits: Mapping[Way, float]) -> Way:
    """The way of the fewest bits, and of these of the least error, whose squared error is at most
    that share of the squared noise; the last where none is, or no noise."""
    *_, widest = bits
    if found.noise is None or found.noise.square == 0:
        return widest
    limit = share * found.noise.relative
    fits = [way for way in bits if lost(found, way) <= limit]
    return min(fits, key=lambda way: (bits[way], lost(found, way)), default=widest)


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
        self._bits_of_ways: dict[Way, float] = {}
        self._codecs: dict[str, Any] = {}
        self._found: dict[Key, Measured] = {}
        self._choices: dict[Key, Way] = {}
        self.history: deque[Chosen] = deque(maxlen=_MOST_KEPT)

    def begin(self, samples: Mapping[Key, Sample], step: int, config: Config) -> bool:
        """At a step, with what was kept of the one before. Whether this one is to be measured."""
        if not config.is_adaptive:
            return False
        if self._config is not config:
            self._config, self._first = config, max(step, config.start_step)
            self._bits = bits_of(config)
            single = {Way(name, config.result_type): bits for name, bits in self._bits.items()}
            self._bits_of_ways = bits_of_ways(config) if config.max_noise_share else single
            self._codecs = {name: config.codec(name) for name in self._bits}
            self._found, self._choices = {}, {}
        elif samples:
            self._choose(samples, config)
            self._record(step)
        since = step - self._first
        early = since < config.measure_every and since & (since - 1) == 0  # 0, 1, 2, 4, 8, ...
        return since >= 0 and (early or since % config.measure_every == 0)

    def choice(self, key: Key) -> Way | None:
        """The codecs of a bucket; None: not known yet."""
        return self._choices.get(key)

    def known(self, key: Key, way: Way) -> tuple[float | None, float | None]:
        """Of a bucket that goes this way: relative error and noise as `Chosen` has them, where they
        were measured."""
        found, config = self._found.get(key), self._config
        if found is None or config is None or way.compression_type not in found.errors:
            return None, None
        if config.max_noise_share is None:
            return math.sqrt(found.errors[way.compression_type]), None
        noise = found.noise
        relative = math.sqrt(noise.relative) if noise is not None and noise.square > 0 else None
        return math.sqrt(lost(found, way)), relative

    def _choose(self, samples: Mapping[Key, Sample], config: Config) -> None:
        found, sent = {}, config.result_type or config.compression_type
        for key, sample in sorted(samples.items(), key=lambda item: item[0]):  # on all ranks alike
            measured = measure(sample, self._codecs, sent) or self._found.get(key)
            if measured is not None:
                found[key] = measured
        self._found = found  # others are of buckets that are no more
        if config.max_noise_share is not None:
            share, bits = config.max_noise_share, self._bits_of_ways
            self._choices = {key: within_noise(one, share, bits) for key, one in found.items()}
            return
        if config.max_relative_error is not None:
            limit = config.max_relative_error
            names = {key: within_error(one, limit) for key, one in found.items()}
        else:
            assert config.target_bits is not None
            names = within_bits(found, self._bits, config.target_bits)
        self._choices = {key: Way(name, config.result_type) for key, name in names.items()}

    def _record(self, step: int) -> None:
        for key, way in self._choices.items():
            error, noise = self.known(key, way)
            assert error is not None
            self.history.append(Chosen(step, *key[:2], way, self._bits_of_ways[way], error, noise))
