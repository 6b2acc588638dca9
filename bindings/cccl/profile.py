"""`profile`: where a training step's time goes, plain and compressed."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _show
from ._config import Config
from .errors import ConfigError, UnsupportedError

_PARTS = {
    "unrecorded": "step, the slowest rank's",
    "step": "step, while recorded",
    "compute": "computation",
    "communication": "communication",
    "communication_exposed": "  exposed: nothing computes",
    "communication_hidden": "  hidden",
    "codec": "encode, sum, decode",
    "codec_exposed": "  exposed",
    "codec_hidden": "  hidden",
    "other": "none of these",
}


def add_command(commands: Any) -> None:
    """Adds `profile` to the command line."""
    command = commands.add_parser(
        "profile",
        help="one process per rank: a training step, plain and compressed, under torch.profiler",
        epilog="example: torchrun --nproc-per-node 2 -m cccl profile train.py:make_step "
        "--codec block_float8 --output profile",
    )
    add = command.add_argument
    add("entry", metavar="ENTRY", help="FILE.py:FUNCTION or MODULE:FUNCTION; it builds a model and "
        "returns a function that trains a step (docs/profile.md)")  # fmt: skip
    add("--codec", default="block_float8", help="name or alias (default: %(default)s)")
    add("--steps", type=int, default=5, help="by the clock, and as many recorded (default: "
        "%(default)s)")  # fmt: skip
    add("--warm-up", type=int, default=3, help="steps before them (default: %(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add("--deadline", type=float, default=300.0, help="seconds per wait (default: %(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="for report.json, timeline.png and traces")
    add("--json", action="store_true", help="one JSON object, from rank 0")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """In each rank's process; 0 once it has measured, whatever it found."""
    config = Config.load({"compression_type": options.codec})
    try:
        launched = importlib.import_module("cccl.torch._launched").launched
        compare = importlib.import_module("cccl.torch.profile").compare
        dist = importlib.import_module("torch.distributed")
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"profile needs {error.name}: pip install 'cccl[torch]'") from error
    make_step = entry_of(options.entry)
    with launched("profile ENTRY", options.device, options.deadline):
        first = dist.get_rank() == 0
        with _show.progress(2, "profile", shown=first) as advance:
            found = compare(make_step, config, steps=options.steps, warm_up=options.warm_up,
                            output=options.output, advance=advance)  # fmt: skip
        dist.barrier()
    if not first:
        return 0
    if options.output is not None:
        (options.output / "report.json").write_text(json.dumps(found, indent=1))
    if options.json:
        print(json.dumps(found))
    else:
        _print(found, options.codec, options.output)
    return 0


def entry_of(text: str) -> Callable[[], Any]:
    """The function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise ConfigError(f"entry = {text!r}; allowed: FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            sys.path.insert(0, str(path.parent))  # for its own imports
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise ConfigError(f"entry {text!r}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"entry {text!r}: {where} has no function {name}")
    return found  # type: ignore[no-any-return]


def _print(found: dict[str, Any], codec: str, output: Path | None) -> None:
    ways, change = [found["none"], found[codec]], found["change"]
    rows = [
        [text, *(f"{1e3 * way['parts'][part]:.2f}" for way in ways)]
        for part, text in _PARTS.items()
    ]
    rows.append(["overlap: hidden share", *(f"{way['overlap_share']:.0%}" for way in ways)])
    rows.append(
        ["payload memory, MB", *(f"{way['memory']['pool_bytes'] / 1e6:.1f}" for way in ways)]
    )
    _show.table(["ms per step", "plain", codec], rows)
    less = 1e3 * change["exposed_less_seconds"]
    print(
        f"step {change['speed_up']:.2f}x as fast; exposed communication "
        f"{abs(less):.1f} ms {'less' if less >= 0 else 'more'}; computation "
        f"{change['compute_longer']:+.0%}; memory {change['memory_added_bytes'] / 1e6:+.1f} MB"
    )
    if not found["compressed"]:
        print("nothing was compressed: is the model in DistributedDataParallel or on backend cccl?")
    if output is not None:
        print(f"pictures and traces: {output}")
