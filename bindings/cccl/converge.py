"""`converge`: does a training reach the same loss with compressed gradients? Paired runs, a verdict
by a stated rule, and a report."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _converge_report, _show
from ._config import Config
from ._rules import PLAIN
from .errors import ConfigError, UnsupportedError
from .profile import entry_of

MARGIN = 0.005  # of the plain loss: differences within it are no difference
SCORE_MARGIN = 0.02  # of scores, as they are: two points of a hundred
# Quantile 0.95 of Student's t for 1 to 10 degrees of freedom; beyond, the last one is too wide.
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
RULE = (
    "Pairs of runs share seed, data and initial weights. The 90 % interval of the mean of their "
    "relative differences in final loss (Student's t) decides: within the margin, the losses are "
    "the same; else wholly above 0, compressed is worse; wholly below 0, better; else undecided: "
    "more seeds. Replicas that differ are a failure. Scores, where higher is better, are judged "
    "alike by their differences; a score that is worse makes the whole worse, one that is "
    "undecided decides nothing."
)
_STATUS = {"same": 0, "better": 0, "worse": 1, "failed": 1, "undecided": 3}


def add_command(commands: Any) -> None:
    """Adds `converge` to the command line."""
    kinds = commands.add_parser(
        "converge", help="train plain and compressed, several seeds, compare"
    )
    kinds = kinds.add_subparsers(dest="kind", required=True)
    command = kinds.add_parser(
        "run",
        help="one process per rank: the runs that the folder lacks, then the report",
        epilog="example: torchrun --nproc-per-node 2 -m cccl converge run train.py:make "
        "--codec block_float4 --seeds 5 --steps 500 --evaluate tasks.py:accuracy --output converge",
    )
    add = command.add_argument
    add("entry", metavar="ENTRY", help="FILE.py:FUNCTION or MODULE:FUNCTION (docs/converge.md)")
    add("--codec", default="block_float8", help="name or alias (default: %(default)s)")
    add("--seeds", type=int, default=3, help="pairs of runs (default: %(default)s)")
    add("--steps", type=int, default=200, help="of each run (default: %(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add("--deadline", type=float, default=300.0, help="seconds per wait (default: %(default)s)")
    add("--output", type=Path, required=True, metavar="FOLDER", help="of runs and report")
    add(
        "--looks",
        type=int,
        default=4,
        metavar="N",
        help="at validation loss, replicas and errors "
        "of each layer; an interrupted run goes on from its last one (default: %(default)s)",
    )
    add(
        "--evaluate",
        action="append",
        default=[],
        metavar="ENTRY",
        help="FILE.py:FUNCTION that scores what was trained, higher is better; may be repeated",
    )
    _add_judging(command, "the verdict as JSON, from rank 0")
    command.set_defaults(run=run)
    command = kinds.add_parser(
        "report",
        help="the verdict on a folder's runs; status 0: same or better, 1: worse, 3: undecided",
        epilog="example: python -m cccl converge report converge",
    )
    command.add_argument("output", type=Path, metavar="FOLDER")
    _add_judging(command, "one JSON object")
    command.set_defaults(run=run_report)


def _add_judging(command: argparse.ArgumentParser, what: str) -> None:
    add = command.add_argument
    add("--margin", type=float, default=MARGIN, help="(default: %(default)s of the loss)")
    add("--score-margin", type=float, default=SCORE_MARGIN, help="(default: %(default)s)")
    add("--json", action="store_true", help=what)


def run(options: argparse.Namespace) -> int:
    """In each rank's process; 0 once all has run. `converge report` has the verdict's status."""
    config = Config.load({"compression_type": options.codec})
    for module in ("jinja2", "matplotlib"):
        _converge_report.needed(module)  # missed now rather than after hours
    try:
        launched = importlib.import_module("cccl.torch._launched").launched
        pairs = importlib.import_module("cccl.torch.converge").run
        dist = importlib.import_module("torch.distributed")
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"converge needs {error.name}: pip install 'cccl[torch]'") from error
    make = entry_of(options.entry)
    evaluations = {text.rpartition(":")[2]: entry_of(text) for text in options.evaluate}
    if len(evaluations) < len(options.evaluate):
        raise ConfigError(f"evaluate = {options.evaluate}; allowed: functions of different names")
    with launched("converge run ENTRY", options.device, options.deadline):
        first = dist.get_rank() == 0
        with _show.progress(2 * options.seeds, "converge", shown=first) as advance:
            pairs(make, config, seeds=range(options.seeds), steps=options.steps,
                  looks=options.looks, evaluations=evaluations, folder=options.output,
                  advance=advance)  # fmt: skip
        dist.barrier()
    if first:
        run_report(options)
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Judges, writes report.html, prints; the verdict's status."""
    runs = load(options.output)
    found = judge(runs, options.margin, options.score_margin)
    file = options.output / "report.html"
    _converge_report.write(file, runs, found, RULE)
    if options.json:
        print(json.dumps(found))
    else:
        _print(found)
        print(f"report: {file}")
    return _STATUS[found["verdict"]]


