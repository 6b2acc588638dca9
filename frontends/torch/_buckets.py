"""DDP buckets whose parameters go different ways: what goes how."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from .._bucket_plan import Plan, Values, make_plan
from .._by_parameter import unmatched
from .._ways import Ways
from ..errors import ConfigError
from ._call import DTYPES_OF_TORCH


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


def plan_of(
    names: Names, bucket: dist.GradBucket, ways: Ways, step: int, *, after_spike: bool
) -> Plan:
    """How a bucket goes in a step, alike on all ranks."""
    buffer, parameters = bucket.buffer(), bucket.parameters()
    rules = [None if after_spike else names.rule_of(parameter, ways) for parameter in parameters]
    described = [
        (names.of(parameter), tuple(parameter.shape), rule)
        for parameter, rule in zip(parameters, rules, strict=True)
    ]
    dtype = DTYPES_OF_TORCH.get(buffer.dtype, DTYPES_OF_TORCH[torch.float32]).number
    values = Values(dtype, buffer.element_size(), 2 if buffer.is_complex() else 1)
    return make_plan(described, ways, step, values, bucket=bucket.index(), after_spike=after_spike)
