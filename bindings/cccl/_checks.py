"""Settings that do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._budget import bits_of
from ._by_parameter import Way
from ._rules import AUTO, OFF, PLAIN, RULES
from ._ways import ways_of
from .errors import ConfigError

if TYPE_CHECKING:
    from ._config import Config


def check(config: Config) -> None:
    """Raises `ConfigError` that names them."""
    _check_feedback(config)
    _check_budget(config)
    if any(not rule.collective for rule in config.rules) and "all_reduce" not in (
        *config.collective_filter, *(rule.collective for rule in config.rules)
    ):  # fmt: skip
        raise ConfigError(
            f"collective_filter = {list(config.collective_filter)} beside rules of parameters, "
            "whose gradients go in all_reduce: add 'all_reduce'"
        )
    if config.hierarchy != OFF and config.compression_type == AUTO:
        raise ConfigError(
            f"hierarchy = {config.hierarchy!r} needs a codec named as compression_type: 'auto' "
            "measures flat collectives"
        )
    candidates = map(config.codec, config.auto_codecs if config.compression_type == AUTO else ())
    if any(codec is not None and codec.predicts for codec in candidates):
        raise ConfigError(
            f"auto_codecs = {config.auto_codecs!r}; allowed: none that predicts (diff), as what it "
            "goes by would be of another step"
        )
    kept = config.codec(config.weights_type)
    if kept is not None and not kept.lossless:
        raise ConfigError(
            f"weights_type = {config.weights_type!r}; allowed: {RULES['weights_type'][0]}. To send "
            "weights through a codec that loses bits, add 'all_gather' or 'broadcast' to "
            "collective_filter"
        )


def _check_budget(config: Config) -> None:
    """Refuses a budget that has nothing to choose from."""
    if not config.is_adaptive:
        return
    budgets = "max_relative_error", "target_bits", "max_noise_share"
    given, *more = (name for name in budgets if getattr(config, name) is not None)
    if more:
        raise ConfigError(f"{given} and {' and '.join(more)}: allowed is one of them")
    if config.compression_type in (PLAIN, AUTO):
        raise ConfigError(
            f"{given} needs a codec named as compression_type, which is "
            f"{config.compression_type!r}: the widest that it may choose"
        )
    if config.max_noise_share is not None and config.result_type is not None:
        raise ConfigError(
            f"max_noise_share beside result_type = {config.result_type!r}: it chooses both legs' "
            "codecs; leave result_type out"
        )
    if config.max_noise_share is not None and config.hierarchy != OFF:
        raise ConfigError(
            f"max_noise_share beside hierarchy = {config.hierarchy!r}: between hosts go sums, and "
            "a rank would know the noise of its lane alone. Use max_relative_error, or hierarchy = "
            "'off'"
        )
    if config.schedule:
        raise ConfigError(f"{given} beside schedule: each chooses the codec; allowed is one")
    for name in (config.compression_type, *config.adaptive_codecs):
        codec = config.codec(name)
        if codec is None or codec.predicts or codec.lossless or not codec.fixed_size:
            raise ConfigError(
                f"{given} cannot choose {name!r}; allowed: codecs that lose something and whose "
                "size does not depend on the values"
            )
    bits = bits_of(config)
    for name in config.adaptive_codecs:
        if bits[name] > bits[config.compression_type]:
            raise ConfigError(
                f"adaptive_codecs = {list(config.adaptive_codecs)}: {name!r} takes more bits than "
                f"compression_type {config.compression_type!r}, which must be the widest"
            )


def _check_feedback(config: Config) -> None:
    """Refuses error feedback where there would be none."""
    if config.error_feedback == "none":
        return
    problems = [_feedback_problem(config, way) for way in ways_of(config)]
    if all(problems):
        raise ConfigError(f"error_feedback = {config.error_feedback!r} needs {problems[0]}")


def _feedback_problem(config: Config, way: Way) -> str:
    first = config.codec(way.compression_type)
    second = config.codec(way.result_type) or first
    if first is None or second is None:
        return f"a codec named as compression_type, which is {way.compression_type!r}"
    if not {"all_reduce", "reduce_scatter"} & {*config.collective_filter}:
        return "all_reduce or reduce_scatter in collective_filter"
    if first.lossless and second.lossless:
        return f"a codec that loses something, which {first.name} does not"
    if config.error_feedback == "sender" and first.lossless:
        return f"a first leg that loses something, which {first.name} does not"
    return ""
