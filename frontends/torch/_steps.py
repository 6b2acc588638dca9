"""DDP steps that `tune` measures: what computation and communication take from each other."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._config import Config, configure, current_config
from .._model import Cluster, Job, Way, flat, plain, step
from .._rules import PLAIN
from ._auto import Probe
from ._ddp import compress

LAYERS = 4  # square, each a bucket
WIDTHS = (1536, 1024, 512)
# Forward, then for each layer gradients of weights and, but for the first layer, of its input.
OVERLAP = (2 * LAYERS - 3) / (3 * LAYERS - 1)
_ROUNDS = 9
_MOST_ROWS = 1 << 14
LEAST_HIDDEN = 0.05  # of a step, to tell from it alone


def interference(
    group: dist.ProcessGroup | None,
    device: torch.device,
    configs: Mapping[str, Config],
    cluster: Cluster,
    seconds: float,
    probe: Probe,
) -> dict[str, float]:
    """What steps take longer than the model has it without interference, as a share of the work
    for hidden communication: of plain steps, and of those with each codec. Where hardly any is
    hidden, the least squares over all."""
    world = dist.get_world_size(group)
    ways: dict[str, Way] = {PLAIN: plain}
    ways |= {name: flat(cluster.codecs[name], 4) for name in configs}
    width = next((w for w in WIDTHS if _seconds(cluster, ways, w, world) < seconds), WIDTHS[-1])
    job, taken = _measure(group, device, configs, width, probe)
    bare = dataclasses.replace(cluster, interference=0.0)
    hidden, longer = {}, {}
    for name, way in ways.items():
        expected = step(bare, job, way, world)
        work = way(bare, job.gradient_bytes / job.buckets, world).work * job.buckets
        hidden[name] = work * (1 - expected.exposed / expected.communication)
        longer[name] = max(0.0, taken[name] - expected.seconds)
    squares = sum(value * value for value in hidden.values())
    common = sum(hidden[name] * longer[name] for name in ways) / squares if squares else 0.0
    return {
        name: longer[name] / hidden[name] if hidden[name] > LEAST_HIDDEN * taken[name] else common
        for name in ways
    }


def _seconds(cluster: Cluster, ways: Mapping[str, Way], width: int, world: int) -> float:
    """About what measuring takes; computation is made as long as compressed communication."""
    each = [way(cluster, 4 * width * width, world).seconds * LAYERS for way in ways.values()]
    return (_ROUNDS + 2) * (sum(each) + 2 * len(ways) * min(each))


def _measure(
    group: dist.ProcessGroup | None,
    device: torch.device,
    configs: Mapping[str, Config],
    width: int,
    probe: Probe,
) -> tuple[Job, dict[str, float]]:
    """The job, and medians of the slowest rank's steps, in turns."""
    before = current_config()
    configure(dataclasses.replace(before, attach_ddp=False))
    try:
        models = {PLAIN: _model(group, device, width)}
        for name, config in configs.items():
            models[name] = _model(group, device, width)
            compress(models[name], config)

        def run(name: str, rows: torch.Tensor) -> float:
            dist.barrier(group)
            begun = time.perf_counter()
            models[name](rows).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter() - begun

        def compute(rows: torch.Tensor) -> float:
            with models[PLAIN].no_sync():
                return run(PLAIN, rows)

        rows = _rows_for(models, device, width, run, compute, probe)
        times: dict[str, list[float]] = {"compute": [], **{name: [] for name in models}}
        for number in range(_ROUNDS + 1):
            for name, column in times.items():
                taken = compute(rows) if name == "compute" else run(name, rows)
                if number:
                    column.append(taken)
    finally:
        configure(before)
    slowest = probe.slowest([one for column in times.values() for one in column])
    medians = [statistics.median(slowest[i : i + _ROUNDS]) for i in range(0, len(slowest), _ROUNDS)]
    computing, *others = medians
    nbytes = 4 * width * width
    job = Job(LAYERS * nbytes, 4, computing, OVERLAP, nbytes)
    return job, dict(zip(models, others, strict=True))


def _rows_for(
    models: Mapping[str, DistributedDataParallel],
    device: torch.device,
    width: int,
    run: Callable[[str, torch.Tensor], float],
    compute: Callable[[torch.Tensor], float],
    probe: Probe,
) -> torch.Tensor:
    """A batch whose computation takes about as long as the fastest compressed step waits."""
    count = 8
    rows = torch.ones(count, width, device=device)
    for name in models:  # builds buckets, agrees, takes memory
        run(name, rows)
        run(name, rows)
    compute(rows)
    waits = min(run(name, rows) for name in models) - compute(rows)
    (waits,) = probe.slowest([waits])
    while count < _MOST_ROWS and probe.slowest([compute(rows)])[0] < waits:
        count *= 2
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
