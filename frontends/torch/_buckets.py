"""DDP buckets whose parameters go different ways: what goes how."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from .. import _core
from .._by_parameter import unmatched
from .._config import Config
from .._pieces import cut
from .._ways import Ways, bits_per_value
from ..errors import ConfigError
from ._call import DTYPES_OF_TORCH
from ._groups import communicator


class Names:
    """Of a model's parameters: the first for what ranks keep of them, all for rules."""

    def __init__(self) -> None:
        self.models: list[dict[tuple[str, ...], tuple[int, ...]]] = []
        self._all: Any = WeakIdKeyDictionary()
        self._numbered: Any = WeakIdKeyDictionary()
        self._checked: Ways | None = None

    def add(self, model: torch.nn.Module) -> None:
        """Knows its parameters from now on."""
        found: Any = WeakIdKeyDictionary()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            found[parameter] = (*found.get(parameter, ()), name)
        for parameter, names in found.items():
            self._all[parameter] = names
        self.models.append({names: tuple(p.shape) for p, names in found.items()})

    def all_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Under which rules find it; none without a model."""
        names: tuple[str, ...] = self._all.get(parameter, ())
        return names

    def of(self, parameter: torch.Tensor) -> str:
        """One; without a model a number in order of appearance."""
        if names := self.all_of(parameter):
            return names[0]
        name: str = self._numbered.setdefault(parameter, f"parameter {len(self._numbered)}")
        return name

    def rule_of(self, parameter: torch.Tensor, ways: Ways) -> int | None:
        """Number of the rule that decides on it."""
        known = self.all_of(parameter)
        if not known and any(rule.name for _, rule in ways.rules):
            raise ConfigError(
                "rules with a name need the names of parameters: register the hook with "
                "cccl.torch.compress(ddp, config), or with "
                "cccl.torch.CompressionState(config=config, model=ddp)"
            )
        return ways.rule_of(known, tuple(parameter.shape))

    def check(self, ways: Ways) -> None:
        """Warns once of rules that decide nothing in any of the models."""
        if self._checked is ways:
            return
        self._checked = ways
        parameters = {names: shape for model in self.models for names, shape in model.items()}
        for text in unmatched(ways.rules, parameters) if parameters else ():
            warnings.warn(text, stacklevel=2)


class Decision(NamedTuple):
    """How a parameter goes: `rule` is its number in `rules`, None where none is of it."""

    name: str
    shape: tuple[int, ...]
    rule: int | None
    way: str
    bucket: int


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
    key: Any = None  # what it holds for


def make_plan(
    names: Names, bucket: dist.GradBucket, ways: Ways, step: int, *, after_spike: bool
) -> Plan:
    """Cuts a bucket, alike on all ranks."""
    parameters, buffer = bucket.parameters(), bucket.buffer()
    counts = [parameter.numel() for parameter in parameters]
    rules = [None if after_spike else names.rule_of(parameter, ways) for parameter in parameters]
    configs = [ways.after_spikes if after_spike else ways.at(step, rule) for rule in rules]
    decisions = [
        Decision(
            names.of(parameter), tuple(parameter.shape), rule, way_name(config), bucket.index()
        )
        for parameter, rule, config in zip(parameters, rules, configs, strict=True)
    ]
    dtype = DTYPES_OF_TORCH.get(buffer.dtype, DTYPES_OF_TORCH[torch.float32]).number
    bits = {id(config): bits_per_value(config, dtype, buffer.element_size()) for config in configs}
    stretches, small = cut(counts, [id(config) for config in configs], bits)
    parts = []
    for stretch in stretches:
        inside = range(stretch.first, stretch.last)
        own = [i for i in inside if i not in stretch.apart]
        label = f"bucket {bucket.index()}" + (", after a spike" if after_spike else "")
        begin = sum(counts[: stretch.first])
        pieces = [
            (decisions[i].name + (" (apart)" if i in stretch.apart else ""), counts[i])
            for i in inside
        ]
        parts.append(Part(
            configs[own[0]], label + label_of(decisions[i] for i in own), begin,
            begin + sum(counts[i] for i in inside), stretch.apart, layout_of(pieces, buffer),
        ))  # fmt: skip
    return Plan(parts, counts, configs, decisions, small)


def label_of(decisions: Iterable[Decision]) -> str:
    """Of a label: the rules that it is of, or none if some have none."""
    rules = {decision.rule for decision in decisions}
    known = sorted(rule for rule in rules if rule is not None)
    return "".join(f", rules[{rule}]" for rule in known) if len(known) == len(rules) else ""


def layout_of(pieces: list[tuple[str, int]], like: torch.Tensor) -> Any:
    values = 2 if like.is_complex() else 1
    return _core.Layout([(name, values * count) for name, count in pieces])


def agree_on(plan: Plan, buffer: torch.Tensor, group: dist.ProcessGroup, step: int) -> None:
    """Ranks compare a plan before it is used; `MismatchError`."""
    ways: dict[str, int] = {}
    for decision in plan.decisions:
        ways[decision.way] = ways.get(decision.way, 0) + 1
    specs = [[codec.spec for codec in config.codecs or ()] for config in plan.configs]
    stretches = [(part.begin, part.end, part.apart) for part in plan.parts]
    communicator(group, buffer.device, plan.configs[0]).agree({
        "collective": "all_reduce",
        "dtype": str(buffer.dtype).removeprefix("torch."),
        "count": str(buffer.numel()),
        "op": "avg",
        "root": "0",
        "plan": f"rules, step {step}",
        "codecs": ", ".join(f"{way} x {count}" for way, count in ways.items()),
        "checks": f"{', '.join(f'{d.name}: {d.way}' for d in plan.decisions)}; {specs} {stretches}",
    })  # fmt: skip


def way_name(config: Config) -> str:
    """Short, for people."""
    first, second = config.compression_type, config.result_type
    return first if second in (None, first) else f"{first} -> {second}"
