"""`python -m cccl bench collective`: compressed against plain, in the same run."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import bench
from .._config import Config
from .._stats import plain_bytes, reset_stats, stats
from ..errors import ConfigError
from . import all_gather, all_reduce, broadcast, reduce_scatter
from ._plain import BACKEND

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(options: argparse.Namespace) -> None:
    """Measures each codec and size; rank 0 prints."""
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start one process per rank, e.g. torchrun "
            "--nproc-per-node 2 -m cccl bench collective"
        )
    codecs = bench.codecs_of(options)
    configs = [_config(name, options) for name in codecs]
    torch.set_num_threads(1)  # ranks often share the cores
    limit = timedelta(seconds=options.deadline)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=limit)
    try:
        for config in configs:
            for numel in options.numel:
                row = _measure(config, numel, device, options)
                if dist.get_rank() == 0:
                    bench.emit(row, options.json)
    finally:
        dist.destroy_process_group()


def _config(name: str, options: argparse.Namespace) -> Config:
    return dataclasses.replace(
        bench.config_of(name, options),
        result_type=options.result_type,
        chunk_size=options.chunk_size,
        window=int(options.window) if options.window.isdigit() else options.window,
        algorithm=options.algorithm,
        checksum=not options.no_checksum,
        peer_memory=options.peer_memory,
        deadline=options.deadline,
        collective_filter=(options.collective,),
    )  # fmt: skip


def _measure(
    config: Config, numel: int, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    dtype = getattr(torch, options.dtype)
    values = bench.values_of(numel, options.input, seed=rank)
    gradient = torch.from_numpy(bench.with_zeros(values, options.zeros, seed=rank))
    gradient = gradient.to(device, dtype)
    if options.input:  # the same file on every rank: shift it, or the ranks would agree
        gradient = gradient.roll(rank * (numel // world))
    case = Case(options.collective, gradient, config, options.beside_python)

    plain_seconds, _ = _time(case, case.plain, options.repeats)
    case.compressed()
    reset_stats()
    seconds, exposed = _time(case, case.compressed, options.repeats)
    total = stats()["total"]
    sent = total["bytes_sent"] / total["calls"]
    baseline_bytes = plain_bytes(options.collective, case.input.nbytes, world)
    values = baseline_bytes / gradient.element_size()
    return {
        "collective": options.collective,
        "codec": config.compression_type if config.codecs is None else config.codecs[0].name,
        "world_size": world,
        "numel": numel,
        "dtype": options.dtype,
        "device": options.device,
        "baseline_ms": 1e3 * plain_seconds,
        "ms": 1e3 * seconds,
        "speedup": plain_seconds / seconds,
        "payload_bytes": round(sent),
        "bits_per_element": 8 * sent / values if values else 0.0,
        "waiting_share": exposed,
        "relative_error": case.relative_error(),
        "bitwise_equal": case.bitwise_equal(),
        "plain": total["plain_calls"] > 0,
    }


class Case:
    """The tensors of one measurement. `numel` counts the values of the whole tensor."""

    def __init__(
        self, collective: str, gradient: torch.Tensor, config: Config, beside_python: bool
    ):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.collective, self.config, self.beside_python = collective, config, beside_python
        if beside_python and collective != "all_reduce":
            raise ConfigError("--beside-python measures all_reduce only")
        self.whole = gradient[: gradient.numel() // world * world] if self._split else gradient
        part = self.whole.numel() // world
        if self._split and part == 0:
            raise ConfigError(f"{collective} of {gradient.numel()} values on {world} ranks")
        mine = self.whole[rank * part : (rank + 1) * part]
        self.original = mine.clone() if collective == "all_gather" else self.whole.clone()
        self.input = self.original.clone()
        self.output = {
            "reduce_scatter": lambda: torch.empty_like(mine),
            "all_gather": lambda: torch.empty_like(self.whole),
        }.get(collective, lambda: self.input)()

    @property
    def _split(self) -> bool:
        return self.collective in ("reduce_scatter", "all_gather")

    def plain(self) -> None:
        if self.beside_python:
            self._loop_until_done(dist.all_reduce(self.input, async_op=True))
        elif self.collective == "all_reduce":
            dist.all_reduce(self.input)
        else:
            BACKEND[self.collective](
                self.input, self.output, dist.ReduceOp.SUM, 0, dist.group.WORLD, False
            )

    def compressed(self) -> None:
        if self.beside_python:
            self._loop_until_done(all_reduce(self.input, config=self.config, async_op=True))
        elif self.collective == "all_reduce":
            all_reduce(self.input, config=self.config)
        elif self.collective == "broadcast":
            broadcast(self.input, 0, config=self.config)
        elif self.collective == "reduce_scatter":
            reduce_scatter(self.output, self.input, config=self.config)
        else:
            all_gather(self.output, self.input, config=self.config)

    @staticmethod
    def _loop_until_done(work: Any) -> None:
        """Training code that holds the GIL whenever it can."""
        turns = 0
        while turns % 1000 or not work.is_completed():
            turns += 1
        work.wait()

    def restore(self) -> None:
        self.input.copy_(self.original)

    def exact(self) -> torch.Tensor:
        """The right result, from a float64 collective of torch's."""
        world, rank = dist.get_world_size(), dist.get_rank()
        if self.collective == "broadcast":
            exact = self.original.double()
            dist.broadcast(exact, 0)
            return exact
        if self.collective == "all_gather":
            exact = torch.zeros_like(self.output, dtype=torch.float64)
            part = self.original.numel()
            exact[rank * part : (rank + 1) * part] = self.original.double()
            dist.all_reduce(exact)
            return exact
        exact = self.original.double()
        dist.all_reduce(exact)
        part = self.output.numel()
        exact = exact / world
        return exact if self.collective == "all_reduce" else exact[rank * part : (rank + 1) * part]

    def relative_error(self) -> float:
        """Norm of the error over norm of the right result, over all ranks."""
        self.restore()
        self.compressed()
        exact = self.exact()
        error = self.output.double() - exact
        sums = torch.stack([error.square().sum(), exact.square().sum()])
        dist.all_reduce(sums)
        return float((sums[0] / sums[1]).sqrt()) if sums[1] > 0 else 0.0

    def bitwise_equal(self) -> bool | None:
        """Whether all ranks hold the same bits; None where each has another part."""
        if self.collective == "reduce_scatter":
            return None
        mine = self.output.view(torch.uint8)
        first = mine.clone()
        dist.broadcast(first, 0)
        same = torch.tensor([int(torch.equal(first, mine))], device=mine.device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        return bool(same.item())


def _time(case: Case, call: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median over `repeats` of the slowest rank's seconds, and the share spent waiting."""
    times, device = [], case.input.device
    for _ in range(repeats + 1):
        case.restore()
        dist.barrier()
        _finish(device)
        time.sleep(0.005)  # ranks that share cores all leave the barrier before one begins
        begun = time.perf_counter()
        call()
        _finish(device)
        times.append(time.perf_counter() - begun)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rows = stats()["rows"]
    busy = sum(row["total_seconds"] for row in rows)
    waiting = sum(row["exposed_seconds"] for row in rows) / busy if busy else 0.0
    return statistics.median(slowest.tolist()), waiting


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
