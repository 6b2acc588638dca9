"""What is trained: the bundled GPT on Python source, a small network on scikit-learn's digits."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cccl

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import corpus
from gpt import GPT, SIZES, Size

RISING = 0.1  # of all steps: the learning rate, which then falls to 0 along a cosine
SMOOTHING = 0.1  # of the digits' labels: without it their loss is near 0, and relative to nothing
HELD_OUT_DIGITS = 397


class Task(NamedTuple):
    """A training: model, loss, optimizer, data. `draw` gives the batches of all steps and ranks,
    as indices; `take` makes inputs and targets of some; `held_out` are batches to validate on."""

    model: nn.Module
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    draw: Callable[[int, int, int], Tensor]
    take: Callable[[Tensor], tuple[Tensor, Tensor]]
    held_out: list[tuple[Tensor, Tensor]]


def rate_at(step: int, steps: int) -> float:
    """Factor of the learning rate."""
    rising = max(1, int(RISING * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def gpt(size: Size, rate: float, windows: int) -> Callable[[int, torch.device, str | None], Task]:
    """AdamW, bfloat16 autocast on a GPU."""

    def make(seed: int, device: torch.device, digits: str | None) -> Task:
        torch.manual_seed(seed)
        model = GPT(size).to(device)
        training, validation = (text.to(device) for text in corpus.load())
        offsets = torch.arange(size.context + 1, device=device)

        def draw(steps: int, world: int, seed: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            most = len(training) - size.context
            return torch.randint(most, (steps, world, size.batch), generator=generator).to(device)

        def take(starts: Tensor) -> tuple[Tensor, Tensor]:
            found = training[starts[..., None] + offsets].long()
            return found[..., :-1], found[..., 1:]

        def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
            # Without a cache of casts, so that a captured pass holds all that it needs.
            with torch.autocast(
                device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
            ):
                found: Tensor = model(tokens, targets)
            return found

        evenly = corpus.evenly(validation.cpu(), windows, size.context)
        parts = (part.to(device).split(64) for part in evenly)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        return Task(model, loss, optimizer, draw, take, list(zip(*parts, strict=True)))

    return make


def digits(
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], batch: int = 16
) -> Callable[[int, torch.device, str | None], Task]:
    """A small convolutional network, in float32."""

    def make(seed: int, device: torch.device, digits: str | None) -> Task:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.GELU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 16, 128), nn.GELU(), nn.Linear(128, 10),
        ).to(device)  # fmt: skip
        images, labels = (part.to(device) for part in load_digits(digits))
        count = len(images) - HELD_OUT_DIGITS

        def draw(steps: int, world: int, seed: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            return torch.randint(count, (steps, world, batch), generator=generator).to(device)

        def take(places: Tensor) -> tuple[Tensor, Tensor]:
            return images[places], labels[places]

        def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(model(inputs), targets, label_smoothing=SMOOTHING)

        held_out = [(images[count:], labels[count:])]
        return Task(model, loss, optimizer(list(model.parameters())), draw, take, held_out)

    return make


def load_digits(file: str | None) -> tuple[Tensor, Tensor]:
    """Images (float32, n x 1 x 8 x 8) and labels, in an order of no meaning: the same one always.
    `file`: scikit-learn's digits.csv.gz; None: that of the package installed here."""
    if file is None:
        try:
            package = importlib.import_module("sklearn.datasets")
        except ModuleNotFoundError as error:
            raise cccl.UnsupportedError(
                "the digits come with scikit-learn, which is missing: pip install scikit-learn, or "
                "--digits FILE with sklearn/datasets/data/digits.csv.gz of its wheel"
            ) from error
        file = str(Path(str(package.__file__)).parent / "data" / "digits.csv.gz")
    try:
        rows = np.loadtxt(file, delimiter=",", dtype=np.float32)
    except (OSError, ValueError) as error:
        raise cccl.ConfigError(f"--digits {file}: no digits.csv.gz of scikit-learn: {error}") from (
            error
        )
    if rows.ndim != 2 or rows.shape[1] != 65 or len(rows) <= HELD_OUT_DIGITS:
        raise cccl.ConfigError(f"--digits {file}: {rows.shape} values; 1797 rows of 65 are right")
    order = np.random.default_rng(0).permutation(len(rows))
    found = torch.from_numpy(rows[order])
    return (found[:, :64] / 16).view(-1, 1, 8, 8).contiguous(), found[:, 64].long()


# Learning rates at which a pair ends alike that differs in the last bits of its gradients. With
# three times its own, gpt-tiny ends up to 1 % apart, whatever is compressed.
WORKLOADS: dict[str, Callable[[int, torch.device, str | None], Task]] = {
    "gpt-tiny": gpt(SIZES["tiny"], 1e-3, 128),
    "gpt-medium": gpt(SIZES["medium"]._replace(batch=8), 5e-4, 512),
    "gpt-large": gpt(SIZES["large"], 3e-4, 256),
    "digits-sgd": digits(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4)),
    "digits-adamw": digits(lambda p: torch.optim.AdamW(p, lr=1e-3)),
}
