"""`bench codec --device cuda`: codecs beside the device's own copy, measured in the same run.

Launches are captured in a CUDA graph, so that the host's time is not in the figures, and rotate
through buffers that together are far larger than the second-level cache, as the copy's do.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import _arrays, _core, _cuda
from .errors import UnsupportedError

SIZES = (1 << 20, 1 << 24, 1 << 28, 1 << 30)  # bytes of values
RANKS = 4  # contributions to a reduction
_WORKING_SET = 1 << 29  # bytes that the rotating buffers of one role have at least
_DISTINCT = 1 << 22  # values; larger sources repeat them
_SECONDS = 0.02  # of one measurement


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


class _Buffers:
    """`slots` equal pieces of device memory for each role."""

    def __init__(self, codec: Any, values: np.ndarray, numel: int, dtype: _arrays.DType):
        torch = torch_or_error()
        self.count, self.nbytes = numel, numel * dtype.size
        self.encoded = codec.max_encoded_bytes(numel, dtype.number)
        stride = -(-self.encoded // 64) * 64
        self.slots = max(1, min(256, _WORKING_SET // self.nbytes))
        base = torch.from_numpy(values).to("cuda").to(getattr(torch, dtype.name))
        kind = {"dtype": base.dtype, "device": "cuda"}
        self.source = torch.empty(self.slots, numel, **kind)
        for slot in self.source:
            for part in slot.split(base.numel()):
                part.copy_(base[: part.numel()])
        self.target = torch.empty(self.slots, numel, **kind)
        raw = {"dtype": torch.uint8, "device": "cuda"}
        self.payloads = torch.empty(self.slots, RANKS, stride, **raw)
        self.sum = torch.empty(self.slots, stride, **raw)


class _Timer:
    """Seconds of one launch of a call, on a stream of its own."""

    def __init__(self, repeats: int):
        self.torch = torch_or_error()
        self.stream = self.torch.cuda.Stream()
        self.repeats = repeats
        with self.torch.cuda.stream(self.stream):
            self.queue = _cuda.current_queue("torch", self.stream.device_index)

    def seconds(
        self, call: Callable[[int], Any], slots: int, eager: bool = False, graph: bool = True
    ) -> float:
        """Median over replays; `call(slot)` is launched as often as fills a measurement. `eager`:
        or without a graph, if that is faster, as copies can be. Without `graph`: only so."""
        with self.torch.cuda.stream(self.stream):
            once = min(self._timed(lambda: call(0)) for _ in range(3))
            launches = max(slots, min(400, int(_SECONDS / once)))

            def launch() -> None:
                for i in range(launches):
                    call(i % slots)

            runs: list[Callable[[], None]] = [launch] if eager or not graph else []
            if graph:
                captured = self.torch.cuda.CUDAGraph()
                with self.torch.cuda.graph(captured, stream=self.stream):
                    launch()
                captured.replay()
                runs.append(captured.replay)
            times = [
                statistics.median(self._timed(run) for _ in range(self.repeats)) for run in runs
            ]
        return min(times) / launches

    def _timed(self, run: Callable[[], Any]) -> float:
        begun, ended = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record(self.stream)
        run()
        ended.record(self.stream)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3


def measure_codec(
    core: Any, numel: int, dtype: _arrays.DType, values: np.ndarray, repeats: int
) -> dict[str, Any]:
    """GB/s of uncompressed data, bits, NMSE, and bytes moved over time as a share of the copy's."""
    codec = _core.codec_on_cuda(core)
    timer = _Timer(repeats)
    queue, number = timer.queue, dtype.number
    at = _Buffers(codec, values[:_DISTINCT], numel, dtype)
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
        "nmse": _nmse(at.target[0], at.source[0]),
        "copy_gbps": at.nbytes / copy / 1e9,
        **{f"{name}_gbps": at.nbytes / value / 1e9 for name, value in seconds.items()},
        **{f"{name}_of_copy": moved[name] / value / copied for name, value in seconds.items()},
        "slots": at.slots,
        "device_name": timer.torch.cuda.get_device_name(),
    }


def _nmse(found: Any, exact: Any) -> float:
    errors, power = 0.0, 0.0
    for a, b in zip(found.split(1 << 24), exact.split(1 << 24), strict=True):
        errors += float((a.double() - b.double()).square().sum())
        power += float(b.double().square().sum())
    return errors / power if power else 0.0


