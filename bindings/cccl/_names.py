"""Names of a model's parameters, and which rule decides on each. Knows no framework."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

from ._by_parameter import unmatched
from ._ways import Ways
from .errors import ConfigError


class Names:
    """The first of a parameter for what ranks keep of it, all for rules: weights may be tied."""

    def __init__(self, new_table: Callable[[], MutableMapping[Any, Any]]):
        """`new_table`: makes a mapping from parameters, by identity, that keeps none alive."""
        self.models: list[dict[tuple[str, ...], tuple[int, ...]]] = []
        self._new_table = new_table
        self._all, self._numbered = new_table(), new_table()
        self._checked: Ways | None = None

    def add(self, parameters: Iterable[tuple[str, Any]]) -> None:
        """Knows a model's from now on: names and parameters, which have a shape."""
        found = self._new_table()
        for name, parameter in parameters:
            found[parameter] = (*found.get(parameter, ()), name)
        for parameter, names in found.items():
            self._all[parameter] = names
        self.models.append({names: tuple(p.shape) for p, names in found.items()})

    def all_of(self, parameter: Any) -> tuple[str, ...]:
        """Under which rules find it; none without a model."""
        names: tuple[str, ...] = self._all.get(parameter, ())
        return names

    def of(self, parameter: Any) -> str:
        """One; without a model a number in order of appearance."""
        if names := self.all_of(parameter):
            return names[0]
        name: str = self._numbered.setdefault(parameter, f"parameter {len(self._numbered)}")
        return name

    def rule_of(self, parameter: Any, ways: Ways) -> int | None:
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
