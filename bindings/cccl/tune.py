"""`tune`: measures a cluster, writes the profile that `configure` and `plan` read, and says what
compression would gain, or that it would gain nothing."""

from __future__ import annotations

import argparse
import importlib
import json
import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, _show, bench, plan
from ._model import Cluster
from ._rules import PLAIN
from .errors import ConfigError, UnsupportedError

WORTH = 0.05  # communication's share of a step below which compression is not worth its risk
SPARSE = 0.99  # share of zeros above which sparse tensors gain more


def add_command(commands: Any) -> None:
    """Adds `tune` to the command line."""
    command = commands.add_parser(
        "tune",
        help="one process per rank: measure the cluster, write a profile, say what would be gained",
        epilog="example: torchrun --nproc-per-node 2 -m cccl tune --output cluster.toml "
        "--parameters 100M --compute 200ms",
    )
    add = command.add_argument
    add("--output", type=Path, metavar="TOML", help="the profile, written by rank 0")
    add("--codec", nargs="+", default=["block_float8"],
        help="that may be chosen (default: block_float8)")  # fmt: skip
    add("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    add("--seconds", type=float, default=10.0,
        help="for all-reduces, and as much for training steps (default: %(default)s)")  # fmt: skip
    add("--deadline", type=float, default=300.0, help="seconds per wait (default: %(default)s)")
    add("--parameters", type=_show.count, help="of the model, to say what a step would gain")
    add("--dtype", default="float32", help="of its gradients (default: float32)")
    add("--compute", type=_show.seconds, metavar="TIME", help="of a step that sends nothing")
    add("--input", type=Path, help="gradients: .npy, or all arrays of a .npz; looks for zeros")
    add("--json", action="store_true", help="one JSON object, from rank 0")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """In each rank's process; 0 once it has measured, whatever it found."""
    if (options.parameters is None) != (options.compute is None):
        raise ConfigError("--parameters and --compute go together: a step has both")
    if options.output is not None and not options.output.resolve().parent.is_dir():
        raise ConfigError(f"{str(options.output)!r}: there is no such folder")
    zeros = None
    if options.input is not None:
        zeros = float(np.mean(bench.values_of(bench._load(options.input).size, options.input) == 0))
    try:
        launched = importlib.import_module("cccl.torch._launched").launched
        measure = importlib.import_module("cccl.torch.tune").tune
        dist = importlib.import_module("torch.distributed")
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"tune needs {error.name}: pip install 'cccl[torch]'") from error
    with launched("tune", options.device, options.deadline) as device:
        first = dist.get_rank() == 0
        with _show.progress(5, "tune", shown=first) as advance:
            found = measure(
                codecs=options.codec, device=device, seconds=options.seconds, advance=advance
            )
        dist.barrier()  # no rank leaves before all have what they compare
    if not first:
        return 0
    found |= judge(found, options.parameters, options.compute, options.dtype, zeros)
    if options.output is not None:
        try:
            options.output.write_text(profile(found))
        except OSError as error:
            raise ConfigError(f"cannot write the profile: {error}") from error
    if options.json:
        print(json.dumps(plan._finite(found)))
    else:
        _print(found, options.output)
    return 0


def judge(
    found: dict[str, Any],
    parameters: float | None = None,
    compute_seconds: float | None = None,
    dtype: str = "float32",
    zeros: float | None = None,
) -> dict[str, Any]:
    """What compression would gain, from what `cccl.torch.tune.tune` found: `gains` (whether it is
    worth it), `reasons` (why not), `step` (a row of `cccl.plan`, if parameters and computation of a
    model are given)."""
    reasons, step = [], None
    if found["config"]["compression_type"] == PLAIN:
        reasons.append("no codec beats plain here at any size: the link is fast for these machines")
    if zeros is not None and zeros > SPARSE:
        reasons.append(
            f"{zeros:.1%} of these gradients are zeros: sparse tensors (nn.Embedding(sparse=True)) "
            "and their collectives send less than any dense codec"
        )
    if parameters is not None and compute_seconds is not None:
        codec = min(found["cluster"]["codecs"], key=lambda name: found["measured"][-1][name])
        step = plan.plan(
            parameters, Cluster.of(found["cluster"]), compute_seconds=compute_seconds, dtype=dtype,
            codec=codec, ranks=[found["world_size"]],
        )["rows"][0]  # fmt: skip
        step["codec"] = codec
        share = step["plain"]["exposed_seconds"] / step["plain"]["seconds"]
        if share < WORTH:
            reasons.append(
                f"waiting for communication is {share:.1%} of a step, under {WORTH:.0%}: at best "
                "that much can be gained"
            )
        elif step["gain"] <= 1:
            reasons.append(f"a step would take {1 / step['gain']:.2f}x of a plain one")
    return {"gains": not reasons, "reasons": reasons, "step": step}


