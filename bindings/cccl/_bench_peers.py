"""`bench codec --device cuda --peers`: other libraries' CUDA codecs, measured in the same run.

Bytes are counted as for our codecs: values and payload, each read or written once. What else a call
does (allocating or clearing its result, say) is in its time, not in its bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _arrays
from ._bench_cuda import RANKS, Timer, nmse, rotating, torch_or_error

WIDE_BLOCK = 2048  # values; beside --block-size, since the others are made for longer blocks
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class _Codec:
    """Calls of a peer. A payload is a sequence of tensors."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    # Takes a payload as `RANKS` parts of equal length. What it returns begins with their sum.
    reduce: Callable[[Any], Any] | None = None
    in_graph: bool = True


@dataclass(frozen=True)
class _Peer:
    name: str
    library: str
    dtypes: tuple[str, ...]
    codec: Callable[[Any, Any, int], _Codec]  # of the library, values like those coded, block size


def rows(options: argparse.Namespace, values: np.ndarray) -> Iterator[dict[str, Any]]:
    """A result for each peer, number of values and block size; for others, why there is none."""
    torch_or_error()
    dtype, loaded = _arrays.dtype_named(options.dtype), {name: load(name) for name in _LIBRARIES}
    usable = []
    for peer in _PEERS:
        library, reason = loaded[peer.library]
        if reason is None and dtype.name not in peer.dtypes:
            reason = f"takes {', '.join(peer.dtypes)}"
        if reason is None:
            usable.append((peer, library))
        else:
            yield {"peer": peer.name, "device": "cuda", "dtype": dtype.name, "skipped": reason}
    timer = Timer(options.repeats)
    for numel in options.numel if usable else ():
        source = rotating(values, numel, dtype)
        copy = _seconds_of_copy(source, timer)
        for block in sorted({options.block_size, WIDE_BLOCK}):
            for peer, library in usable:
                row = {"peer": peer.name, "device": "cuda", "dtype": dtype.name, "numel": numel,
                       "block_size": block}  # fmt: skip
                if numel % (RANKS * block):
                    yield row | {"skipped": f"measured with multiples of {RANKS * block} values"}
                    continue
                try:
                    yield row | _measure(peer.codec(library, source[0], block), source, timer, copy)
                except Exception as error:  # others' code, of whatever version is installed
                    yield row | {"skipped": _text(error)}


def load(name: str) -> tuple[Any, str | None]:
    """What a library offers, or why it cannot be used."""
    try:
        # Other libraries print to stdout as they are loaded; results belong there.
        with contextlib.redirect_stdout(sys.stderr):
            return _LIBRARIES[name](), None
    except ModuleNotFoundError as error:
        missing = error.name or name
        package = name if missing.split(".")[0] == name else missing
        return None, f"{package} is not installed: pip install {name}"
    except Exception as error:  # ImportError, or a failed build
        return None, _text(error)


