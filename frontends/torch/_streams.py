"""The current CUDA stream, of which torch would make an object for every call."""

from __future__ import annotations

import functools

import torch


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """As `torch.cuda.current_stream`; one object for each stream."""
    number = device.index
    return _stream(number, torch._C._cuda_getCurrentRawStream(number))


@functools.lru_cache(maxsize=256)
def _stream(device: int, _handle: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)
