"""`plan`: what compression would gain on a cluster, from 2 to 4,096 ranks, before it is tried."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _arrays, _show, bench
from ._config import Config
from ._model import (
    LEAST_MESSAGE,
    Cluster,
    Job,
    Rates,
    Step,
    break_even_gbit,
    flat,
    hierarchical,
    plain,
    step,
)
from ._rules import parse_bytes
from ._sources import read_toml_file
from .errors import ConfigError, UnsupportedError

RANKS = tuple(1 << power for power in range(1, 13))
# An H200, where a profile says nothing of the codec: its copy in GB/s of bytes read and written,
# and shares of it that codecs reach (docs/cuda.md).
H200_COPY, H200_ENCODE, H200_ACCUMULATE, H200_DECODE = 4200.0, 0.94, 0.80, 0.86
_MEASURED = 1 << 22  # values

_CLUSTER = {
    "link": ("link_gbit", _show.gbit, "RATE", "of a host, each way: 10gbit"),
    "latency": ("latency_us", lambda t: 1e6 * _show.seconds(t), "TIME", "of a message: 5us"),
    "efficiency": ("efficiency", float, "SHARE", "of the link rate left for payloads"),
    "backend": ("backend", str, "NAME", " or ".join(LEAST_MESSAGE)),
    "ranks-per-host": ("ranks_per_host", int, "N", "that share a host's link"),
    "intra": ("intra_gbyte", float, "GB/s", "between ranks of one host"),
    "start": ("start_us", lambda t: 1e6 * _show.seconds(t), "TIME", "of a compressed all-reduce"),
    "message": ("message_us", lambda t: 1e6 * _show.seconds(t), "TIME", "of host work per message"),
    "ranks-per-core": ("ranks_per_core", float, "N", "that share a core, if all are at work"),
    "interference": ("interference", float, "FACTOR", "of work for hidden communication that a "
                     "step is longer by, if communication is all work"),
}  # fmt: skip
_NCCL = {"latency_us": 5.0, "message_us": 2.0}  # where neither profile nor options say it


def add_command(commands: Any) -> None:
    """Adds `plan` to the command line."""
    command = commands.add_parser(
        "plan",
        help="predict step time, communication share and gain from 2 to 4,096 ranks; "
        "status 1 if nothing is gained",
        epilog="example: python -m cccl plan --parameters 1.3B --compute 400ms --link 10gbit",
    )
    add = command.add_argument
    add("--parameters", type=_show.count, required=True, help="of the model: 7e9 or 7B")
    add("--dtype", default="float32", help="of the gradients (default: float32)")
    add("--compute", type=_show.seconds, required=True, metavar="TIME",
        help="of a step that sends nothing: 208ms")  # fmt: skip
    add("--overlap", type=float, default=Job.overlap, metavar="SHARE",
        help="of it that communication can hide behind (default: %(default)s)")  # fmt: skip
    add("--bucket", type=parse_bytes, default=int(Job.bucket_bytes), metavar="SIZE",
        help="of DDP's buckets (default: 25MiB)")  # fmt: skip
    add("--codec", default="block_float8", help="name or alias (default: %(default)s)")
    add("--codec-rates", type=float, nargs=3, metavar=("ENCODE", "ACCUMULATE", "DECODE"),
        help="GB/s of values; else of the profile, this CPU (gloo) or an H200 (nccl)")  # fmt: skip
    add("--profile", type=Path, metavar="TOML", help="what `tune` wrote; options come first")
    for option, (_, kind, metavar, text) in _CLUSTER.items():
        add(f"--{option}", type=kind, metavar=metavar, help=text)
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="(default: 2 4 ... 4096)")
    add("--json", action="store_true", help="one JSON object; no break-even rate is null")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the plan; 1 if compression gains nothing at any number of ranks, else 0."""
    cluster = load_cluster(options.profile) if options.profile else None
    given = {
        field: value
        for option, (field, *_) in _CLUSTER.items()
        if (value := getattr(options, option.replace("-", "_"))) is not None
    }
    if cluster is None:
        defaults = _NCCL if given.get("backend") == "nccl" else {}
        cluster = Cluster(**{**defaults, **given})
    else:
        cluster = dataclasses.replace(cluster, **given)
    rates = None
    if options.codec_rates:
        rates = Rates(bits_of(options.codec, options.dtype), *options.codec_rates)
    found = plan(options.parameters, cluster, dtype=options.dtype, codec=options.codec, rates=rates,
                 compute_seconds=options.compute, overlap=options.overlap,
                 bucket_bytes=options.bucket, ranks=options.ranks)  # fmt: skip
    if options.json:
        print(json.dumps(_finite(found)))
    else:
        _print(found)
    return 0 if any(row["gain"] > 1 for row in found["rows"]) else 1


