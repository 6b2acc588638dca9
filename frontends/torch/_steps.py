"""DDP steps that `tune` measures: what computation and communication take from each other."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._config import Config, configure, current_config
from .._model import Cluster, Job, Transfer, Way, flat, plain
from .._rules import PLAIN
from ._auto import Probe
from ._collectives import all_reduce
from ._ddp import compress

LAYERS = 4  # square, each a bucket
WIDTHS = (2048, 1536, 1024, 512)
# Forward, then for each layer gradients of weights and, but for the first layer, of its input.
OVERLAP = (2 * LAYERS - 3) / (3 * LAYERS - 1)
_ROUNDS = (5, 25)  # at least, and at most
_ENOUGH = 9  # rounds that a width should leave time for
_MOST_ROWS = 1 << 14
_UNCOMPRESSED = Config(compression_type=PLAIN)


def interference(
    group: dist.ProcessGroup | None,
    device: torch.device,
    configs: Mapping[str, Config],
    cluster: Cluster,
    seconds: float,
    probe: Probe,
) -> float:
    """That of the cluster, as steps show it that are measured here."""
    world = dist.get_world_size(group)
    ways: dict[str, Way] = {PLAIN: plain}
    ways |= {name: flat(cluster.codecs[name], 4) for name in configs}
    width = affordable(cluster, ways, world, seconds)
    measured = _measure(group, device, configs, width, seconds, probe)
    return interference_of(cluster, ways, world, *measured)


def interference_of(
    cluster: Cluster,
    ways: Mapping[str, Way],
    world: int,
    job: Job,
    steps: Mapping[str, float],
    alone: Mapping[str, float],
) -> float:
    """What steps take longer than computation and exposed communication, as a share of the work
    that they contend with: the least squares over all ways."""
    product = squares = 0.0
    for name, way in ways.items():
        modelled = way(cluster, job.bucket_bytes, world).times(job.buckets)
        whole = Transfer(alone[name], modelled.work)
        contended = whole.contended(job)
        product += contended * (steps[name] - job.compute_seconds - whole.exposed(job))
        squares += contended * contended
    return max(0.0, product / squares) if squares else 0.0


def affordable(cluster: Cluster, ways: Mapping[str, Way], world: int, seconds: float) -> int:
    """The largest width that can be measured often enough in about as many seconds: communication
    alone, steps, and computation that is as long as the shortest of it."""

    def enough(width: int) -> bool:
        each = [way(cluster, 4 * width * width, world).seconds * LAYERS for way in ways.values()]
        return seconds >= (_ENOUGH + 2) * (2 * sum(each) + (len(ways) + 1) * min(each))

    return next(filter(enough, WIDTHS), WIDTHS[-1])


def _measure(
    group: dist.ProcessGroup | None,
    device: torch.device,
    configs: Mapping[str, Config],
    width: int,
    seconds: float,
    probe: Probe,
) -> tuple[Job, dict[str, float], dict[str, float]]:
    """The job, and medians of the slowest rank, in turns: steps, and their communication alone."""
    before = current_config()
    configure(dataclasses.replace(before, attach_ddp=False))
    try:
        models = {PLAIN: _model(group, device, width)}
        for name, config in configs.items():
            models[name] = _model(group, device, width)
            compress(models[name], config)

        def timed(call: Callable[[], None]) -> float:
            dist.barrier(group)
            begun = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begun

        def run(name: str, rows: torch.Tensor) -> float:
            return timed(lambda: models[name](rows).sum().backward())

        def compute(rows: torch.Tensor) -> float:
            with models[PLAIN].no_sync():
                return run(PLAIN, rows)

        buckets = torch.linspace(-1, 1, LAYERS * width * width, device=device).chunk(LAYERS)

        def communicate(name: str) -> None:
            config = configs.get(name, _UNCOMPRESSED)
            for work in [all_reduce(b, group=group, config=config, async_op=True) for b in buckets]:
                work.wait()

        rows = _rows_for(models, device, width, run, compute, probe)
        times: dict[str, list[float]] = collections.defaultdict(list)

        def measure() -> None:
            times["compute"].append(compute(rows))
            for name in models:
                times[name].append(run(name, rows))
                times[f"{name} alone"].append(timed(partial(communicate, name)))

        measure()  # the first round pays for memory and agreement, and tells how long one takes
        (once,) = probe.slowest([sum(one for (one,) in times.values())])
        times.clear()
        for _ in range(min(max(int(seconds / once), _ROUNDS[0]), _ROUNDS[1])):
            measure()
    finally:
        configure(before)
    medians = {what: statistics.median(probe.slowest(column)) for what, column in times.items()}
    nbytes = 4 * width * width
    job = Job(LAYERS * nbytes, 4, medians["compute"], OVERLAP, nbytes)
    steps = {name: medians[name] for name in models}
    return job, steps, {name: medians[f"{name} alone"] for name in models}


def _rows_for(
    models: Mapping[str, DistributedDataParallel],
    device: torch.device,
    width: int,
    run: Callable[[str, torch.Tensor], float],
    compute: Callable[[torch.Tensor], float],
    probe: Probe,
) -> torch.Tensor:
    """A batch whose computation takes about as long as the fastest step waits."""
    count = 8
    rows = torch.ones(count, width, device=device)
    for name in models:  # builds buckets, agrees, takes memory
        run(name, rows)
        run(name, rows)
    compute(rows)
    fastest = min(run(name, rows) for name in models for _ in range(3))
    (waits,) = probe.slowest([fastest - min(compute(rows) for _ in range(3))])
    while count < _MOST_ROWS and probe.slowest([compute(rows)])[0] < waits:
        count = min(count + count // 2, _MOST_ROWS)
        rows = torch.ones(count, width, device=device)
    return rows


def _model(
    group: dist.ProcessGroup | None, device: torch.device, width: int
) -> DistributedDataParallel:
    layers = [torch.nn.Linear(width, width, bias=False, device=device) for _ in range(LAYERS)]
    mib = 4 * width * width / 2**20
    return DistributedDataParallel(
        torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=mib
    )