def peers(options: argparse.Namespace, numel: int, values: np.ndarray) -> Iterator[dict[str, Any]]:
    """Other libraries' codecs in the same run, or that they are absent."""
    source = torch_or_error().from_numpy(np.resize(values[:_DISTINCT], numel)).to("cuda")
    for name, (module, measure, dtypes) in _PEERS.items():
        row: dict[str, Any] = {"peer": name, "device": "cuda", "dtype": options.dtype,
                               "numel": numel}  # fmt: skip
        if options.dtype not in dtypes:
            continue
        try:
            found = importlib.import_module(module)
        except ImportError:
            yield {**row, "absent": True}
            continue
        yield {
            **row,
            **measure(found, options, source.to(getattr(torch_or_error(), options.dtype))),
        }


class _Peer:
    """Measures calls on `source` as shares of its copy's speed."""

    def __init__(self, options: argparse.Namespace, source: Any, graph: bool = True):
        self.timer, self.graph = _Timer(options.repeats), graph
        target = source.clone()
        self.copied = 2 * source.nbytes / self.timer.seconds(lambda _: target.copy_(source), 1)

    def of_copy(self, moved: float, call: Callable[[], Any]) -> float:
        seconds = self.timer.seconds(lambda _: call(), 1, graph=self.graph)
        return float(moved / seconds / self.copied)


def _bitsandbytes(module: Any, options: argparse.Namespace, source: Any) -> dict[str, Any]:
    """Blockwise 8 bits with the same block size."""
    peer = _Peer(options, source)
    quantise = module.functional.quantize_blockwise
    dequantise = module.functional.dequantize_blockwise
    codes, state = quantise(source, blocksize=options.block_size)
    moved = source.nbytes + codes.nbytes + state.absmax.nbytes
    return {
        "encode_of_copy": peer.of_copy(
            moved, lambda: quantise(source, blocksize=options.block_size)
        ),
        "decode_of_copy": peer.of_copy(moved, lambda: dequantise(codes, state)),
        "nmse": _nmse(dequantise(codes, state), source),
    }


def _torchft(module: Any, options: argparse.Namespace, source: Any) -> dict[str, Any]:
    """float8, a scale for each row; rows of the same block size. A reduction leaves a quarter of
    the values. Its calls copy from host memory, which a graph cannot capture."""
    peer = _Peer(options, source, graph=False)
    rows = source.view(-1, options.block_size)
    encoded = module.fused_quantize_into_fp8([rows], RANKS)
    decoded = source.clone().view_as(rows)
    moved = source.nbytes + encoded.nbytes
    result = {
        "encode_of_copy": peer.of_copy(
            moved, lambda: module.fused_quantize_into_fp8([rows], RANKS)
        ),
        "decode_of_copy": peer.of_copy(
            moved, lambda: module.fused_dequantize_from_fp8([decoded], encoded, RANKS)
        ),
        "nmse": _nmse(decoded.view(-1), source),
    }
    reduced = encoded.clone()
    moved = encoded.nbytes * (RANKS + 1) / RANKS
    return {
        **result,
        "reduce_of_copy": peer.of_copy(
            moved, lambda: module.fused_reduce_fp8([rows], reduced, RANKS, 0)
        ),
    }


def _deepspeed(bits: int) -> Callable[..., dict[str, Any]]:
    def measure(module: Any, options: argparse.Namespace, source: Any) -> dict[str, Any]:
        """Symmetric integers, groups of the block size. Compiles its kernels at first use."""
        kernels = module.QuantizerBuilder().load()
        peer, kind = _Peer(options, source), kernels.Symmetric
        groups = source.numel() // options.block_size
        codes, scales = kernels.quantize(source, groups, bits, kind)
        encoded = codes.nbytes + scales.nbytes
        moved = source.nbytes + encoded
        return {
            "encode_of_copy": peer.of_copy(
                moved, lambda: kernels.quantize(source, groups, bits, kind)
            ),
            "decode_of_copy": peer.of_copy(
                moved, lambda: kernels.dequantize(codes, scales, groups, bits, kind)
            ),
            "reduce_of_copy": peer.of_copy(
                encoded * (RANKS + 1) / RANKS,
                lambda: kernels.quantized_reduction(
                    codes, scales, groups, groups // RANKS, bits, kind, RANKS
                ),
            ),
            "nmse": _nmse(kernels.dequantize(codes, scales, groups, bits, kind).view(-1), source),
        }

    return measure


_FLOATS = ("float32", "bfloat16", "float16")
# The module to import, what measures it, and the dtypes that it takes.
_PEERS: dict[str, tuple[str, Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "bitsandbytes": ("bitsandbytes", _bitsandbytes, _FLOATS),
    "torchft": ("torchft.quantization", _torchft, _FLOATS),
    "deepspeed, 8 bits": ("deepspeed.ops.op_builder", _deepspeed(8), ("float16",)),
    "deepspeed, 4 bits": ("deepspeed.ops.op_builder", _deepspeed(4), ("float16",)),
}
