"""The report of `converge`: one HTML file, with its pictures inside."""

from __future__ import annotations

import base64
import importlib
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _timeline
from ._rules import PLAIN
from .errors import UnsupportedError

Runs = Sequence[Mapping[str, Any]]
WORST = 20  # layers shown
_TEMPLATE = """<!doctype html><html lang="en"><meta charset="utf-8">
<title>cccl converge: {{ codec }}</title>
<style>body{font:15px sans-serif;max-width:70em;margin:2em auto}td,th{padding:.2em .8em;
text-align:right}img{max-width:100%}</style>
<h1>{{ codec }}: {{ verdict.verdict }}</h1>
<p>{{ verdict.text }}</p><p>{{ rule }} Margin: {{ "%.2f" % (100 * verdict.margin) }} %.</p>
<h2>Losses</h2>{{ figures.losses }}
<table><tr><th>seed<th>plain<th>{{ codec }}<th>difference<th>replicas equal</tr>
{% for row in verdict.pairs %}<tr><td>{{ row.seed }}<td>{{ "%.5f" % row.plain }}
<td>{{ "%.5f" % row.compressed }}<td>{{ "%+.3f" % (100 * row.difference) }} %
<td>{{ "yes" if row.replicas_equal else "NO" }}</tr>{% endfor %}</table>
{% if verdict.scores %}<h2>Scores</h2><p>Higher is better. Margin: {{ verdict.score_margin }}.</p>
<table><tr><th>score<th>plain<th>{{ codec }}<th>difference, 90 %<th>verdict</tr>
{% for name, row in verdict.scores.items() %}<tr><td>{{ name }}<td>{{ "%.4f" % row.plain }}
<td>{{ "%.4f" % row.compressed }}<td>{% if row.interval %}{{ "%+.4f" % row.interval[0] }} to
{{ "%+.4f" % row.interval[1] }}{% else %}-{% endif %}<td>{{ row.verdict }}</tr>
{% endfor %}</table>{% endif %}
{% if figures.norms %}<h2>Gradient norms</h2>{{ figures.norms }}{% endif %}
{% if figures.layers %}<h2>Errors of gradients</h2>
<p>Norm of the compressed mean's error over the exact mean's norm, averaged over looks and seeds;
the {{ worst }} largest of {{ layers }} parameters.</p>{{ figures.layers }}{% endif %}
<h2>Replicas</h2><p>SHA-256 over all bits of the parameters, at the last look.</p>
<table><tr><th>run<th>bytes saved<th>resumed at<th>digests of ranks</tr>
{% for run in runs %}<tr><td>{{ run.way }}, seed {{ run.seed }}<td>{{ "%.2f" % run.ratio }}x
<td>{{ run.resumed_at | join(", ") or "-" }}
<td><code>{% for digest in run.looks[-1].digests %}{{ digest[:12] }} {% endfor %}</code></tr>
{% endfor %}</table>
<p>Settings: <code>{{ settings }}</code></p></html>"""


def write(file: Path, runs: Runs, verdict: Mapping[str, Any], rule: str) -> None:
    """The runs, and what was judged of them."""
    needed("jinja2")
    environment = importlib.import_module("jinja2").Environment(autoescape=True)
    settings: dict[str, Any] = next((run["settings"] for run in runs if run["way"] != PLAIN), {})
    errors = layer_errors(runs)
    drawn = {"losses": _losses(runs), "norms": _norms(runs), "layers": _layers(errors)}
    markup = importlib.import_module("markupsafe").Markup
    figures = {name: markup(_tag(name, png)) for name, png in drawn.items() if png}
    text = environment.from_string(_TEMPLATE).render(
        codec=settings.get("compression_type", "no compressed run"), verdict=verdict, rule=rule,
        figures=figures, runs=runs, layers=len(errors), worst=min(WORST, len(errors)),
        settings=json.dumps(settings),
    )  # fmt: skip
    file.write_text(text)


def layer_errors(runs: Runs) -> dict[str, float]:
    """Of each parameter, the mean over compressed runs and their looks; the largest first."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for look in run["looks"]:
            for name, error in look["layers"].items():
                found.setdefault(name, []).append(error)
    means = {name: statistics.mean(errors) for name, errors in found.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def needed(module: str) -> Any:
    """The module, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"converge needs {error.name}: pip install 'cccl[tools]'") from error


def _tag(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{name}">'


def _axes(columns: int, height: float = 4) -> tuple[Any, list[Any]]:
    _timeline.matplotlib().use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(
        1, columns, figsize=(13, height), layout="constrained", squeeze=False
    )
    return figure, list(axes[0])


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110)
    importlib.import_module("matplotlib.pyplot").close(figure)
    return buffer.getvalue()


def _style(run: Mapping[str, Any]) -> dict[str, Any]:
    plain = run["way"] == PLAIN
    return {"color": "#999999" if plain else "#e45756", "lw": 3 if plain else 1}


def _in_order(runs: Runs) -> Runs:
    """The compressed ones on top."""
    return sorted(runs, key=lambda run: run["way"] != PLAIN)


def _losses(runs: Runs) -> bytes:
    """Training and validation losses of every run; differences of each pair."""
    figure, (losses, validation, differences) = _axes(3)
    plain = {run["seed"]: run for run in runs if run["way"] == PLAIN}
    for run in _in_order(runs):
        losses.plot(run["losses"], **_style(run))
        looks = [look for look in run["looks"] if look["validation"] is not None]
        validation.plot([look["step"] for look in looks], [look["validation"] for look in looks],
                        marker="o", **_style(run))  # fmt: skip
        if run["way"] != PLAIN and run["seed"] in plain:
            both = zip(run["losses"], plain[run["seed"]]["losses"], strict=False)
            differences.plot([ours - other for ours, other in both], lw=1)
    losses.set(title="training loss: plain grey, compressed red", xlabel="step")
    validation.set(title="validation loss (empty: the entry has no evaluate())", xlabel="step")
    differences.axhline(0, color="#999999")
    differences.set(title="compressed minus plain, a line per seed", xlabel="step")
    return _png(figure)


def _norms(runs: Runs) -> bytes | None:
    """Of every run, step by step."""
    if not any(norm is not None for run in runs for norm in run["norms"]):
        return None
    figure, (axis,) = _axes(1, 3)
    for run in _in_order(runs):
        axis.plot([norm or float("nan") for norm in run["norms"]], **_style(run))
    axis.set(title="norm of the gradients that the optimizer took", xlabel="step", yscale="log")
    return _png(figure)


def _layers(errors: Mapping[str, float]) -> bytes | None:
    """The largest errors, the largest on top."""
    if not errors:
        return None
    shown = list(errors.items())[:WORST]
    figure, (axis,) = _axes(1, 1 + 0.25 * len(shown))
    axis.barh([name for name, _ in shown], [error for _, error in shown], color="#e45756")
    axis.invert_yaxis()
    axis.set(xlabel="relative error of the gradient")
    return _png(figure)
