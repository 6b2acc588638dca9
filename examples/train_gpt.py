"""The demo: a small GPT trained with plain and with compressed gradients.

Trains the same byte-level GPT on the source files of Python's standard library with DDP over gloo,
once plain and once per codec, on loopback and then behind a limited link (benchmarks/netlab.py,
which needs root and iproute2). Ends in tables; pictures and numbers go to the output folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launch
import report
from gpt import SIZES
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import cccl

PLAIN = "plain"
CODECS = ["block_float8", "block_float4"]
PREDICTED_RATES = [1e9, 10e9]
PIPE_WIDTH = 120  # columns, where there is no terminal to ask
PIPE_LINES = 5  # of progress per run

console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def main() -> int:
    """Returns the exit status."""
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys([PLAIN, *args.codecs]))
    try:
        runs = [train(args, name, args.steps, "--validate") for name in names]
        problem = "--no-lab" if args.no_lab else launch.lab_problem(args.ranks, args.rate)
        lab = []
        if not problem:
            prefix = launch.lab_command(args.ranks, args.rate, args.timeout)
            lab = [train(args, name, args.lab_steps, launcher=prefix) for name in names]
    except launch.RunError as error:
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_gpt.py: interrupted", file=sys.stderr)
        return 130
    tell(args, runs, lab, problem)
    if not all(run["replicas_equal"] for run in runs + lab):
        print("train_gpt.py: replicas differ: see the table", file=sys.stderr)
        return 1
    return 0


def train(
    args: argparse.Namespace,
    codec: str,
    steps: int,
    *flags: str,
    launcher: list[str] | None = None,
) -> dict[str, Any]:
    """One run, with its progress; on loopback, or in the lab under `launcher`."""
    where = f"behind {args.rate}" if launcher else "on loopback"
    options = [f"--codec={codec}", f"--steps={steps}", f"--ranks={args.ranks}"]
    options += [f"--size={args.size}", f"--seed={args.seed}", *flags]
    result = args.output / "runs" / f"{codec}{'-lab' if launcher else ''}.json"
    result.parent.mkdir(exist_ok=True)
    try:
        with progress(f"{codec} {where}", steps) as on_step:
            return launch.train(options, result, on_step, args.timeout, launcher)
    except launch.RunError as error:
        raise launch.RunError(f"{codec} {where}: {error}") from None


@contextlib.contextmanager
def progress(name: str, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Shows steps and their losses: a bar on a terminal, a few lines in a pipe."""
    if not console.is_terminal:

        def print_some(step: int, loss: float) -> None:
            if step * PIPE_LINES // steps > (step - 1) * PIPE_LINES // steps:
                console.print(f"{name}: step {step}/{steps}, loss {loss:.3f}")

        yield print_some
        return
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


def tell(
    args: argparse.Namespace,
    runs: list[dict[str, Any]],
    lab: list[dict[str, Any]],
    problem: str | None,
) -> None:
    """Prints the tables; writes picture and numbers."""
    rate = parse_rate(args.rate)
    rates = sorted({rate, *PREDICTED_RATES}) if lab else PREDICTED_RATES
    console.print()
    console.print(report.loss_table(runs))
    console.print(
        "Sent: payloads of the gradients, per rank (plain: what a ring sends). Loopback is no slow "
        "link: the step there shows "
        "what encoding costs, not what it gains.\n"
    )
    if problem:
        console.print(
            f"Not repeated behind a limited link ({problem}): run this as root with iproute2 "
            "installed and without --no-lab.\n"
        )
    console.print(report.link_table(runs, lab, rates))
    console.print(
        f"Median step (speed-up). {report.FORMULA}; "
        f"computation: {1e3 * report.compute_seconds(runs):.0f} ms."
    )
    if lab:
        console.print(
            "On the wire: per rank, all that the lab counted in the whole run, headers and DDP's "
            "first broadcast of the weights included."
        )
    picture, numbers = args.output / "loss.png", args.output / "results.json"
    report.draw(runs, lab, rate, picture)
    predictions = {f"{r:.0f}": report.predicted_seconds(runs, r) for r in rates}
    settings = {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()}
    found = {
        "settings": settings,
        "loopback": runs,
        "lab": lab,
        "no_lab_because": problem,
        "formula": report.FORMULA,
        "predicted_step_seconds_by_rate": predictions,
    }
    numbers.write_text(json.dumps(found, indent=1))
    console.print(f"\nPicture: {picture}\nNumbers: {numbers}", soft_wrap=True)


def parse_rate(text: str) -> float:
    """An argparse check: "1gbit" in bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", text)
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; allowed: as 100mbit, 1gbit, 10gbit")
    return float(match[1]) * {"mbit": 1e6, "gbit": 1e9}[match[2]]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [name for pair in cccl.codec_names().items() for name in (pair[0], *pair[1])]

    def at_least(least: int) -> Callable[[str], int]:
        def integer(text: str) -> int:
            if int(text) < least:
                raise argparse.ArgumentTypeError(f"{text} is less than {least}")
            return int(text)

        return integer

    def rate(text: str) -> str:
        parse_rate(text)
        return text

    add = parser.add_argument
    add("--steps", type=at_least(1), default=200, help="of each run (default: %(default)s)")
    add("--lab-steps", type=at_least(1), default=30, help="behind the link (default: %(default)s)")
    add("--ranks", type=at_least(2), default=2, help="processes (default: %(default)s)")
    codecs_help = f"of {', '.join(known)} (default: {' '.join(CODECS)})"
    add("--codecs", nargs="+", choices=known, default=CODECS, metavar="CODEC", help=codecs_help)
    add("--size", choices=SIZES, default="small", help="of the model (default: %(default)s)")
    add("--rate", type=rate, default="1gbit", help="of the lab's links (default: %(default)s)")
    add("--no-lab", action="store_true", help="do not repeat it behind a limited link")
    add("--seed", type=at_least(0), default=0, help="of weights and batches (default: 0)")
    add("--timeout", type=at_least(1), default=900, help="seconds per run (default: %(default)s)")
    add("--output", type=Path, default=Path("demo-output"), help="folder (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
