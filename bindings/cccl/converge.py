"""`converge`: does a training reach the same loss with compressed gradients? Paired runs, a verdict
by a stated rule, and a report."""

from __future__ import annotations

import argparse
import base64
import importlib
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _show, _timeline
from ._config import Config
from ._rules import PLAIN
from .errors import ConfigError, UnsupportedError
from .profile import entry_of

MARGIN = 0.005  # of the plain loss: differences within it are no difference
# Quantile 0.95 of Student's t for 1 to 10 degrees of freedom; beyond, the last one is too wide.
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
RULE = (
    "Pairs of runs share seed, data and initial weights. The 90 % interval of the mean of their "
    "relative differences in final loss (Student's t) decides: within the margin, the losses are "
    "the same; else wholly above 0, compressed is worse; wholly below 0, better; else undecided: "
    "more seeds. Replicas that differ are a failure."
)
_STATUS = {"same": 0, "better": 0, "worse": 1, "failed": 1, "undecided": 3}
_TEMPLATE = """<!doctype html><meta charset="utf-8"><title>cccl converge: {{ codec }}</title>
<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:.2em .8em;
text-align:right}img{max-width:100%}</style>
<h1>{{ codec }}: {{ verdict.verdict }}</h1>
<p>{{ verdict.text }}</p><p>{{ rule }} Margin: {{ "%.2f" % (100 * verdict.margin) }} %.</p>
<img src="data:image/png;base64,{{ picture }}" alt="losses">
<table><tr><th>seed<th>plain<th>{{ codec }}<th>difference<th>replicas equal</tr>
{% for row in verdict.pairs %}<tr><td>{{ row.seed }}<td>{{ "%.5f" % row.plain }}
<td>{{ "%.5f" % row.compressed }}<td>{{ "%+.3f" % (100 * row.difference) }} %
<td>{{ "yes" if row.replicas_equal else "NO" }}</tr>{% endfor %}</table>
<p>Settings: <code>{{ settings }}</code></p>"""


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
        "--codec block_float4 --seeds 5 --steps 500 --output converge",
    )
    add = command.add_argument
    add("entry", metavar="ENTRY", help="FILE.py:FUNCTION or MODULE:FUNCTION (docs/converge.md)")
    add("--codec", default="block_float8", help="name or alias (default: %(default)s)")
    add("--seeds", type=int, default=3, help="pairs of runs (default: %(default)s)")
    add("--steps", type=int, default=200, help="of each run (default: %(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add("--deadline", type=float, default=300.0, help="seconds per wait (default: %(default)s)")
    add("--output", type=Path, required=True, metavar="FOLDER", help="of runs and report")
    add("--margin", type=float, default=MARGIN, help="(default: %(default)s of the loss)")
    add("--json", action="store_true", help="the verdict as JSON, from rank 0")
    command.set_defaults(run=run)
    command = kinds.add_parser(
        "report",
        help="the verdict on a folder's runs; status 0: same or better, 1: worse, 3: undecided",
        epilog="example: python -m cccl converge report converge",
    )
    command.add_argument("output", type=Path, metavar="FOLDER")
    command.add_argument("--margin", type=float, default=MARGIN, help="(default: %(default)s)")
    command.add_argument("--json", action="store_true", help="one JSON object")
    command.set_defaults(run=run_report)


def run(options: argparse.Namespace) -> int:
    """In each rank's process; 0 once all has run. `converge report` has the verdict's status."""
    config = Config.load({"compression_type": options.codec})
    for module in ("jinja2", "matplotlib"):
        _needed(module)  # missed now rather than after hours
    try:
        launched = importlib.import_module("cccl.torch._launched").launched
        pairs = importlib.import_module("cccl.torch.converge").run
        dist = importlib.import_module("torch.distributed")
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"converge needs {error.name}: pip install 'cccl[torch]'") from error
    make = entry_of(options.entry)
    with launched("converge run ENTRY", options.device, options.deadline):
        first = dist.get_rank() == 0
        with _show.progress(2 * options.seeds, "converge", shown=first) as advance:
            pairs(make, config, seeds=range(options.seeds), steps=options.steps,
                  folder=options.output, advance=advance)  # fmt: skip
        dist.barrier()
    if first:
        run_report(options)
    return 0


