"""The two legs of an all_reduce in one process: real codecs on simulated ranks' gradients.

A result of the collective is Q2(mean(Q1(x_r))) in every element, whoever owns it
(docs/architecture.md): so there is no need to cut shards here.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import cccl
from cccl import _arrays, _core, _cuda

sys.path.append(str(Path(__file__).parents[1]))
from feedback import Ranks  # of the loopback transport

_FLOAT32 = _arrays.dtype_named("float32").number
_ALIGNED = 64  # bytes between payloads, and between residuals
_SEEDS = 0x9E3779B97F4A7C15  # as the core spreads them


class Legs(Protocol):
    """Of one bucket."""

    def __call__(self, gradients: Tensor, out: Tensor, sequence: int) -> float:
        """Writes the mean of all ranks' gradients; bits sent, as the mean of both legs."""


@functools.cache
def queue_of(device: torch.device) -> _core.Queue | None:
    """Of a GPU's current stream, which stays the same here; to synchronize it raises what codecs
    found wrong since. None on a CPU."""
    if device.type == "cpu":
        return None
    return _cuda.current_queue("torch", torch.cuda.current_device())


def legs_of(config: cccl.Config, gradients: Tensor) -> Legs:
    """For gradients like these, a row for each rank, on their device where its codecs are there."""
    codecs = config.codecs
    if codecs is None:
        raise cccl.ConfigError(f"compression_type = {config.compression_type!r} names no codec")
    if any(codec.predicts for codec in codecs):
        return _OnLoopback(config, gradients)
    return _OnDevice(config, gradients)


def _aligned(bytes: int) -> int:
    return -(-bytes // _ALIGNED) * _ALIGNED


class _Residuals:
    """What codecs lost, of one sender or owner."""

    def __init__(self, config: cccl.Config, count: int, device: torch.device):
        stride = _aligned(_core.residual_bytes(config.residual_type, count))
        self._memory = torch.zeros(2, stride, dtype=torch.uint8, device=device)
        kept, following = (part.data_ptr() for part in self._memory)
        make = _core.Residual
        self._turns = [
            make(config.residual_type, *places, count, 0, config.residual_decay)
            for places in ((kept, following), (following, kept))
        ]

    def turn(self) -> Any:
        """For the next step: it reads what the last one wrote."""
        self._turns.reverse()
        return self._turns[1]


class _OnDevice:
    def __init__(self, config: cccl.Config, gradients: Tensor):
        world, self._count = gradients.shape
        device, self._seed = gradients.device, config.seed
        first, second = config.codecs or ()
        self._sizes = [c.max_encoded_bytes(self._count, _FLOAT32) for c in (first, second)]
        self._queue = queue_of(device)
        if self._queue is not None:
            first, second = _core.codec_on_cuda(first), _core.codec_on_cuda(second)
        self._codecs = first, second
        stride = _aligned(max(self._sizes))
        self._payloads = torch.zeros(world + 1, stride, dtype=torch.uint8, device=device)
        *self._sent, self._result = (payload.data_ptr() for payload in self._payloads)
        feedback = config.feedback
        self._senders = [
            _Residuals(config, self._count, device) for _ in range(world)
            if feedback and feedback.sender
        ]  # fmt: skip
        self._owner = None
        if feedback and feedback.owner:
            self._owner = _Residuals(config, self._count, device)

    def __call__(self, gradients: Tensor, out: Tensor, sequence: int) -> float:
        (first, second), count, queue = self._codecs, self._count, self._queue
        sizes = []
        for rank, (row, place) in enumerate(zip(gradients, self._sent, strict=True)):
            values, target = (row.data_ptr(), count, _FLOAT32), (place, self._sizes[0])
            seed = self._seed_of(self._seed, sequence, 1 + rank)
            if self._senders:
                residual = self._senders[rank].turn()
                size = _core.encode_corrected(first, *values, *target, seed, residual, queue)
            else:
                size = first.encode(*values, *target, 0, seed, True, queue)
            sizes.append(self._size(first, place, size))
        most = self._sizes[0] if queue is not None else max(sizes)
        mean = self._sent, most, float(len(sizes)), second
        target = self._result, self._sizes[1], count, _FLOAT32
        seed = self._seed_of(0, sequence, 0)
        if self._owner:
            size = _core.reduce_encode_corrected(
                first, *mean, *target, seed, self._owner.turn(), queue
            )
        else:
            size = first.reduce_encode(*mean, *target, 0, seed, queue)
        size = self._size(second, self._result, size)
        second.decode(self._result, size, out.data_ptr(), count, _FLOAT32, queue)
        return 4.0 * (sum(sizes) / len(sizes) + size)

    def _size(self, codec: Any, place: int, size: int) -> int:
        """Of a payload; on a device the header has it where the values decide it."""
        if self._queue is None or codec.fixed_size:
            return size
        return int(_core.header_of(place, size, self._queue)["bytes"])

    @staticmethod
    def _seed_of(base: int, sequence: int, source: int) -> int:
        return (base + _SEEDS * (sequence * 65536 + source + 1)) % 2**64


class _OnLoopback:
    """Real collectives of ranks on threads, on the host: for codecs that predict, which the
    collectives give what they predict by."""

    def __init__(self, config: cccl.Config, gradients: Tensor):
        world, count = gradients.shape
        self._ranks = Ranks(config, world)
        self._bits = sum(4.0 * c.max_encoded_bytes(count, _FLOAT32) for c in config.codecs or ())

    def __call__(self, gradients: Tensor, out: Tensor, sequence: int) -> float:
        copies = [row.to("cpu", copy=True) for row in gradients]
        out.copy_(self._ranks.mean(copies))
        return self._bits

    def __del__(self) -> None:
        self._ranks.close()
