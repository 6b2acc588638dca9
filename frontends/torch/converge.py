"""Paired trainings, plain and compressed, for `cccl converge`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _show
from .._config import Config, configure, current_config
from .._rules import PLAIN
from .._stats import reset_stats, stats
from ..errors import ConfigError
from ._layer_errors import layer_errors
from ._replicas import digest

_LAST = 0.1  # share of the steps whose mean loss is the final one, if nothing evaluates


class Training(Protocol):
    """What an entry's function returns for a seed; all ranks alike."""

    model: torch.nn.Module

    def step(self) -> float:
        """Trains a step; this rank's loss."""

    # evaluate() -> float, if it is there, is a validation loss: the mean over the ranks counts.
    # state_dict() and load_state_dict(state), if they are there, hold all that a later step depends
    # on beside torch's own random state: an interrupted run then goes on where it was looked at.


Evaluation = Callable[[Any], float]  # takes the training; higher is better


def run(
    make: Callable[[int], Training],
    config: Config | Mapping[str, Any],
    *,
    seeds: Iterable[int] = range(3),
    steps: int = 200,
    looks: int = 4,
    evaluations: Mapping[str, Evaluation] | None = None,
    folder: str | Path,
    advance: _show.Advance = lambda done: None,
) -> None:
    """For each seed a plain run and a compressed one; all ranks call it.

    `make(seed)` builds model and data, the same for both ways, and names no configuration. Each run
    is looked at `looks` times, evenly, the last time after the last step: validation loss, digests
    of the replicas, errors of each layer's gradient in that step. `evaluations` are called with the
    trained `Training` at the end; their mean over the ranks is a score, higher is better. Rank 0
    writes a run to `run-WAY-SEED.json` in `folder` when it has ended; runs that are there are not
    repeated, and one that was interrupted goes on from its last look if its training has
    `state_dict` (docs/converge.md). Raises `ConfigError` if the runs there were made with other
    settings, and if nothing was compressed.
    """
    wanted, folder, before = Config.load(config), Path(folder), current_config()
    if steps < 1 or looks < 1 or not wanted.compresses:
        raise ConfigError("converge takes a step and a look or more, and a codec to compress with")
    evaluations = evaluations or {}
    settings = {
        "compression_type": wanted.compression_type,
        "steps": steps,
        "looks": looks,
        "evaluations": sorted(evaluations),
        "world_size": dist.get_world_size(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for seed in seeds:
            for way in (PLAIN, wanted.compression_type):
                one = _Run(folder, way, seed, settings)
                if not one.done():
                    configure(dataclasses.replace(wanted, compression_type=way))
                    one.train(make, evaluations)
                advance(f"{way}, seed {seed}")
    finally:
        configure(before)


class _Run:
    """One training, its record, and its files."""

    def __init__(self, folder: Path, way: str, seed: int, settings: dict[str, Any]):
        self.way, self.seed, self.settings = way, seed, settings
        self.file = folder / f"run-{way}-{seed}.json"
        self.checkpoint = folder / f"run-{way}-{seed}.rank{dist.get_rank()}.pt"
        count, steps = settings["looks"], settings["steps"]
        self.looks_at = {max(1, steps * look // count) for look in range(1, count + 1)}
        self.record: dict[str, Any] = {
            "losses": [], "norms": [], "looks": [], "plain_bytes": 0, "bytes_sent": 0,
            "resumed_at": [],
        }  # fmt: skip

    def done(self) -> bool:
        """Whether rank 0 has it; every rank hears the same."""
        told: list[Any] = [None]
        if dist.get_rank() == 0 and self.file.exists():
            told[0] = json.loads(self.file.read_text())["settings"]
        dist.broadcast_object_list(told, 0)
        if told[0] is not None and told[0] != self.settings:
            raise ConfigError(
                f"{str(self.file)!r} was made with {told[0]}, not {self.settings}: another folder"
            )
        return told[0] is not None

    def train(self, make: Callable[[int], Training], evaluations: Mapping[str, Evaluation]) -> None:
        """From the beginning or a checkpoint to the end, and saves it."""
        torch.manual_seed(self.seed)
        training = make(self.seed)
        # What codecs keep between steps is not in a checkpoint.
        resumes = hasattr(training, "state_dict") and not current_config().remembers
        begin = self._load(training) if resumes else 0
        reset_stats()
        compressed = self.way != PLAIN
        with _gradient_norms(self.record["norms"]) as end_of_step:
            for number in range(begin + 1, self.settings["steps"] + 1):
                look = number in self.looks_at
                with contextlib.ExitStack() as stack:
                    layers = {}
                    if look and compressed:
                        layers = stack.enter_context(layer_errors(training.model))
                    self.record["losses"].append(float(training.step()))
                end_of_step()
                if number == begin + 1:
                    _check(compressed)
                if look:
                    self._look(training, number, layers)
                if look and resumes and number < self.settings["steps"]:
                    self._count_bytes()
                    self._save(training, number)
        self._count_bytes()
        self._finish(training, evaluations)

    def _look(self, training: Training, step: int, layers: dict[str, float]) -> None:
        evaluate = getattr(training, "evaluate", None)
        loss = None if evaluate is None else _mean(float(evaluate()))
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest(training.model))
        self.record["looks"].append(
            {"step": step, "validation": loss, "digests": digests, "layers": layers}
        )

    def _count_bytes(self) -> None:
        total = stats()["total"]
        for name in ("plain_bytes", "bytes_sent"):
            self.record[name] += total[name]
        reset_stats()

    def _finish(self, training: Training, evaluations: Mapping[str, Evaluation]) -> None:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.record["losses"])
        losses = [statistics.mean(step) for step in zip(*everyone, strict=True)]
        looks, sent = self.record["looks"], self.record["bytes_sent"]
        final = looks[-1]["validation"]
        if final is None:
            final = statistics.mean(losses[-max(1, int(_LAST * len(losses))) :])
        found = self.record | {
            "way": self.way,
            "seed": self.seed,
            "settings": self.settings,
            "losses": losses,
            "final": final,
            "replicas_equal": all(len(set(look["digests"])) == 1 for look in looks),
            "ratio": self.record["plain_bytes"] / sent if sent else 1.0,
            "scores": {name: _mean(float(call(training))) for name, call in evaluations.items()},
        }
        if dist.get_rank() == 0:  # whole or not at all, whatever interrupts
            part = self.file.with_suffix(".part")
            part.write_text(json.dumps(found))
            os.replace(part, self.file)
        dist.barrier()
        self.checkpoint.unlink(missing_ok=True)

    def _save(self, training: Any, step: int) -> None:
        """On every rank; all have written before one replaces what it had."""
        state = {
            "step": step,
            "settings": self.settings,
            "record": self.record,
            "training": training.state_dict(),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        dist.barrier()
        os.replace(part, self.checkpoint)

    def _load(self, training: Any) -> int:
        """The step that every rank's checkpoint is of; 0 if not all have the same."""
        state: dict[str, Any] = {}
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
        mine = state.get("step", 0) if state.get("settings") == self.settings else 0
        steps: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(steps, mine)
        if len(set(steps)) > 1 or not mine:
            return 0
        training.load_state_dict(state["training"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"]:
            torch.cuda.set_rng_state_all(state["random_cuda"])
        self.record = state["record"]
        self.record["resumed_at"].append(mine)
        return int(mine)


def _check(compressed: bool) -> None:
    """After the first step, rather than after hours."""
    total = stats()["total"]
    if (total["calls"] > total["plain_calls"]) != compressed:
        raise ConfigError(
            "nothing was compressed: is the model in DistributedDataParallel or on backend cccl?"
            if compressed
            else "the plain run compressed: the entry must name no configuration"
        )


@contextlib.contextmanager
def _gradient_norms(norms: list[float | None]) -> Iterator[Callable[[], None]]:
    """Appends, at each call of what it gives, the norm of the gradients that optimizers took since
    the last one: None if there was none."""
    squares: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(gradients)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of FSDP's shards
        squares.append(float(whole) ** 2)

    def end_of_step() -> None:
        norms.append(sum(squares) ** 0.5 if squares else None)
        squares.clear()

    handle = register_optimizer_step_pre_hook(look)
    try:
        yield end_of_step
    finally:
        handle.remove()


def _mean(mine: float) -> float:
    """Over the ranks; the same on all."""
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return statistics.mean(everyone)
