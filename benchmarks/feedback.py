"""Whether error feedback helps: a small GPT on several ranks simulated in one process.

    python benchmarks/feedback.py

Ranks compute their gradients one after the other; these go through real collectives over the
loopback transport. For each optimizer, codec and setting it prints the loss on held-out files after
training, less that of plain training with the same seed: the mean over seeds, and half of its 90 %
interval. docs/feedback.md has the tables.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cccl
from cccl import _core

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import corpus
from gpt import GPT, SIZES

RANKS = 4
SIZE = SIZES["tiny"]
RISING_STEPS = 10
WINDOWS = 256  # of the held-out files
# Half of the 90 % interval of a mean of so many, in standard errors (Student).
STUDENT = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 8: 1.89, 10: 1.83}

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
}
CODECS: dict[str, dict[str, Any]] = {
    "top-k 1 %": {"compression_type": "sparse", "top_k": 0.01},
    "4 bits": {"compression_type": "block_float4"},
    "3 bits": {"compression_type": "block_float3"},
    "2 bits": {"compression_type": "block_float2"},
    "3 bits stochastic": {"compression_type": "block_float3", "rounding": "stochastic"},
    "2 bits stochastic": {"compression_type": "block_float2", "rounding": "stochastic"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"error_feedback": "none"},
    "sender": {"error_feedback": "sender"},
    "both": {"error_feedback": "both"},
    "both, decay 0.9": {"error_feedback": "both", "residual_decay": 0.9},
}
# What is left out by default, so that all takes ten minutes of a core.
SKIPPED = {
    "4 bits": ("sender", "both, decay 0.9"),
    "3 bits": ("sender", "both, decay 0.9"),
    "3 bits stochastic": ("sender", "both", "both, decay 0.9"),
    "2 bits stochastic": ("sender", "both", "both, decay 0.9"),
}


class Ranks:
    """The collectives of all ranks, on threads."""

    def __init__(self, config: cccl.Config):
        self._config = config
        self._communicators = [_core.Communicator(t, 60.0) for t in _core.loopback(RANKS)]
        self._stores = [_core.StateStore() for _ in range(RANKS)]
        self._step = 0

    def mean(self, gradients: list[Tensor]) -> Tensor:
        """What every rank gets for these, one of each rank; written over them."""
        self._step += 1
        config, works = self._config, []
        layout = _core.Layout([("gradient", gradients[0].numel())])
        for rank, (communicator, gradient) in enumerate(
            zip(self._communicators, gradients, strict=True)
        ):
            extra = {"store": self._stores[rank], "layout": layout, "feedback": config.feedback,
                     "step": self._step} if config.feedback else {}  # fmt: skip
            works.append(communicator.submit(
                "all_reduce", gradient.data_ptr(), gradient.numel(), gradient.data_ptr(),
                gradient.numel(), 1, *config.codecs, seed=config.seed, **extra,
            ))  # fmt: skip
        if not all(work.wait(60.0) for work in works):
            raise TimeoutError("a collective did not end")
        if not all(torch.equal(gradients[0], other) for other in gradients[1:]):
            raise AssertionError("ranks hold different means")
        return gradients[0]

    def close(self) -> None:
        """Ends the threads."""
        for communicator in self._communicators:
            communicator.close()


def train(optimizer_name: str, config: cccl.Config | None, seed: int, steps: int) -> float:
    """The loss on held-out files after training; `config` None: with exact means."""
    torch.manual_seed(seed)
    model = GPT(SIZE)
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[optimizer_name](parameters)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RISING_STEPS, 1 - step / steps)
    )
    text, validation_text = corpus.load()
    generators = [torch.Generator().manual_seed(seed * 1000 + rank) for rank in range(RANKS)]
    ranks = Ranks(config) if config else None
    for _ in range(steps):
        gradients = []
        for generator in generators:
            loss = model(*corpus.sample(text, SIZE.batch, SIZE.context, generator))
            found = torch.autograd.grad(loss, parameters)
            gradients.append(torch.cat([g.flatten() for g in found]))
        mean = ranks.mean(gradients) if ranks else torch.stack(gradients).mean(0)
        parts = mean.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    if ranks:
        ranks.close()
    with torch.no_grad():
        return float(model(*corpus.evenly(validation_text, WINDOWS, SIZE.context)))


def compared(losses: list[float], plain: list[float]) -> str:
    """Mean of paired differences and half of its 90 % interval."""
    differences = [a - b for a, b in zip(losses, plain, strict=True)]
    text = f"{statistics.mean(differences):+.3f}"
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        text += f" ± {STUDENT.get(len(differences), 1.65) * error:.3f}"
    return text


def main() -> None:
    """Prints a table for each optimizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--all", action="store_true", help="every setting of every codec")
    parser.add_argument("--residual-type", default="bfloat16")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for optimizer in args.optimizers:
        begun = time.process_time()
        plain = [train(optimizer, None, seed, args.steps) for seed in range(args.seeds)]
        print(f"\n{optimizer}: plain {', '.join(f'{loss:.3f}' for loss in plain)}", flush=True)
        print(
            "\n| | " + " | ".join(args.settings) + " |\n" + "|---" * (len(args.settings) + 1) + "|"
        )
        for name in args.codecs:
            cells = []
            for setting in args.settings:
                if not args.all and setting in SKIPPED.get(name, ()):
                    cells.append("")
                    continue
                config = cccl.Config(
                    **CODECS[name], **SETTINGS[setting], residual_type=args.residual_type
                )
                losses = [train(optimizer, config, seed, args.steps) for seed in range(args.seeds)]
                cells.append(compared(losses, plain))
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        print(f"\n{time.process_time() - begun:.0f} s of CPU")


if __name__ == "__main__":
    main()