def run_report(options: argparse.Namespace) -> int:
    """Judges, writes report.html, prints; the verdict's status."""
    found = judge(load(options.output), options.margin)
    report(options.output, found)
    if options.json:
        print(json.dumps(found))
    else:
        _print(found)
        print(f"report: {options.output / 'report.html'}")
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


def judge(runs: Sequence[Mapping[str, Any]], margin: float = MARGIN) -> dict[str, Any]:
    """By `RULE`, of the runs' `final` losses."""
    if not 0 < margin < 1:
        raise ConfigError(f"margin = {margin}; allowed: a share of the loss, as 0.005")
    plain = {run["seed"]: run for run in runs if run["way"] == PLAIN}
    pairs = []
    for run in runs:
        other = plain.get(run["seed"])
        if run["way"] != PLAIN and other is not None:
            pairs.append({
                "seed": run["seed"],
                "plain": other["final"],
                "compressed": run["final"],
                "difference": run["final"] / other["final"] - 1,
                "replicas_equal": run["replicas_equal"] and other["replicas_equal"],
            })  # fmt: skip
    found: dict[str, Any] = {"margin": margin, "pairs": pairs, "interval": None}
    differences = [pair["difference"] for pair in pairs]
    broken = [pair["seed"] for pair in pairs if not pair["replicas_equal"]]
    lost = [pair["seed"] for pair in pairs if not math.isfinite(pair["difference"])]
    if broken or lost:
        what = f"replicas differ with seeds {broken}" if broken else f"no finite loss: {lost}"
        return found | {"verdict": "failed", "text": what}
    if len(pairs) < 2:
        return found | {"verdict": "undecided", "text": "fewer than two pairs: more seeds"}
    mean, free = statistics.mean(differences), len(pairs) - 1
    half = _T95[min(free, len(_T95)) - 1] * statistics.stdev(differences) / math.sqrt(len(pairs))
    low, high = mean - half, mean + half
    if -margin <= low and high <= margin:
        verdict = "same"
    else:
        verdict = "worse" if low > 0 else "better" if high < 0 else "undecided"
    text = (
        f"mean difference {mean:+.3%}, 90 % interval {low:+.3%} to {high:+.3%}, {len(pairs)} pairs"
    )
    return found | {"verdict": verdict, "text": text, "interval": [low, high]}


def report(folder: Path, found: Mapping[str, Any]) -> None:
    """Writes report.html, with its picture inside."""
    runs = load(folder)
    jinja2 = _needed("jinja2")
    settings: dict[str, Any] = next((run["settings"] for run in runs if run["way"] != PLAIN), {})
    template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE)
    text = template.render(
        codec=settings.get("compression_type", "no compressed run"), verdict=found, rule=RULE,
        picture=base64.b64encode(_draw(runs)).decode(), settings=json.dumps(settings),
    )  # fmt: skip
    (folder / "report.html").write_text(text)


def _draw(runs: Sequence[Mapping[str, Any]]) -> bytes:
    """Training losses of every run; differences of each pair."""
    _timeline.matplotlib().use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    figure, (losses, differences) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    plain = {run["seed"]: run for run in runs if run["way"] == PLAIN}
    for run in sorted(runs, key=lambda run: run["way"] != PLAIN):  # the compressed ones on top
        colour = "#999999" if run["way"] == PLAIN else "#e45756"
        losses.plot(run["losses"], color=colour, lw=3 if run["way"] == PLAIN else 1)
        if run["way"] != PLAIN and run["seed"] in plain:
            both = zip(run["losses"], plain[run["seed"]]["losses"], strict=False)
            differences.plot([ours - other for ours, other in both], lw=1)
    losses.set(title="training loss: plain grey, compressed red", xlabel="step")
    differences.axhline(0, color="#999999")
    differences.set(title="compressed minus plain, a line per seed", xlabel="step")
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    plt.close(figure)
    return buffer.getvalue()


def _needed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"converge needs {error.name}: pip install 'cccl[tools]'") from error


def _print(found: Mapping[str, Any]) -> None:
    rows = [
        [str(pair["seed"]), f"{pair['plain']:.5f}", f"{pair['compressed']:.5f}",
         f"{pair['difference']:+.3%}", "yes" if pair["replicas_equal"] else "NO"]
        for pair in found["pairs"]
    ]  # fmt: skip
    if rows:
        _show.table(["seed", "plain", "compressed", "difference", "replicas equal"], rows)
    print(f"{found['verdict']}: {found['text']} (margin {found['margin']:.2%})")