def profile(found: dict[str, Any]) -> str:
    """As TOML: `[cccl]` for `cccl.configure`, `[cluster]` for `plan`, and what was measured."""
    settings = found["config"] if found["gains"] else {"compression_type": PLAIN}
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    lines = [f"# Written by `python -m cccl tune` {__version__}, {made}."]
    lines += [f"# {text}" for text in (*found["reasons"], *found["notes"])]
    lines += ["", "[cccl]", *_pairs(settings)]
    cluster = {k: v for k, v in found["cluster"].items() if k != "codecs"}
    lines += ["", "[cluster]", *_pairs(cluster)]
    for name, rates in found["cluster"]["codecs"].items():
        lines += ["", f"[cluster.codecs.{json.dumps(name)}]", *_pairs(rates)]
    for row in found["measured"]:
        row = {json.dumps(key): value for key, value in row.items()}
        lines += ["", "[[measured]]  # seconds of an all-reduce of float32", *_pairs(row)]
    lines += ["", "[chunks]  # seconds for each chunk size", *_pairs(found["chunks"])]
    return "\n".join(lines) + "\n"


def _pairs(values: dict[str, Any]) -> list[str]:
    """Numbers, strings and lists of strings are written alike in JSON and TOML."""
    return [
        f"{key} = {'inf' if value == math.inf else json.dumps(value)}"
        for key, value in values.items()
        if value is not None
    ]


def _print(found: dict[str, Any], output: Path | None) -> None:
    codecs = list(found["cluster"]["codecs"])
    rows = []
    for row in found["measured"]:
        gains = [f"{row[PLAIN] / row[name]:.2f}x" for name in codecs]
        times = [f"{1e3 * row[name]:.3g}" for name in (PLAIN, *codecs)]
        rows.append([f"{row['bytes'] / 1024:.0f}", *times, *gains])
    head = ["KiB", "plain ms", *(f"{name} ms" for name in codecs), *(["gain"] * len(codecs))]
    _show.table(head, rows, f"all-reduce between {found['world_size']} ranks")
    chunks = [[size, f"{1e3 * seconds:.3g}"] for size, seconds in found["chunks"].items()]
    _show.table(["chunk bytes", "ms"], chunks)
    cluster = found["cluster"]
    print(
        f"link {cluster['link_gbit']:.3g} Gbit/s, latency {cluster['latency_us']:.3g} us, start "
        f"{cluster['start_us']:.3g} us, message {cluster['message_us']:.3g} us, "
        f"sockets {cluster['stack_gbyte']:.3g} GB/s, {cluster['ranks_per_core']:.2g} ranks "
        f"per core, interference {cluster['interference']:.2f}"
    )
    for name, rates in cluster["codecs"].items():
        print(f"{name}: encode {rates['encode']:.3g}, sum {rates['accumulate']:.3g}, decode "
              f"{rates['decode']:.3g} GB/s")  # fmt: skip
    for note in found["notes"]:
        print(f"note: {note}")
    if found["step"] is not None:
        step = found["step"]
        print(
            f"a step: plain {1e3 * step['plain']['seconds']:.4g} ms, {step['codec']} "
            f"{1e3 * step['flat']['seconds']:.4g} ms, {step['gain']:.2f}x (predicted)"
        )
    for reason in found["reasons"]:
        print(f"nothing to gain: {reason}")
    if found["gains"]:
        print(f"use it: cccl.configure({found['config']})")
    if output is not None:
        print(f"profile: {output}")
