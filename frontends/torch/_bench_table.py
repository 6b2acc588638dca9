"""`python -m cccl bench table`, in each rank's process."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from .. import _arrays, _bench_table, _core, _show, bench
from .._config import Config
from .._rules import PLAIN
from .._stats import reset_stats, stats
from ..errors import Error, UnsupportedError
from .bench import Case

_SETTLED = 3  # calls before those that count: agreement, memory, PowerSGD's plain steps
_COLUMNS = 1024  # of the matrices that PowerSGD approximates


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each collective, way and size; all ranks have the same."""
    if not _arrays.dtype_named(options.dtype).floating:
        raise UnsupportedError(f"dtype {options.dtype}: codecs are measured on floating-point")
    codecs = list(_core.codec_names()) if options.codec == ["all"] else options.codec
    configs = {name: Config(compression_type=name, deadline=options.deadline) for name in codecs}
    sizes = _bench_table.sizes(options.least, options.most, options.factor)
    names = {
        collective: [PLAIN, *configs, *(_peers(collective) if not options.no_peers else ())]
        for collective in options.collective
    }
    rows: list[dict[str, Any]] = []
    first = dist.get_rank() == 0
    total = sum(map(len, names.values()))
    with _show.progress(total, "bench table", shown=first) as advance:
        for collective, ways in names.items():
            for way in ways:
                config = configs.get(way)
                rows += _curve(collective, way, config, sizes, device, options)
                advance(f"{collective}, {way}")
    return rows


def _curve(
    collective: str,
    way: str,
    config: Config | None,
    sizes: list[int],
    device: torch.device,
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    world, dtype = dist.get_world_size(), getattr(torch, options.dtype)
    expected, reason = 0.0, None  # seconds of a call of the next size
    for nbytes in sizes:
        row: dict[str, Any] = {
            "collective": collective, "way": way, "bytes": nbytes, "dtype": options.dtype,
            "world_size": world, "device": options.device,
        }  # fmt: skip
        if reason is None and (_bench_table.FEWEST + _SETTLED) * expected > 2 * options.seconds:
            reason = f"about {expected:.2g} s per call"
        if reason is None:
            try:
                found = _cell(collective, way, config, nbytes // dtype.itemsize, device, options)
            except Error as error:  # a device without this codec; every rank has the same
                reason = str(error)
            else:
                row |= found
                expected = options.factor * found["p50_ms"] / 1e3
        if reason is not None:
            row["skipped"] = reason
        yield row


def _cell(
    collective: str,
    way: str,
    config: Config | None,
    numel: int,
    device: torch.device,
    options: argparse.Namespace,
) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    numel = -(-max(1, numel) // world) * world
    values = torch.from_numpy(bench.values_of(min(numel, 1 << 22), None, seed=rank))
    gradient = values.to(device, getattr(torch, options.dtype)).repeat(-(-numel // values.numel()))
    if config is not None:
        config = dataclasses.replace(config, collective_filter=(collective,))
    case = Case(collective, gradient[:numel], config or Config(), False)
    call = case.plain if way == PLAIN else case.compressed
    if config is None and way != PLAIN:
        call = _peer_call(way, case.input)
    first, *_, once = _slowest([_seconds(case, call) for _ in range(_SETTLED)])
    reset_stats()
    count = max(_bench_table.FEWEST, min(options.repeats, int(options.seconds / once)))
    times = _slowest([_seconds(case, call) for _ in range(count)])
    found = _bench_table.timed(collective, numel * gradient.element_size(), world, times)
    found["first_ms"] = 1e3 * first
    return found | ({"ratio": stats()["total"]["ratio"]} if config is not None else {})


def _seconds(case: Case, call: Callable[[], Any]) -> float:
    case.restore()
    dist.barrier()
    begun = time.perf_counter()
    call()
    if case.input.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _slowest(times: list[float]) -> list[float]:
    found = torch.tensor(times, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        found = found.cuda()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return list(found.tolist())


class _Bucket:
    """What PyTorch's hooks read of a `dist.GradBucket`, which only DDP can make."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def buffer(self) -> torch.Tensor:
        return self._tensor

    def gradients(self) -> list[torch.Tensor]:
        whole = self._tensor.numel() // _COLUMNS * _COLUMNS
        parts = [self._tensor[:whole].view(-1, _COLUMNS), self._tensor[whole:]]
        return [part for part in parts if part.numel()]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


_PEERS = ("PyTorch bf16 hook", "PyTorch fp16 hook", "PyTorch PowerSGD, rank 4")


def _peers(collective: str) -> tuple[str, ...]:
    return _PEERS if collective == "all_reduce" else ()


def _peer_call(name: str, tensor: torch.Tensor) -> Callable[[], Any]:
    """The hook itself, on a bucket of this tensor."""
    bucket: Any = _Bucket(tensor)
    if name == _PEERS[2]:
        state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2)
        return lambda: powerSGD_hook.powerSGD_hook(state, bucket).wait()
    hook = (
        default_hooks.bf16_compress_hook if name == _PEERS[0] else default_hooks.fp16_compress_hook
    )
    return lambda: hook(dist.group.WORLD, bucket).wait()
