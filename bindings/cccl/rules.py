"""`rules`: which parameter of a model goes how."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from . import _show
from ._config import Config
from .errors import ConfigError, UnsupportedError
from .profile import entry_of


def add_command(commands: Any) -> None:
    """Adds `rules` to the command line."""
    command = commands.add_parser(
        "rules",
        help="which parameter of a model goes through which codec, and which rule decides it",
        epilog="example: python -m cccl rules train.py:make_model --config cccl.toml --step 100",
    )
    add = command.add_argument
    add("entry", metavar="ENTRY", help="FILE.py:FUNCTION or MODULE:FUNCTION that builds the model")
    add("--config", type=Path, metavar="FILE", help="TOML; without it CCCL_* variables count")
    add("--step", type=int, default=0, help="of training, from 0 (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    try:
        import torch

        from .torch._explain import table
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"rules needs {error.name}: pip install 'cccl[torch]'") from error
    config = Config.load(options.config)
    model = entry_of(options.entry)()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"entry {options.entry!r} returned a {type(model).__name__}; allowed: a function that "
            "returns a torch.nn.Module"
        )
    head, *rows = table(model, config, options.step)
    if options.json:
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows]))
    else:
        _show.table(head, rows)
