"""What becomes of a bucket's parameters under rules: in which parts they go. Knows no framework."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from . import _core
from ._by_parameter import Way
from ._pieces import cut
from ._ways import Ways, bits_per_value

if TYPE_CHECKING:
    from ._config import Config
    from ._names import Names
    from ._steps import Steps


class Decision(NamedTuple):
    """How a parameter goes: `rule` is its number in `rules`, None where none is of it. Where a
    budget chose, and as its bucket was measured last: the relative `error`, and the `noise` of the
    mean (its standard deviation by the variance between ranks, over its root mean square)."""

    name: str
    shape: tuple[int, ...]
    rule: int | None
    way: str
    bucket: int
    error: float | None = None
    noise: float | None = None

    @property
    def share(self) -> float | None:
        """The squared error over that of the noise."""
        return (self.error / self.noise) ** 2 if self.error is not None and self.noise else None


class Values(NamedTuple):
    """Of a bucket: their dtype's name and number in the core, bytes of each, and how many values of
    the core that one is."""

    name: str
    dtype: int
    bytes: int
    reals: int


class Part(NamedTuple):
    """What goes as one tensor: a stretch of the bucket, from one value to another."""

    config: Config
    label: str
    begin: int
    end: int
    apart: tuple[int, ...]  # parameters in it that go as zeros
    layout: Any  # names and values, for what ranks keep


@dataclasses.dataclass(eq=False)
class Plan:
    """Of a bucket, as long as it holds the same parameters and no step changes their ways."""

    parts: list[Part]
    counts: list[int]
    configs: list[Config]
    decisions: list[Decision]
    small: list[int]  # parameters that go with those of other buckets
    free: Part | None  # the largest of what no rule is of
    budget: str  # what chooses its codec
    key: Any = None  # what it holds for

    def fields(self, dtype: str, step: int) -> dict[str, str]:
        """What ranks compare before it is used."""
        ways: dict[str, int] = {}
        for decision in self.decisions:
            ways[decision.way] = ways.get(decision.way, 0) + 1
        specs = [[codec.spec for codec in config.codecs or ()] for config in self.configs]
        stretches = [(part.begin, part.end, part.apart) for part in self.parts]
        chosen = ", ".join(f"{decision.name}: {decision.way}" for decision in self.decisions)
        return {
            "collective": "all_reduce",
            "dtype": dtype,
            "count": str(sum(self.counts)),
            "op": "avg",
            "root": "0",
            "plan": f"rules, step {step}",
            "codecs": ", ".join(f"{way} x {count}" for way, count in ways.items()),
            "checks": f"{chosen}; {specs} {stretches}{self.budget}",
        }


def make_plan(
    parameters: Sequence[tuple[str, tuple[int, ...], int | None]],
    ways: Ways,
    step: int,
    values: Values,
    *,
    bucket: int,
    after_spike: bool,
    choice: Way | None = None,
) -> Plan:
    """Cuts a bucket, alike on all ranks. `parameters`: of each, name, shape and number of its rule;
    `choice`: codecs of those that no rule is of, where a budget chose them."""
    counts = [math.prod(shape) for _, shape, _ in parameters]
    configs = [
        ways.after_spikes if after_spike else ways.at(step, rule, choice)
        for _, _, rule in parameters
    ]
    decisions = [
        Decision(*parameter, way_name(config), bucket)
        for parameter, config in zip(parameters, configs, strict=True)
    ]
    bits = {id(config): bits_per_value(config, values.dtype, values.bytes) for config in configs}
    stretches, small = cut(counts, [id(config) for config in configs], bits)
    parts, free = [], []
    for stretch in stretches:
        inside = range(stretch.first, stretch.last)
        own = [i for i in inside if i not in stretch.apart]
        label = f"bucket {bucket}" + (", after a spike" if after_spike else "")
        begin = sum(counts[: stretch.first])
        pieces = [
            (decisions[i].name + (" (apart)" if i in stretch.apart else ""), counts[i])
            for i in inside
        ]
        parts.append(Part(
            configs[own[0]], label + label_of(decisions[i] for i in own), begin,
            begin + sum(counts[i] for i in inside), stretch.apart, layout_of(pieces, values.reals),
        ))  # fmt: skip
        free += [parts[-1]] if any(decisions[i].rule is None for i in own) else []
    largest = max(free, key=lambda part: part.end - part.begin, default=None)
    return Plan(parts, counts, configs, decisions, small, largest, ways.budget)


class Together(NamedTuple):
    """What small parameters of several buckets go as."""

    config: Config
    label: str
    layout: Any


K = TypeVar("K", bound=Hashable)


def joined(small: Iterable[tuple[Plan, int, K, int]]) -> dict[K, Together]:
    """Of each kind, the small parameters of buckets in their order. `small`: of each the plan, its
    number there, its kind (which no two configurations share) and `Values.reals`."""
    chosen: dict[K, list[tuple[Plan, int, int]]] = {}
    for plan, i, kind, reals in small:
        chosen.setdefault(kind, []).append((plan, i, reals))
    found = {}
    for kind, members in chosen.items():
        plan, first, reals = members[0]
        decisions = [plan.decisions[i] for plan, i, _ in members]
        pieces = [(plan.decisions[i].name, plan.counts[i]) for plan, i, _ in members]
        label = "small parameters" + label_of(decisions)
        found[kind] = Together(plan.configs[first], label, layout_of(pieces, reals))
    return found


class Plans:
    """Of buckets in use, each for what it was made for."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._made: dict[Any, dict[Way | None, Plan]] = {}  # of each bucket, by a budget's choice
        self._used: dict[Any, Plan] = {}  # the last of each

    def of(
        self, bucket: int, parameters: Sequence[Any], values: Values, ways: Ways, steps: Steps,
        where: Hashable, choice: Way | None, agree: Callable[[dict[str, str]], None],
    ) -> Plan:  # fmt: skip
        """How a bucket of these parameters, which have a shape, goes in this step. `where`: what
        else it is made for. Ranks compare with `agree` when it is made."""
        ids = [id(parameter) for parameter in parameters]
        place = bucket, ids[0]
        key = ways, where, ways.phase(steps.now), steps.after_spike, values, ids
        plan = self._made.get(place, {}).get(choice)
        if plan is None or plan.key != key:
            self._names.check(ways)
            plan = self._make(bucket, parameters, values, ways, steps, choice)
            plan.key = key
            agree(plan.fields(values.name, steps.now))
            for other, old in list(self._used.items()):  # from before buckets were rebuilt
                if (other, old.key) != (place, key) and not {*ids}.isdisjoint(old.key[-1]):
                    del self._used[other], self._made[other]
            self._made.setdefault(place, {})[choice] = plan
        self._used[place] = plan
        return plan

    def _make(
        self, bucket: int, parameters: Sequence[Any], values: Values, ways: Ways, steps: Steps,
        choice: Way | None,
    ) -> Plan:  # fmt: skip
        names, after = self._names, steps.after_spike
        rules = [None if after else names.rule_of(parameter, ways) for parameter in parameters]
        described = [
            (names.of(parameter), tuple(parameter.shape), rule)
            for parameter, rule in zip(parameters, rules, strict=True)
        ]
        return make_plan(
            described, ways, steps.now, values, bucket=bucket, after_spike=after, choice=choice
        )

    def decisions(self, steps: Steps) -> list[Decision]:
        """Of all their parameters, with what was measured of buckets."""
        found = []
        for (bucket, _), plan in sorted(self._used.items(), key=lambda item: item[0]):
            key = bucket, plan.decisions[0].name, sum(plan.counts)
            for decision, config in zip(plan.decisions, plan.configs, strict=True):
                if decision.rule is None:
                    way = Way(config.compression_type, config.result_type)
                    error, noise = steps.measured(key, way)
                    decision = decision._replace(error=error, noise=noise)
                found.append(decision)
        return found


def label_of(decisions: Iterable[Decision]) -> str:
    """Of a label: the rules that it is of, or none if some have none."""
    rules = {decision.rule for decision in decisions}
    known = sorted(rule for rule in rules if rule is not None)
    return "".join(f", rules[{rule}]" for rule in known) if len(known) == len(rules) else ""


def layout_of(pieces: Iterable[tuple[str, int]], reals: int) -> Any:
    """What the core keeps residuals by; `reals`: values of the core in each value."""
    return _core.Layout([(name, reals * count) for name, count in pieces])


class Layouts:
    """Of buckets that go as one: residuals belong to parameters, however buckets are built."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[tuple[str, int]], Any]] = {}

    def of(self, bucket: int, pieces: list[tuple[str, int]]) -> Any:
        """By names and values of its parameters."""
        known = self._known.get(bucket)
        if known is None or known[0] != pieces:
            known = self._known[bucket] = pieces, _core.Layout(pieces)
        return known[1]


def way_name(config: Config) -> str:
    """Short, for people."""
    first, second = config.compression_type, config.result_type
    return first if second in (None, first) else f"{first} -> {second}"
