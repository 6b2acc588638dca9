"""Paired trainings, plain and compressed, for `cccl converge`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .. import _show
from .._config import Config, configure, current_config
from .._rules import PLAIN
from .._stats import reset_stats, stats
from ..errors import ConfigError

_LAST = 0.1  # share of the steps whose mean loss is the final one, if nothing evaluates


class Training(Protocol):
    """What an entry's function returns for a seed; all ranks alike."""

    model: torch.nn.Module

    def step(self) -> float:
        """Trains a step; this rank's loss."""

    # evaluate() -> float, if it is there, is taken after the last step: the mean over the ranks.


def run(
    make: Callable[[int], Training],
    config: Config | Mapping[str, Any],
    *,
    seeds: Iterable[int] = range(3),
    steps: int = 200,
    folder: str | Path,
    advance: _show.Advance = lambda done: None,
) -> None:
    """For each seed a plain run and a compressed one; all ranks call it.

    `make(seed)` builds model and data, the same for both ways, and names no configuration. Rank 0
    writes a run to `run-WAY-SEED.json` in `folder` when it has ended; runs that are there are not
    repeated, so that an interrupted comparison goes on. Raises `ConfigError` if they were made with
    other settings, and if nothing was compressed.
    """
    wanted, folder, before = Config.load(config), Path(folder), current_config()
    if steps < 1 or not wanted.compresses:
        raise ConfigError("converge takes 1 step or more, and a codec as compression_type")
    settings = {
        "compression_type": wanted.compression_type,
        "steps": steps,
        "world_size": dist.get_world_size(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for seed in seeds:
            for way in (PLAIN, wanted.compression_type):
                file = folder / f"run-{way}-{seed}.json"
                if not _done(file, settings):
                    configure(dataclasses.replace(wanted, compression_type=way))
                    found = _train(make, seed, steps, way != PLAIN)
                    found |= {"way": way, "seed": seed, "settings": settings}
                    _save(file, found)
                advance(f"{way}, seed {seed}")
    finally:
        configure(before)


def _train(
    make: Callable[[int], Training], seed: int, steps: int, compressed: bool
) -> dict[str, Any]:
    torch.manual_seed(seed)
    training = make(seed)
    reset_stats()
    losses = torch.tensor([float(training.step()) for _ in range(steps)], dtype=torch.float64)
    total = stats()["total"]
    if (total["calls"] > total["plain_calls"]) != compressed:
        raise ConfigError(
            "nothing was compressed: is the model in DistributedDataParallel or on backend cccl?"
            if compressed
            else "the plain run compressed: the entry must name no configuration"
        )
    evaluate = getattr(training, "evaluate", None)
    final = statistics.mean(losses[-max(1, int(_LAST * steps)) :].tolist())
    if evaluate is not None:
        final = float(evaluate())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (losses.tolist(), final, digest(training.model)))
    return {
        "losses": [
            statistics.mean(step) for step in zip(*(one[0] for one in everyone), strict=True)
        ],
        "final": statistics.mean(one[1] for one in everyone),
        "replicas_equal": len({one[2] for one in everyone}) == 1,
        "ratio": total["ratio"],
    }


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of every bit of every parameter."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        found.update(parameter.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _done(file: Path, settings: dict[str, Any]) -> bool:
    """Whether rank 0 has the run; every rank hears the same."""
    told: list[Any] = [None]
    if dist.get_rank() == 0 and file.exists():
        told[0] = json.loads(file.read_text())["settings"]
    dist.broadcast_object_list(told, 0)
    if told[0] is not None and told[0] != settings:
        raise ConfigError(f"{str(file)!r} was made with {told[0]}, not {settings}: another folder")
    return told[0] is not None


def _save(file: Path, found: dict[str, Any]) -> None:
    """Whole or not at all, whatever interrupts."""
    if dist.get_rank() == 0:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(found))
        os.replace(part, file)
