"""`profile`: where the time of a training step goes, plain and compressed, by torch.profiler."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from .. import _show
from .._config import Config, configure, current_config
from .._rules import PLAIN
from .._stats import stats
from .._timeline import Event, Span, draw, matplotlib, merged, parts
from ..errors import ConfigError
from ..monitor import since

_CODEC = ("encode", "reduce", "decode")

STEP = "cccl_step"
_MICRO = 1e-6

Step = Callable[[], Any]


@dataclasses.dataclass
class Profile:
    """Of one way. `parts` are seconds per step of this rank; `events` and `steps` are its last
    trace's, in seconds of the profiler's clock."""

    parts: dict[str, float]
    events: list[Event]
    steps: list[Span]
    trace: Any
    rows: list[dict[str, Any]]
    memory: dict[str, int]

    @property
    def compressed(self) -> bool:
        """Whether any collective went compressed."""
        return any(not row["plain"] for row in self.rows)


def profile(step: Step, *, steps: int = 5, warm_up: int = 3) -> Profile:
    """Runs `step()` `warm_up` times, `steps` times by the clock alone, and as often under
    torch.profiler, which makes steps longer; on all ranks alike.

    `parts`: `unrecorded` is the median step by the clock. Of what was recorded: `step`, `compute`,
    `communication`, `communication_exposed` (nothing computes meanwhile) and
    `communication_hidden`, `codec` (encoding, sums, decoding), `codec_exposed` and `codec_hidden`,
    `other`. On a GPU these are its kernels, told apart by name. On a CPU compute is torch's
    operators, communication reaches from a collective's call to its result, and codec seconds are
    the statistics', hidden to the share that communication is.
    """
    if steps < 1 or warm_up < 0:
        raise ConfigError(f"steps = {steps}, warm_up = {warm_up}; allowed: from 1, from 0")
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    for _ in range(warm_up):
        step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    unrecorded = statistics.median(_seconds(step, on_gpu) for _ in range(steps))
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    before = stats()
    with torch_profile(activities=activities) as trace:
        for _ in range(steps):
            with record_function(STEP):
                _seconds(step, on_gpu)
    rows = since(before, stats())
    events, windows = read(trace.events() or [], on_gpu)
    found = parts(events, windows) | {"unrecorded": unrecorded}
    if not on_gpu:
        seconds = sum(row[f"{kind}_seconds"] for row in rows for kind in _CODEC)
        sent = found["communication"]
        hidden = found["communication_hidden"] / sent if sent else 0.0
        found["codec"] = seconds / steps
        found["codec_hidden"] = hidden * found["codec"]
        found["codec_exposed"] = found["codec"] - found["codec_hidden"]
    memory = {"pool_bytes": int(stats()["total"]["pool_bytes"])}
    if on_gpu:
        memory["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
    return Profile(found, events, windows, trace, rows, memory)


def _seconds(step: Step, on_gpu: bool) -> float:
    begun = time.perf_counter()
    step()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def read(trace: Sequence[Any], on_gpu: bool) -> tuple[list[Event], list[Span]]:
    """What each thread or stream did, and the steps, of a profiler's events."""
    events: list[Event] = []
    steps: list[Span] = []
    for one in trace:
        span = one.time_range.start * _MICRO, one.time_range.end * _MICRO
        device = one.device_type.name != "CPU"
        if one.name == STEP and not device:
            steps.append(span)
            continue
        kind = kernel_kind(one.name) if device else host_kind(one.name)
        if kind is None or device != on_gpu or (device and one.is_user_annotation):
            continue
        if device:
            row = f"stream {one.device_resource_id}"
        elif kind == "communication":
            row = one.name
        else:
            row = f"thread {one.thread}"
        events.append(Event(kind, row, span))
    return events, merged(steps)


def kernel_kind(name: str) -> str | None:
    """Of a GPU's kernels and copies."""
    if "nccl" in name.lower():
        return "communication"
    return "codec" if "cccl::" in name else "compute"


