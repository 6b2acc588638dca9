"""Where settings are read from beside code: TOML files and the environment."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from ._rules import AUTO, OFF, RULES
from .errors import ConfigError

_TABLES = ("rules", "schedule")
_NUMBERS = ("deadline", "top_k", "threshold", "spike_factor", "max_relative_error", "target_bits",
            "max_noise_share")  # fmt: skip


def nearest(key: str, known: list[str]) -> str:
    """The end of an error about an unknown key."""
    near = difflib.get_close_matches(str(key), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(known)}"


def read_toml(path: Path) -> dict[str, Any]:
    """Settings at the top level of a file, or in its table `[cccl]`."""
    values = read_toml_file(path)
    section = values.get("cccl", values)
    return dict(section) if isinstance(section, dict) else {"cccl": section}


def read_toml_file(path: Path) -> dict[str, Any]:
    """All that a file holds."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        with path.open("rb") as file:
            return dict(tomllib.load(file))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is no valid TOML: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read configuration {str(path)!r}: {error}") from error


def environment(cls: Any) -> dict[str, Any]:
    """Settings of the configuration's class, from `CCCL_<FIELD>`."""
    fields = {f"CCCL_{field.name.upper()}": field for field in dataclasses.fields(cls)}
    values = {}
    for variable, text in os.environ.items():
        if variable in fields:
            values[fields[variable].name] = _parse(variable, fields[variable], text)
        elif variable.startswith("CCCL_"):
            near = difflib.get_close_matches(variable, list(fields), n=1, cutoff=0.85)
            if near:
                warnings.warn(f"{variable} is not used; did you mean {near[0]}?", stacklevel=4)
    return values


def _parse(variable: str, field: dataclasses.Field[Any], text: str) -> Any:
    """An environment variable's text as the type that its field's default has; tables in JSON."""
    key, default = field.name, field.default
    try:
        if key in _TABLES or (key == "hierarchy" and text not in (OFF, AUTO)):
            return json.loads(text)
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if isinstance(default, bool):
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        if isinstance(default, int) or (key == "window" and text != "auto"):
            return int(text)
        if isinstance(default, float) or key in _NUMBERS:
            return float(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{variable} = {text!r}; allowed: {RULES[key][0]}") from None
    return text