def plan(
    model: Any,
    cluster: Cluster | str | Path,
    *,
    compute_seconds: float,
    dtype: str = "float32",
    codec: str = "block_float8",
    rates: Rates | None = None,
    overlap: float = Job.overlap,
    bucket_bytes: float = Job.bucket_bytes,
    ranks: Sequence[int] = RANKS,
) -> dict[str, Any]:
    """Predicts a step with plain and with compressed gradients for each number of ranks.

    `model` is its number of parameters, or anything with `parameters()`, as a torch module;
    `cluster` a `Cluster` or the path of a profile that `tune` wrote. Returns what was assumed and,
    in `rows`, for each number of ranks: `plain`, `flat` and `hierarchical` (with plain sums
    inside each host, as `hierarchy` does) with seconds, communication share, exposed and
    interference seconds; `gain` (plain over flat); `break_even_gbit` (the line rate from which
    plain is as fast: 0 if at any, inf if at none).
    """
    if hasattr(model, "parameters"):
        model = sum(parameter.numel() for parameter in model.parameters())
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster)
    if not ranks or min(ranks) < 1:
        raise ConfigError(f"ranks = {list(ranks)}; allowed: integers from 1")
    size = _floating_size(dtype)
    job = Job(float(model) * size, size, compute_seconds, overlap, bucket_bytes)
    rates = rates or rates_of(codec, dtype, cluster)
    rows = []
    for count in ranks:
        ways = {
            "plain": plain,
            "flat": flat(rates, size),
            "hierarchical": hierarchical(rates, size),
        }
        steps = {name: step(cluster, job, way, count) for name, way in ways.items()}
        rows.append({
            "ranks": count,
            **{name: _fields(found) for name, found in steps.items()},
            "gain": steps["plain"].seconds / steps["flat"].seconds,
            "hierarchical_gain": steps["plain"].seconds / steps["hierarchical"].seconds,
            "break_even_gbit": break_even_gbit(cluster, job, ways["flat"], count),
        })  # fmt: skip
    return {
        "job": dataclasses.asdict(job),
        "codec": {"name": codec, **dataclasses.asdict(rates)},
        "cluster": dataclasses.asdict(cluster),
        "rows": rows,
    }


def load_cluster(path: str | Path) -> Cluster:
    """From the table `[cluster]` of a TOML file."""
    found = read_toml_file(Path(path)).get("cluster")
    if not isinstance(found, dict):
        raise ConfigError(
            f"{str(path)!r} has no table [cluster]: `python -m cccl tune` writes profiles"
        )
    return Cluster.of(found)


def rates_of(codec: str, dtype: str, cluster: Cluster) -> Rates:
    """From the cluster; else an H200's for NCCL, and this machine's for gloo."""
    name = Config(compression_type=codec).codecs
    if name is None:
        raise ConfigError(f"codec = {codec!r}; plan compares plain with a codec: name one")
    for known in (codec, name[0].name):
        if known in cluster.codecs:
            rates = cluster.codecs[known]
            return dataclasses.replace(rates, bits=bits_of(codec, dtype))
    if cluster.backend != "nccl":
        return measured_rates(codec, dtype)
    bits, size = bits_of(codec, dtype), _floating_size(dtype)
    moved = 1 + bits / 8 / size  # bytes read and written, for each byte of values
    encode, decode = H200_COPY * H200_ENCODE / moved, H200_COPY * H200_DECODE / moved
    # Of four payloads, added up in registers and written once.
    accumulate = H200_COPY * H200_ACCUMULATE / (moved - 1 + 1 / bench.REDUCED)
    return Rates(bits, encode, accumulate, decode)


def measured_rates(codec: str, dtype: str = "float32") -> Rates:
    """Of this machine's CPU, by `bench codec`."""
    row = bench.measure_codec(codec, _MEASURED, _bench_options(dtype))
    return Rates(row["bits_per_element"], row["encode_gbps"], row["accumulate_gbps"],
                 row["decode_gbps"])  # fmt: skip


def bits_of(codec: str, dtype: str) -> float:
    """Per value, of values that look like gradients."""
    options = _bench_options(dtype, repeats=1)
    return float(bench.measure_codec(codec, 1 << 18, options)["bits_per_element"])


def _bench_options(dtype: str, repeats: int = 5) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_commands(parser.add_subparsers())
    command = ["bench", "codec", "--dtype", dtype, "--repeats", str(repeats)]
    return parser.parse_args(command)


def _floating_size(dtype: str) -> int:
    found = _arrays.dtype_named(dtype)
    if not found.floating:
        raise UnsupportedError(f"dtype {dtype}: gradients are floating-point")
    return found.size


def _fields(found: Step) -> dict[str, float]:
    return {
        "seconds": found.seconds,
        "communication_seconds": found.communication,
        "communication_share": found.share,
        "exposed_seconds": found.exposed,
        "interference_seconds": found.interference,
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def _print(found: dict[str, Any]) -> None:
    job, cluster, codec = found["job"], found["cluster"], found["codec"]
    print(
        f"{job['gradient_bytes'] / 1e9:.3g} GB of gradients, {1e3 * job['compute_seconds']:.4g} ms "
        f"of computation, {cluster['link_gbit']:.4g} Gbit/s and {cluster['latency_us']:.3g} us "
        f"({cluster['backend']}, {cluster['ranks_per_host']} per host), {codec['name']} with "
        f"{codec['bits']:.4g} bits at {codec['encode']:.3g} / {codec['accumulate']:.3g} / "
        f"{codec['decode']:.3g} GB/s"
    )
    several = cluster["ranks_per_host"] > 1
    head = ["ranks", "plain ms", "comm.", "flat ms", "comm.", "gain"]
    head += ["hierarchical ms", "comm.", "gain"] if several else []
    rows = []
    for row in found["rows"]:
        cells = [str(row["ranks"])]
        for way, gain in ("plain", ""), ("flat", "gain"), ("hierarchical", "hierarchical_gain"):
            if way != "hierarchical" or several:
                cells += [f"{1e3 * row[way]['seconds']:.4g}"]
                cells += [f"{row[way]['communication_share']:.0%}"]
                cells += [f"{row[gain]:.2f}x"] if gain else []
        even = row["break_even_gbit"]
        cells.append("always" if even == math.inf else f"{even:.3g}" if even else "never")
        rows.append(cells)
    _show.table([*head, "gains below Gbit/s"], rows)