def host_kind(name: str) -> str | None:
    """Of a CPU's operators and asynchronous ranges."""
    if name.startswith(("gloo:", "cccl:", "nccl:")):
        return "communication"
    return "compute" if name.startswith(("aten::", "torch::distributed::reducer")) else None


def compare(
    make_step: Callable[[], Step],
    config: Config | Mapping[str, Any] | None = None,
    *,
    steps: int = 5,
    warm_up: int = 3,
    output: str | Path | None = None,
    advance: _show.Advance = lambda done: None,
) -> dict[str, Any]:
    """Profiles the step that `make_step()` makes with plain gradients, then one that it makes
    with `config` (None: `cccl.configure`'s); all ranks call it.

    `make_step` builds a model (in DistributedDataParallel, or on backend "cccl") and returns a
    function that trains a step; it must name no configuration of its own. Returns, for both ways,
    `parts` as means over the ranks (whole steps as the slowest rank's) and `memory`; and what
    changed.
    Rank 0 writes `timeline.png` and a chrome trace of each way to the folder `output`.
    """
    wanted = current_config() if config is None else Config.load(config)
    if not wanted.compresses:
        raise ConfigError("profile compares plain with a codec: name one as compression_type")
    if output is not None:
        matplotlib()  # missed now, on all ranks, rather than when all is measured
        try:
            Path(output).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {str(output)!r}: {error}") from error
    restored = current_config()
    found: dict[str, Profile] = {}
    try:
        for name in (PLAIN, wanted.compression_type):
            configure(dataclasses.replace(wanted, compression_type=name))
            found[name] = profile(make_step(), steps=steps, warm_up=warm_up)
            advance(name)
    finally:
        configure(restored)
    plainly, ours = found.values()
    if plainly.compressed:
        raise ConfigError("make_step compresses by itself: leave configuration to the profiler")
    if output is not None and dist.get_rank() == 0:
        write(Path(output), found)
    report = {name: _over_ranks(one) for name, one in found.items()}
    return report | {"change": change(*report.values()), "compressed": ours.compressed}


def change(plainly: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, float]:
    """Of the second way against the first."""
    first, second = plainly["parts"], ours["parts"]
    return {
        "speed_up": first["unrecorded"] / second["unrecorded"],
        "compute_longer": second["compute"] / first["compute"] - 1 if first["compute"] else 0.0,
        "exposed_less_seconds": first["communication_exposed"] - second["communication_exposed"],
        "overlap_share_before": plainly["overlap_share"],
        "overlap_share_after": ours["overlap_share"],
        "hidden_less_seconds": first["communication_hidden"] - second["communication_hidden"],
        # Payloads lie outside of torch's memory, and a plain step needs none.
        "memory_added_bytes": ours["memory"]["pool_bytes"]
        + ours["memory"].get("peak_allocated_bytes", 0)
        - plainly["memory"].get("peak_allocated_bytes", 0),
    }


def write(folder: Path, found: Mapping[str, Profile]) -> None:
    """A chrome trace of each way and a picture of a step whose length is the median."""
    ways = {}
    for name, one in found.items():
        one.trace.export_chrome_trace(str(folder / f"trace-{name}.json"))
        middle = sorted(one.steps, key=lambda span: span[1] - span[0])[len(one.steps) // 2]
        ways["plain" if name == PLAIN else name] = one.events, middle
    draw(folder / "timeline.png", ways)


def _over_ranks(one: Profile) -> dict[str, Any]:
    """Means of the parts, the slowest step, the largest memory."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (one.parts, one.memory))
    every = [entry[0] for entry in everyone]
    means = {name: statistics.mean(entry[name] for entry in every) for name in one.parts}
    for name in ("unrecorded", "step"):
        means[name] = max(entry[name] for entry in every)
    sent = means["communication"]
    return {
        "parts": means,
        "overlap_share": means["communication_hidden"] / sent if sent else 0.0,
        "memory": {name: max(entry[1][name] for entry in everyone) for name in one.memory},
    }
