#!/usr/bin/env python3
"""Data-parallel logistic regression on scikit-learn's handwritten digits, without torch.

  python examples/logistic_regression.py                  two processes, NumPy
  python examples/logistic_regression.py --device cuda    CuPy
  torchrun --nproc-per-node 4 examples/logistic_regression.py

Each rank has its share of the 1797 images. The gradients' mean goes through the communicator: once
exact, once per codec. Same data, same steps; what differs is what went over the wire.
"""

from __future__ import annotations

import argparse
from typing import Any

import processes
from sklearn.datasets import load_digits

import cccl
import cccl.cupy

CODECS = ("none", "block_float8", "block_float4")


def main() -> None:
    """Reads the options and runs the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    processes.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=100.0, help="length of a step")
    processes.run(train_all, parser.parse_args())


def train_all(communicator: cccl.cupy.Communicator, xp: Any, options: argparse.Namespace) -> None:
    """With each codec in turn; rank 0 prints a line for each."""
    images, digits = load(xp)
    held_out = xp.arange(len(images)) % 5 == 0
    train = images[~held_out], digits[~held_out]
    rank, world = communicator.rank, communicator.world_size
    mine = tuple(xp.ascontiguousarray(part[rank::world]) for part in train)
    for codec in CODECS:
        cccl.reset_stats()
        weights, loss = fit(communicator, xp, mine, codec, options)
        right = (images[held_out] @ weights).argmax(axis=1) == digits[held_out]
        total = cccl.stats()["total"]
        if rank == 0:
            print(f"{codec:13} loss {loss:.4f}  held-out accuracy {float(right.mean()):.4f}  "
                  f"{total['bytes_sent'] / 1e6:6.2f} MB sent per rank", flush=True)  # fmt: skip


def load(xp: Any) -> tuple[Any, Any]:
    """Images as pixels and products of two pixels, each with mean 0 and deviation 1; and digits."""
    pixels, digits = load_digits(return_X_y=True)
    pixels = xp.asarray(pixels / 16, dtype=xp.float32)
    rows, columns = xp.triu_indices(pixels.shape[1])
    features = xp.concatenate([pixels, pixels[:, rows] * pixels[:, columns]], axis=1)
    features = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-3)
    return features / features.shape[1] ** 0.5, xp.asarray(digits)


def fit(
    communicator: cccl.cupy.Communicator,
    xp: Any,
    data: tuple[Any, Any],
    codec: str,
    options: argparse.Namespace,
) -> tuple[Any, float]:
    """Gradient descent on the mean over all ranks' images; returns weights and the mean loss."""
    images, digits = data
    weights = xp.zeros((images.shape[1], 10), xp.float32)
    wanted = (digits[:, None] == xp.arange(10)).astype(xp.float32)
    loss = xp.zeros(1)
    for _ in range(options.steps):
        scores = images @ weights
        scores -= scores.max(axis=1, keepdims=True)
        chances = xp.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        loss[0] = -xp.log((chances * wanted).sum(axis=1) + 1e-12).mean()
        gradient = xp.ascontiguousarray(images.T @ (chances - wanted)) / xp.float32(len(images))
        communicator.all_reduce(gradient, gradient, "avg", config={"compression_type": codec})
        weights -= xp.float32(options.rate) * gradient
    communicator.all_reduce(loss, loss, "avg", config={"compression_type": "none"})
    return weights, float(loss[0])


if __name__ == "__main__":
    main()