def load(folder: str | Path) -> list[dict[str, Any]]:
    """The runs of a folder."""
    try:
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("run-*.json"))]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the runs in {str(folder)!r}: {error}") from error
    if not found:
        raise ConfigError(f"{str(folder)!r} holds no runs: `converge run` makes them")
    return found


def judge(
    runs: Sequence[Mapping[str, Any]], margin: float = MARGIN, score_margin: float = SCORE_MARGIN
) -> dict[str, Any]:
    """By `RULE`, of the runs' `final` losses and their `scores`."""
    for name, value in ("margin", margin), ("score_margin", score_margin):
        if not 0 < value < 1:
            raise ConfigError(f"{name} = {value}; allowed: more than 0 and less than 1, as 0.005")
    plain = {run["seed"]: run for run in runs if run["way"] == PLAIN}
    both = [
        (plain[run["seed"]], run) for run in runs if run["way"] != PLAIN and run["seed"] in plain
    ]
    pairs = [
        {
            "seed": ours["seed"],
            "plain": other["final"],
            "compressed": ours["final"],
            "difference": ours["final"] / other["final"] - 1,
            "replicas_equal": ours["replicas_equal"] and other["replicas_equal"],
        }
        for other, ours in both
    ]
    scores = {
        name: _score([other["scores"][name] for other, _ in both],
                     [ours["scores"][name] for _, ours in both], score_margin)
        for name in (both[0][1]["scores"] if both else ())
    }  # fmt: skip
    found: dict[str, Any] = {
        "margin": margin, "score_margin": score_margin, "pairs": pairs, "interval": None,
        "scores": scores,
    }  # fmt: skip
    differences = [pair["difference"] for pair in pairs]
    broken = [pair["seed"] for pair in pairs if not pair["replicas_equal"]]
    lost = [pair["seed"] for pair in pairs if not math.isfinite(pair["difference"])]
    if broken or lost:
        what = f"replicas differ with seeds {broken}" if broken else f"no finite loss: {lost}"
        return found | {"verdict": "failed", "text": what}
    interval = found["interval"] = _interval(differences)
    if interval is None:
        return found | {"verdict": "undecided", "text": "fewer than two pairs: more seeds"}
    low, high = interval
    verdict = _verdict(low, high, margin)
    text = (
        f"mean difference {statistics.mean(differences):+.3%}, 90 % interval {low:+.3%} to "
        f"{high:+.3%}, {len(pairs)} pairs"
    )
    worse = [name for name, score in scores.items() if score["verdict"] == "worse"]
    if worse:
        verdict, text = "worse", f"{text}; worse in {', '.join(worse)}"
    return found | {"verdict": verdict, "text": text}


def _score(plain: Sequence[float], compressed: Sequence[float], margin: float) -> dict[str, Any]:
    """Higher is better: the loss's rule with the sign turned."""
    interval = _interval([ours - other for other, ours in zip(plain, compressed, strict=True)])
    return {
        "plain": statistics.mean(plain),
        "compressed": statistics.mean(compressed),
        "interval": interval,
        "verdict": _verdict(-interval[1], -interval[0], margin) if interval else "undecided",
    }


def _interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Of their mean, 90 %; None of fewer than two."""
    if len(differences) < 2:
        return None
    mean, free = statistics.mean(differences), len(differences) - 1
    quantile = _T95[min(free, len(_T95)) - 1]
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean - half, mean + half


def _verdict(low: float, high: float, margin: float) -> str:
    if -margin <= low and high <= margin:
        return "same"
    return "worse" if low > 0 else "better" if high < 0 else "undecided"


def _print(found: Mapping[str, Any]) -> None:
    rows = [
        [str(pair["seed"]), f"{pair['plain']:.5f}", f"{pair['compressed']:.5f}",
         f"{pair['difference']:+.3%}", "yes" if pair["replicas_equal"] else "NO"]
        for pair in found["pairs"]
    ]  # fmt: skip
    if rows:
        _show.table(["seed", "plain", "compressed", "difference", "replicas equal"], rows)
    rows = [
        [name, f"{score['plain']:.4f}", f"{score['compressed']:.4f}", score["verdict"]]
        for name, score in found["scores"].items()
    ]
    if rows:
        _show.table(["score", "plain", "compressed", "verdict"], rows)
    print(f"{found['verdict']}: {found['text']} (margin {found['margin']:.2%})")
