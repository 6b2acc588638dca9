"""`bench codec --device cuda`: codecs beside the device's own copy, measured in the same run.

Launches are captured in a CUDA graph, so that the host's time is not in the figures, and rotate
through buffers that together are far larger than the second-level cache, as the copy's do.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _arrays, _core, _cuda
from .errors import UnsupportedError

SIZES = (1 << 20, 1 << 24, 1 << 28, 1 << 30)  # bytes of values
RANKS = 4  # contributions to a reduction
_WORKING_SET = 1 << 29  # bytes that the rotating buffers of one role have at least
_DISTINCT = 1 << 22  # values; larger sources repeat them
_SECONDS = 0.02  # of one measurement
_QUEUED = 128  # calls; of a few launches each they fit into a stream's queue
_LONGEST_WAIT = 0.2  # seconds
_CLOCK = 2e9  # Hz, at least that of the device


def torch_or_error() -> Any:
    """The torch module; `UnsupportedError` where it or its device is missing."""
    if not _core.cuda_built():
        raise UnsupportedError("this build has no CUDA code; rebuild with CCCLIB_CUDA=ON")
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise UnsupportedError("bench --device cuda needs torch for memory and events") from error
    if not torch.cuda.is_available():
        raise UnsupportedError("device 'cuda': torch finds no CUDA device")
    return torch


def rotating(values: np.ndarray, numel: int, dtype: _arrays.DType) -> Any:
    """Slots of `numel` values on the device, together far larger than its second-level cache."""
    torch = torch_or_error()
    base = torch.from_numpy(values[:_DISTINCT]).to("cuda").to(getattr(torch, dtype.name))
    slots = max(1, min(256, _WORKING_SET // (numel * dtype.size)))
    source = torch.empty(slots, numel, dtype=base.dtype, device="cuda")
    for slot in source:
        for part in slot.split(base.numel()):
            part.copy_(base[: part.numel()])
    return source


class _Buffers:
    """Equal pieces of device memory for each role, as many as `rotating` gives."""

    def __init__(self, codec: Any, values: np.ndarray, numel: int, dtype: _arrays.DType):
        torch = torch_or_error()
        self.nbytes = numel * dtype.size
        self.encoded = codec.max_encoded_bytes(numel, dtype.number)
        stride = -(-self.encoded // 64) * 64
        self.source = rotating(values, numel, dtype)
        self.slots = len(self.source)
        self.target = torch.empty_like(self.source)
        raw = {"dtype": torch.uint8, "device": "cuda"}
        self.payloads = torch.empty(self.slots, RANKS, stride, **raw)
        self.sum = torch.empty(self.slots, stride, **raw)


class Timer:
    """Seconds of one call on the device."""

    def __init__(self, repeats: int):
        self.torch = torch_or_error()
        self.stream = self.torch.cuda.Stream()
        self.repeats = repeats
        self.overtaken = False  # whether the device began before the host had queued all calls
        with self.torch.cuda.stream(self.stream):
            self.queue = _cuda.current_queue("torch", self.stream.device_index)

    def seconds(self, call: Callable[[int], Any], slots: int, eager: bool = False) -> float:
        """Median over replays of a graph; `call(slot)` is launched as often as fills a measurement,
        on a stream of its own. `eager`: or without a graph, if that is faster, as copies can be."""
        with self.torch.cuda.stream(self.stream):
            launches, launch = self._launches(call, slots, 400)
            captured = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(captured, stream=self.stream):
                launch()
            captured.replay()
            runs = [launch, captured.replay] if eager else [captured.replay]
            times = [
                statistics.median(self._timed(run) for _ in range(self.repeats)) for run in runs
            ]
        return min(times) / launches

    def queued_seconds(self, call: Callable[[int], Any], slots: int) -> float:
        """The same for calls that a graph cannot capture, on the default stream: it is kept waiting
        until the host has launched them all (if `overtaken`, the host's time is in the result)."""
        launches, launch = self._launches(call, slots, _QUEUED)
        begun = time.perf_counter()
        launch()
        wait = 1.5 * min(_LONGEST_WAIT, time.perf_counter() - begun)
        times = [self._timed(launch, int(wait * _CLOCK)) for _ in range(self.repeats)]
        return statistics.median(times) / launches

    def _launches(
        self, call: Callable[[int], Any], slots: int, most: int
    ) -> tuple[int, Callable[[], None]]:
        once = min(self._timed(lambda: call(0)) for _ in range(3))
        launches = max(min(slots, most), min(most, int(_SECONDS / once)))

        def launch() -> None:
            for i in range(launches):
                call(i % slots)

        return launches, launch

    def _timed(self, run: Callable[[], Any], wait: int = 0) -> float:
        """On the current stream, which is idle for `wait` clock cycles first."""
        begun, ended = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        if wait:
            self.torch.cuda._sleep(wait)
        begun.record()
        run()
        ended.record()
        self.overtaken |= wait > 0 and begun.query()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3


def measure_codec(
    core: Any, numel: int, dtype: _arrays.DType, values: np.ndarray, repeats: int
) -> dict[str, Any]:
    """GB/s of uncompressed data, bits, NMSE, and bytes moved over time as a share of the copy's."""
    codec = _core.codec_on_cuda(core)
    timer = Timer(repeats)
    queue, number = timer.queue, dtype.number
    at = _Buffers(codec, values, numel, dtype)
    timer.torch.cuda.synchronize()  # the buffers were filled on another stream

    def encode(slot: int, rank: int = 0) -> None:
        codec.encode(at.source[slot].data_ptr(), numel, number,
                     at.payloads[slot, rank].data_ptr(), at.encoded, 0, rank, True,
                     queue)  # fmt: skip

    def decode(slot: int) -> None:
        codec.decode(at.payloads[slot, 0].data_ptr(), at.encoded, at.target[slot].data_ptr(),
                     numel, number, queue)  # fmt: skip

    def sources(slot: int) -> list[int]:
        return [at.payloads[slot, rank].data_ptr() for rank in range(RANKS)]

    def total(slot: int) -> None:
        codec.reduce(sources(slot), at.encoded, float(RANKS), at.target[slot].data_ptr(), numel,
                     number, queue)  # fmt: skip

    def reduce(slot: int) -> None:
        codec.reduce_encode(sources(slot), at.encoded, float(RANKS), codec,
                            at.sum[slot].data_ptr(), at.encoded, numel, number, 0, 0,
                            queue)  # fmt: skip

    copy = timer.seconds(lambda slot: at.target[slot].copy_(at.source[slot]), at.slots, True)
    copied = 2 * at.nbytes / copy
    for slot in range(at.slots):
        for rank in range(RANKS):
            encode(slot, rank)
    encoded = at.encoded
    if not codec.fixed_size:  # its sums are taken to be as long
        encoded = _core.header_of(at.payloads[0, 0].data_ptr(), at.encoded, queue)["bytes"]
    seconds, moved = {}, {
        "encode": at.nbytes + encoded,
        "decode": at.nbytes + encoded,
        "reduce": (RANKS + 1) * encoded,
        "accumulate": RANKS * encoded + at.nbytes,
    }  # fmt: skip
    for name, call in (
        ("encode", encode),
        ("decode", decode),
        ("reduce", reduce),
        ("accumulate", total),
    ):
        seconds[name] = timer.seconds(call, at.slots)
    decode(0)
    queue.synchronize()
    return {
        "bits_per_element": 8 * encoded / numel,
        "nmse": nmse(at.target[0], at.source[0]),
        "copy_gbps": at.nbytes / copy / 1e9,
        **{f"{name}_gbps": at.nbytes / value / 1e9 for name, value in seconds.items()},
        **{f"{name}_of_copy": moved[name] / value / copied for name, value in seconds.items()},
        "slots": at.slots,
        "device_name": timer.torch.cuda.get_device_name(),
    }


def nmse(found: Any, exact: Any) -> float:
    errors, power = 0.0, 0.0
    for a, b in zip(found.split(1 << 24), exact.split(1 << 24), strict=True):
        errors += float((a.double() - b.double()).square().sum())
        power += float(b.double().square().sum())
    return errors / power if power else 0.0
