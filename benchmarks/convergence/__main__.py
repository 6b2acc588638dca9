"""Whether training with compressed gradients reaches the loss of plain training: a survey.

    python benchmarks/convergence run --workloads gpt-medium --device cuda --jobs 8 --seeds 5
    python benchmarks/convergence report --figures docs/figures

Ranks of one process compute their gradients at the same weights; these go through what the two legs
of an all_reduce do, with the real codecs. Variants of a seed share initial weights and batches.
docs/convergence.md has the method and the results.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from judged import report
from one_run import Settings
from survey import jobs_of, run, sharing
from variants import PLAIN, VARIANTS
from workloads import WORKLOADS, load_digits

import cccl

FILE = Path("convergence.jsonl")


def main(arguments: list[str] | None = None) -> int:
    """0 if all is done; 3 if runs are missing; 2 after an error."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except cccl.Error as error:
        print(f"convergence: {error}", file=sys.stderr)
        return 2


def _survey(options: argparse.Namespace) -> int:
    begun = time.time()
    limit = options.time_limit
    ways = [PLAIN, *(way for way in options.variants if way != PLAIN)]
    settings = Settings(
        steps=options.steps, world=options.world, looks=options.looks,
        rate=options.rate, bucket_bytes=options.bucket_kib << 10, device=options.device,
        digits=None if options.digits is None else str(options.digits.resolve()),
        until=begun + limit if limit else float("inf"),
    )  # fmt: skip
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise cccl.UnsupportedError("device 'cuda': torch finds no CUDA device")
    if any(workload.startswith("digits") for workload in options.workloads):
        load_digits(settings.digits)  # missed now rather than in every run
    jobs = jobs_of(options.workloads, ways, range(options.seeds))
    with sharing(options.mps):
        complete = run(options.file, jobs, settings, options.jobs, options.resume)
    print(f"{time.time() - begun:.0f} s")
    return 0 if complete else 3


def _report(options: argparse.Namespace) -> int:
    print(report(options.file, options.figures, options.margin))
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; allowed: 1 or more")
    return value


def _several(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{value}; allowed: 2 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("convergence", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="train; each run is kept as it ends")
    add = runs.add_argument
    names = ", ".join(WORKLOADS)
    add("--workloads", nargs="+", choices=WORKLOADS, metavar="NAME",
        default=["gpt-medium", "digits-sgd", "digits-adamw"], help=f"of {names}")  # fmt: skip
    add("--variants", nargs="+", choices=VARIANTS, metavar="NAME", default=list(VARIANTS),
        help=f"beside plain (default: all): {', '.join(VARIANTS)}".replace("%", "%%"))  # fmt: skip
    add("--seeds", type=_positive, default=5, help="pairs of each variant (default: %(default)s)")
    add("--steps", type=_positive, default=Settings().steps, help="(default: %(default)s)")
    add("--world", type=_several, default=Settings().world, help="ranks (default: %(default)s)")
    add("--rate", type=float, default=1.0, help="factor of the learning rate (default: 1)")
    add("--looks", type=_positive, default=Settings().looks, help="at the validation loss")
    add("--bucket-kib", type=_positive, default=Settings().bucket_bytes >> 10,
        help="of DDP's buckets (default: %(default)s)")  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=device, help="(default: %(default)s)")
    add("--jobs", type=_positive, default=1, help="runs at a time (default: %(default)s)")
    add("--mps", action="store_true", help="start CUDA's MPS for them")
    add("--digits", type=Path, metavar="FILE", help="scikit-learn's digits.csv.gz")
    add("--time-limit", type=float, metavar="SECONDS", help="then end, with what is done")
    add("--resume", action="store_true", help="go on with the file")
    add("--file", type=Path, default=FILE, help="of the runs (default: %(default)s)")
    runs.set_defaults(run=_survey)
    reports = commands.add_parser("report", help="print tables, draw figures")
    add = reports.add_argument
    add("--file", type=Path, default=FILE, help="of the runs (default: %(default)s)")
    add("--figures", type=Path, metavar="FOLDER", help="draw there")
    add("--margin", type=float, default=0.005, help="of the loss (default: %(default)s)")
    reports.set_defaults(run=_report)
    return parser


if __name__ == "__main__":
    sys.exit(main())