def _text(error: Exception) -> str:
    """An error in one line. All of it goes to stderr: a failed build has much to say."""
    traceback.print_exception(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


def _seconds_of_copy(source: Any, timer: Timer) -> float:
    target = source.clone()
    timer.torch.cuda.synchronize()  # they were filled on another stream
    return timer.seconds(lambda slot: target[slot].copy_(source[slot]), len(source), eager=True)


def _bytes_of(part: Any) -> int:
    return int(part.nbytes if hasattr(part, "nbytes") else part.buffer_size)  # a tensor or nvCOMP's


def _measure(codec: _Codec, source: Any, timer: Timer, copy: float) -> dict[str, Any]:
    slots, numel = source.shape
    nbytes: int = source[0].nbytes
    seconds = timer.seconds if codec.in_graph else timer.queued_seconds
    payloads = [codec.encode(values) for values in source]
    encoded = sum(map(_bytes_of, payloads[0]))
    timer.overtaken = False
    kept: list[Any] = [None] * slots  # so that each slot's result has memory of its own

    def measured(call: Callable[[int], Any]) -> float:
        def keep(slot: int) -> None:
            kept[slot] = call(slot)

        timer.torch.cuda.synchronize()
        return seconds(keep, slots)

    def of_copy(moved: float, seconds: float) -> float:
        return moved / seconds * copy / (2 * nbytes)

    encode = measured(lambda slot: codec.encode(source[slot]))
    decode = measured(lambda slot: codec.decode(payloads[slot]))
    row = {
        "in_graph": codec.in_graph,
        "bits_per_element": 8 * encoded / numel,
        "nmse": nmse(codec.decode(payloads[0]), source[0]),
        "copy_gbps": nbytes / copy / 1e9,
        "encode_gbps": nbytes / encode / 1e9,
        "decode_gbps": nbytes / decode / 1e9,
        "encode_of_copy": of_copy(nbytes + encoded, encode),
        "decode_of_copy": of_copy(nbytes + encoded, decode),
        "slots": slots,
    }
    if codec.reduce:
        reduce, moved = codec.reduce, encoded * (RANKS + 1) / RANKS
        found = codec.decode(reduce(payloads[0]))[: numel // RANKS]
        row["reduce_nmse"] = nmse(found, source[0].view(RANKS, -1).float().sum(0))
        row["reduce_of_copy"] = of_copy(moved, measured(lambda slot: reduce(payloads[slot])))
    return row | {"host_bound": timer.overtaken}


def _bitsandbytes(bits: int) -> Callable[[Any, Any, int], _Codec]:
    def codec(library: Any, like: Any, block: int) -> _Codec:
        """The operators below `quantize_blockwise` and `quantize_4bit`, which copy tables at each
        call. Encoders launch on the default stream, wherever they are called."""
        torch = torch_or_error()
        ops = torch.ops.bitsandbytes
        if bits == 4:
            return _Codec(
                lambda values: ops.quantize_4bit.default(values, block, "nf4", torch.uint8),
                lambda payload: ops.dequantize_4bit.default(
                    *payload, block, "nf4", like.shape, like.dtype
                ),
                in_graph=False,
            )
        table = library.functional.create_dynamic_map().to(like.device)
        return _Codec(
            lambda values: ops.quantize_blockwise.default(values, table, block),
            lambda payload: ops.dequantize_blockwise.default(*payload, table, block, like.dtype),
            in_graph=False,
        )

    return codec


def _torchft(library: Any, like: Any, block: int) -> _Codec:
    """float8 (int8 before compute capability 9.0), a scale for each row of a block. Its calls copy
    addresses from host memory that they free: no graph can replay that."""
    rows = like.view(-1, block)

    def decode(payload: Any) -> Any:
        decoded = torch_or_error().empty_like(rows)
        library.fused_dequantize_from_fp8([decoded], *payload, RANKS)
        return decoded.view(-1)

    def reduce(payload: Any) -> Any:  # in place
        library.fused_reduce_fp8([rows], *payload, RANKS, 0)
        return payload

    return _Codec(
        lambda values: [library.fused_quantize_into_fp8([values.view(-1, block)], RANKS)],
        decode,
        reduce,
        in_graph=False,
    )


def _deepspeed(bits: int) -> Callable[[Any, Any, int], _Codec]:
    def codec(library: Any, like: Any, block: int) -> _Codec:
        """Symmetric integers, a scale for each group of a block."""
        kind = library.Symmetric

        def decode(payload: Any) -> Any:
            return library.dequantize(*payload, payload[1].numel(), bits, kind)

        def reduce(payload: Any) -> Any:
            groups = payload[1].numel()
            return library.quantized_reduction(*payload, groups, groups // RANKS, bits, kind, RANKS)

        return _Codec(
            lambda values: library.quantize(values, values.numel() // block, bits, kind),
            decode,
            reduce if block >= 256 else None,  # its kernel reduces over whole warps
        )

    return codec


def _nvcomp(algorithm: str) -> Callable[[Any, Any, int], _Codec]:
    def codec(library: Any, like: Any, _: int) -> _Codec:
        """Loses nothing; chunks of 64 KiB, whatever the block. It has no bfloat16. Each call is
        waited for: its result must not be freed before."""
        torch = torch_or_error()
        kind = {torch.float32: "<f4", torch.float16: "<f2"}.get(like.dtype, "|u1")
        coder = library.Codec(algorithm=algorithm, data_type=kind)

        def encode(values: Any) -> Any:
            encoded = coder.encode(library.as_array(values.view(torch.uint8)))
            torch.cuda.synchronize()
            return [encoded]

        def decode(payload: Any) -> Any:
            decoded = coder.decode(payload[0])
            torch.cuda.synchronize()
            values = torch.from_dlpack(decoded).view(like.dtype)
            values.owner = decoded  # whose memory goes with it
            return values

        return _Codec(encode, decode, in_graph=False)

    return codec


def _load_deepspeed() -> Any:
    """Compiles the kernels, where that has not been done."""
    return importlib.import_module("deepspeed.ops.op_builder").QuantizerBuilder().load()


_LIBRARIES: dict[str, Callable[[], Any]] = {
    "bitsandbytes": lambda: importlib.import_module("bitsandbytes"),
    "torchft": lambda: importlib.import_module("torchft.quantization"),
    "deepspeed": _load_deepspeed,
    "nvidia-nvcomp-cu13": lambda: importlib.import_module("nvidia.nvcomp"),
}
_PEERS = (
    _Peer("bitsandbytes, 8 bits", "bitsandbytes", _FLOATS, _bitsandbytes(8)),
    _Peer("bitsandbytes, nf4", "bitsandbytes", _FLOATS, _bitsandbytes(4)),
    _Peer("torchft, fp8", "torchft", _FLOATS, _torchft),
    _Peer("deepspeed, 8 bits", "deepspeed", ("float16",), _deepspeed(8)),
    _Peer("deepspeed, 4 bits", "deepspeed", ("float16",), _deepspeed(4)),
    _Peer("nvcomp, ANS", "nvidia-nvcomp-cu13", _FLOATS, _nvcomp("ANS")),
    _Peer("nvcomp, Bitcomp", "nvidia-nvcomp-cu13", _FLOATS, _nvcomp("Bitcomp")),
)  # fmt: skip
