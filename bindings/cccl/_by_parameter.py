"""Rules: which parameters, from which step on, go through which codec. Knows no framework."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ._rules import COLLECTIVES, PLAIN, SCHEDULE, is_codec, is_int, is_schedule, to_tuples
from .errors import ConfigError

REGEX = "re:"  # begins a pattern that is a regular expression
_CODEC = "none, or a codec's name"


class Way(NamedTuple):
    """Codecs of the two legs, as they are named in settings; no second: the same."""

    compression_type: str
    result_type: str | None = None


def way_at(step: int, start_step: int, schedule: Sequence[Any], otherwise: Way) -> Way:
    """Plain before `start_step`; then what the schedule says, and before its first step
    `otherwise`."""
    if step < start_step:
        return Way(PLAIN)
    begun = [entry for entry in schedule if entry[0] <= step]
    return Way(*begun[-1][1:]) if begun else otherwise


def _patterns(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _are_patterns(value: Any) -> bool:
    if not isinstance(value, tuple) or not all(isinstance(p, str) and p for p in value):
        return False
    try:
        return all(re.compile(p.removeprefix(REGEX)) for p in value if p.startswith(REGEX))
    except re.error:
        return False


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "compression_type": (_CODEC, lambda v: v == PLAIN or is_codec(v)),
    "result_type": (f"{_CODEC} (or leave it out)", _optional(is_codec)),
    "name": ("a pattern as 'blocks.*.bias', a regular expression as 're:.*norm.*', or a list of "
             "these", _are_patterns),
    "min_ndim": ("an integer from 0", _optional(is_int(0))),
    "max_ndim": ("an integer from 0", _optional(is_int(0))),
    "min_numel": ("an integer from 0", _optional(is_int(0))),
    "max_numel": ("an integer from 0", _optional(is_int(0))),
    "collective": (" or ".join(map(repr, COLLECTIVES)), _optional(lambda v: v in COLLECTIVES)),
    "start_step": ("an integer from 0", is_int(0)),
    "schedule": (SCHEDULE, is_schedule),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rule:
    """One of `rules`: what it is of, and how that goes. All its conditions must hold."""

    compression_type: str
    """Codec, or "none": plain."""

    result_type: str | None = None
    """Codec of the second leg; None: the same."""

    name: tuple[str, ...] = ()
    """Patterns, one of which the parameter's name must match as a whole, as in the shell; "re:..."
    is a regular expression."""

    min_ndim: int | None = None
    max_ndim: int | None = None
    """Dimensions of the parameter: 1 of norms and biases, 2 of matrices and embeddings."""

    min_numel: int | None = None
    max_numel: int | None = None
    """Values of the parameter."""

    collective: str | None = None
    """The operation that it is of; then there are no other conditions."""

    start_step: int = 0
    """Steps before this one go plain."""

    schedule: tuple[Any, ...] = ()
    """From each step on, another codec: (step, codec) or (step, codec, codec of the second leg)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _patterns(self.name))
        object.__setattr__(self, "schedule", to_tuples(self.schedule))
        for key, (allowed, accepts) in _CHECKS.items():
            if not accepts(value := getattr(self, key)):
                raise ConfigError(f"{key} = {value!r}; allowed: {allowed}")
        if self.result_type and self.compression_type == PLAIN:
            raise ConfigError("result_type needs a compression_type that is not 'none'")
        if self.collective and self._conditions:
            raise ConfigError(
                f"collective = {self.collective!r} beside {' and '.join(self._conditions)}; "
                "allowed: rules of a collective, or of parameters, which all go in all_reduce"
            )
        if not (self.collective or self._conditions):
            raise ConfigError(
                "it has no condition: give name, min_ndim, max_ndim, min_numel, max_numel or "
                "collective, or set compression_type outside of rules"
            )

    @property
    def _conditions(self) -> list[str]:
        return [
            f"{key} = {getattr(self, key)!r}"
            for key in ("name", "min_ndim", "max_ndim", "min_numel", "max_numel")
            if getattr(self, key) not in (None, ())
        ]

    def __str__(self) -> str:
        return " and ".join(self._conditions or [f"collective = {self.collective!r}"])

    @property
    def way(self) -> Way:
        """Its codecs without schedule."""
        return Way(self.compression_type, self.result_type)

    def matches(self, names: Iterable[str], shape: Sequence[int]) -> bool:
        """Whether it is of a parameter of that shape with one of these names."""
        numel, ndim = 1, len(shape)
        for size in shape:
            numel *= size
        return (
            (self.min_ndim is None or ndim >= self.min_ndim)
            and (self.max_ndim is None or ndim <= self.max_ndim)
            and (self.min_numel is None or numel >= self.min_numel)
            and (self.max_numel is None or numel <= self.max_numel)
            and (not self.name or any(_fits(n, p) for n in names for p in self.name))
        )


def _fits(name: str, pattern: str) -> bool:
    if pattern.startswith(REGEX):
        return re.fullmatch(pattern.removeprefix(REGEX), name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def rules_of(value: Any) -> Any:
    """Tables as rules. `ConfigError` names the one and its key."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(_rule_of(entry, f"rules[{i}]") for i, entry in enumerate(value))


def _rule_of(entry: Any, where: str) -> Rule:
    if isinstance(entry, Rule):
        return entry
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} = {entry!r}; allowed: a table as {{'name': '*.bias', ...}}")
    for key in entry:
        if key not in _CHECKS:
            near = difflib.get_close_matches(str(key), _CHECKS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(_CHECKS)}"
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}")
    if "compression_type" not in entry:
        raise ConfigError(f"{where}: compression_type is missing; allowed: {_CODEC}")
    try:
        return Rule(**entry)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def first_match(
    rules: Sequence[tuple[int, Rule]], names: Iterable[str], shape: Sequence[int]
) -> int | None:
    """Number of the first rule that a parameter matches."""
    return next((number for number, rule in rules if rule.matches(names, shape)), None)


def unmatched(
    rules: Sequence[tuple[int, Rule]], parameters: Mapping[tuple[str, ...], Sequence[int]]
) -> list[str]:
    """What to say of rules that decide nothing. `parameters`: of each, its names and shape."""
    first = {first_match(rules, names, shape) for names, shape in parameters.items()}
    found = []
    for number, rule in rules:
        if number in first:
            continue
        text = f"rules[{number}] ({rule}) "
        if any(rule.matches(names, shape) for names, shape in parameters.items()):
            found.append(text + "decides nothing: earlier rules have all that it matches")
            continue
        text += "matches no parameter"
        known = [name for names in parameters for name in names]
        near = [n for p in rule.name for n in _nearest(p, known)]
        found.append(text + (f"; nearest names: {', '.join(dict.fromkeys(near))}" if near else ""))
    return found


def _nearest(pattern: str, known: Sequence[str]) -> list[str]:
    """Names like a pattern: compared by what is not a wildcard in it."""
    literal = re.sub(r"\[[^]]*\]|\\?[*?.^$+()|]+", ".", pattern.removeprefix(REGEX)).strip(".")
    plain = {re.sub(r"\.\d+(?=\.|$)", "", name): name for name in reversed(known)}
    tails: dict[str, str] = {}  # so that "*.bais" is like "blocks.0.bias"
    for short, name in plain.items():
        parts = short.split(".")
        for i in range(len(parts)):
            tails.setdefault(".".join(parts[i:]), name)
    literal = re.sub(r"\.\d+(?=\.|$)", "", literal)
    return list(
        dict.fromkeys(tails[t] for t in difflib.get_close_matches(literal, tails, n=3, cutoff=0.5))
    )
