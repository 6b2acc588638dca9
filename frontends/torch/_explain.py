"""Which parameter of a model goes how, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._bucket_plan import way_name
from .._config import Config, current_config
from .._names import Names
from .._show import aligned
from ..errors import ConfigError


def explain(
    model: torch.nn.Module,
    config: Config | Mapping[str, Any] | None = None,
    *,
    step: int = 0,
) -> str:
    """A table of the parameters of a model: shape, the rule that decides, and the codec in that
    step of DDP training. None: the configuration of `cccl.configure`.

    Warns of rules that decide nothing. Needs no process group.
    """
    if step < 0:
        raise ConfigError(f"step = {step}; allowed: an integer from 0")
    settings = current_config() if config is None else Config.load(config)
    head, *rows = table(getattr(model, "module", model), settings, step)
    return "\n".join(aligned(head, rows))


def table(model: torch.nn.Module, config: Config, step: int) -> list[list[str]]:
    """Its head and rows."""
    config, names = config.of("all_reduce"), Names(WeakIdKeyDictionary)
    names.add(model.named_parameters(remove_duplicate=False))
    ways = config.ways
    if ways is not None:
        names.check(ways)
    rows = [["parameter", "shape", "rule", "codec"]]
    for parameter in model.parameters():
        rule = None if ways is None else names.rule_of(parameter, ways)
        way = config if ways is None else ways.at(step, rule)
        shown = "-" if rule is None else f"rules[{rule}] ({config.rules[rule]})"
        shape = " x ".join(map(str, parameter.shape)) or "1"
        rows.append([" = ".join(names.all_of(parameter)), shape, shown, way_name(way)])
    return rows
