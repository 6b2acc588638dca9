"""`python -m cccl`: measure codecs and collectives on this machine."""

from __future__ import annotations

import argparse
import sys

from . import __version__, bench
from .errors import Error


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns 0, or 2 after an error that is the user's to mend."""
    parser = argparse.ArgumentParser(prog="python -m cccl", description=__doc__)
    parser.add_argument("--version", action="version", version=f"cccl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    bench.add_commands(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (Error, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
