"""Real text that is on every machine: the source files of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_EVERY = 10  # files


def load() -> tuple[Tensor, Tensor]:
    """Training and validation bytes (uint8) of the library's top-level modules, split by files."""
    folder = Path(sysconfig.get_path("stdlib"))
    # What a distribution or a build adds would make the text differ between machines.
    skipped = ("_sysconfigdata", "sitecustomize")
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith(skipped))
    if len(files) < 2 * VALIDATION_EVERY:
        raise FileNotFoundError(
            f"only {len(files)} source files in {folder}: this Python comes without the sources "
            "of its standard library; use another one"
        )
    validation = files[::VALIDATION_EVERY]
    training = sorted(set(files) - set(validation))
    return _read(training), _read(validation)


def sample(
    text: Tensor, batch: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows of `text` and the bytes that follow: int64 of shape (batch, length)."""
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    return _windows(text, starts, length)


def evenly(text: Tensor, windows: int, length: int) -> tuple[Tensor, Tensor]:
    """As `sample`, with windows spread evenly over `text`."""
    return _windows(text, torch.linspace(0, len(text) - length - 1, windows).long(), length)


def _windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    found = text[starts[:, None] + torch.arange(length + 1)].long()
    return found[:, :-1], found[:, 1:]


def _read(files: list[Path]) -> Tensor:
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
