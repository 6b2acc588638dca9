"""`python -m cccl`: look at this machine, measure on it, and plan with what was measured."""

from __future__ import annotations

import argparse
import sys

from . import __version__, bench, converge, doctor, plan, profile, rules, tune, watch
from .errors import Error


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its status: 0, 1 where `doctor` found problems, `plan` no gain or
    `converge` a loss, 2 after an error that is the user's to mend, 3 where `converge` cannot
    tell."""
    parser = argparse.ArgumentParser(prog="python -m cccl", description=__doc__)
    parser.add_argument("--version", action="version", version=f"cccl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_commands(commands)
    converge.add_command(commands)
    doctor.add_command(commands)
    plan.add_command(commands)
    profile.add_command(commands)
    rules.add_command(commands)
    tune.add_command(commands)
    watch.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except (Error, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
