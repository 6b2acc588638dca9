"""`bench codec` and `bench collective`: what compression costs and saves, beside a baseline."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import _arrays, _bench_cuda, _bench_peers, _bench_table, _core
from ._config import Config
from ._rules import COLLECTIVES, PLAIN
from .errors import ConfigError, UnsupportedError

WARM_UP = 0.05  # seconds
REDUCED = 4  # payloads that a reduction is measured with


def add_commands(commands: Any) -> None:
    """Adds `bench` to the command line."""
    kinds = commands.add_parser("bench", help="measure codecs or collectives")
    kinds = kinds.add_subparsers(dest="kind", required=True)

    codec = kinds.add_parser(
        "codec",
        help="one process: speed, bits and error of codecs",
        epilog="example: python -m cccl bench codec --codec block_float4",
    )
    codec.add_argument("--isa", default="auto", help="auto, baseline, avx2 or avx512")
    codec.add_argument(
        "--threads", type=int, default=1, help="that share a call; 0: as many as fit"
    )
    codec.add_argument("--peers", action="store_true", help="other libraries' codecs too (CUDA)")
    codec.set_defaults(run=run_codec)

    collective = kinds.add_parser(
        "collective",
        help="one process per rank: time beside plain torch.distributed",
        epilog="example: torchrun --nproc-per-node 2 -m cccl bench collective --codec block_float8",
    )
    collective.add_argument("--collective", default="all_reduce", choices=COLLECTIVES)
    collective.add_argument("--result-type", help="codec of the second leg (default: the same)")
    collective.add_argument("--chunk-size", default="auto", help="bytes of values per chunk")
    collective.add_argument("--window", default="auto", help="chunks between post and wait")
    collective.add_argument("--algorithm", default="auto", help="auto, two_shot or one_shot")
    collective.add_argument("--peer-memory", default="auto", help="auto or off (CUDA)")
    collective.add_argument("--no-checksum", action="store_true", help="leave checksums out")
    collective.add_argument(
        "--beside-python",
        action="store_true",
        help="a pure-Python loop runs in the main thread during each all_reduce",
    )
    collective.add_argument("--deadline", type=float, default=300.0, help="seconds per wait")
    collective.set_defaults(run=run_collective)
    _bench_table.add_command(kinds)

    for command in (codec, collective):
        command.add_argument(
            "--codec",
            nargs="+",
            default=["block_float8", "block_float4"],
            help="names or aliases, or 'all'",
        )
        command.add_argument("--device", default="cpu", help="cpu or cuda")
        command.add_argument("--dtype", default="float32", help="of the values")
        command.add_argument(
            "--numel",
            type=int,
            nargs="+",
            help="values (default: 4194304 or those of --input; on CUDA 1 MiB to 1 GiB)",
        )
        command.add_argument("--input", type=Path, help="gradients: .npy, or all arrays of a .npz")
        command.add_argument("--block-size", type=int, default=128)
        command.add_argument("--rounding", default="nearest", help="nearest or stochastic")
        command.add_argument("--level", default="fast", help="fast or best")
        command.add_argument("--rotation", default="none", help="none or hadamard")
        command.add_argument("--top-k", type=float, help="share of values that sparse keeps")
        command.add_argument("--zeros", type=float, default=0.0, help="share of values made 0")
        command.add_argument("--threshold", type=float, help="magnitude below which sparse drops")
        command.add_argument("--repeats", type=int, default=10, help="of which the median counts")
        command.add_argument("--json", action="store_true", help="one JSON object per line")


def run_codec(options: argparse.Namespace) -> None:
    """`bench codec`."""
    _core.force_isa(options.isa)
    _core.set_codec_threads(options.threads)
    on_cuda = options.device == "cuda"
    if options.peers and not on_cuda:
        raise UnsupportedError("--peers measures CUDA codecs; add --device cuda")
    measure = measure_on_cuda if on_cuda else measure_codec
    for name in codecs_of(options):
        reason = _no_cuda_code(name, options) if on_cuda and options.codec == ["all"] else None
        if reason:
            emit({"codec": name, "device": options.device, "skipped": reason}, options.json)
            continue
        for numel in options.numel:
            emit(measure(name, numel, options), options.json)
    if options.peers:
        for row in _bench_peers.rows(options, values_of(1 << 22, options.input)):
            emit(row, options.json)


def run_collective(options: argparse.Namespace) -> None:
    """`bench collective`, in each rank's process."""
    try:
        module = importlib.import_module("cccl.torch.bench")
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"bench collective needs {error.name}: pip install 'cccl[torch]'"
        ) from error
    module.run(options)


def codecs_of(options: argparse.Namespace) -> list[str]:
    """The codecs asked for. Refuses devices and sizes that cannot be measured."""
    if options.device not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {options.device!r}; allowed: cpu or cuda")
    if options.device == "cuda":
        _bench_cuda.torch_or_error()
    if options.numel is None and options.device == "cuda":
        options.numel = [size // _floating(options.dtype).size for size in _bench_cuda.SIZES]
    if options.numel is None:
        options.numel = [1 << 22 if options.input is None else _load(options.input).size]
    if min(options.numel) < 1 or options.repeats < 1:
        raise ConfigError("numel and repeats must be 1 or more")
    _floating(options.dtype)
    return list(_core.codec_names()) if options.codec == ["all"] else options.codec


def _no_cuda_code(name: str, options: argparse.Namespace) -> str | None:
    """Why the codec cannot be measured on a CUDA device, if so."""
    try:
        _core.codec_on_cuda(_codec_of(name, options))
    except UnsupportedError as error:
        return str(error)
    return None


def config_of(name: str, options: argparse.Namespace) -> Config:
    """The options that a codec understands, as a configuration."""
    return Config(
        compression_type=name,
        block_size=options.block_size,
        rounding=options.rounding,
        level=options.level,
        rotation=options.rotation,
        top_k=options.top_k,
        threshold=options.threshold,
    )


def measure_codec(name: str, numel: int, options: argparse.Namespace) -> dict[str, Any]:
    """Speed of `numel` values in GB/s of uncompressed data, and NMSE in float64.

    encode and decode: of the values; accumulate: of the decoded values of 4 payloads as they are
    added up; reduce: of the sum of 4 payloads, decoded, added, divided and encoded in one pass;
    copy: memcpy, bytes copied.
    """
    codec = _codec_of(name, options)
    dtype = _floating(options.dtype)
    values = with_zeros(values_of(numel, options.input), options.zeros)
    cast = _cast(values, dtype)
    source = _aligned(cast.nbytes).view(cast.dtype)
    source[:] = cast
    decoded = np.empty_like(source)
    payload = _aligned(codec.max_encoded_bytes(numel, dtype.number))
    size = 0

    def encode() -> None:
        nonlocal size
        size = codec.encode(source.ctypes.data, numel, dtype.number, payload.ctypes.data,
                            payload.nbytes, 0, 0, True)  # fmt: skip

    def decode() -> None:
        codec.decode(payload.ctypes.data, size, decoded.ctypes.data, numel, dtype.number)

    encode()
    payloads = [payload, *(_aligned(size) for _ in range(REDUCED - 1))]
    for copy in payloads[1:]:
        copy[:] = payload[:size]
    addresses = [one.ctypes.data for one in payloads]
    summed = _aligned(payload.nbytes)

    def accumulate() -> None:
        codec.reduce(addresses, size, REDUCED, decoded.ctypes.data, numel, dtype.number)

    def reduce() -> None:
        codec.reduce_encode(addresses, size, REDUCED, codec, summed.ctypes.data,
                            summed.nbytes, numel, dtype.number, 0, 0)  # fmt: skip

    nbytes = numel * dtype.size
    seconds = {
        "encode_gbps": median_seconds(encode, options.repeats),
        "decode_gbps": median_seconds(decode, options.repeats),
        "accumulate_gbps": median_seconds(accumulate, options.repeats) / REDUCED,
        "reduce_gbps": median_seconds(reduce, options.repeats),
        "copy_gbps": median_seconds(lambda: np.copyto(decoded, source), options.repeats),
    }
    decode()
    exact, found = _as_float64(source, dtype), _as_float64(decoded, dtype)
    power = float(np.square(exact).sum())
    return {
        **_settings(codec, numel, options),
        "isa": _core.current_isa(),
        "bits_per_element": 8 * size / numel,
        "nmse": float(np.square(found - exact).sum()) / power if power else 0.0,
        **{key: nbytes / value / 1e9 for key, value in seconds.items()},
    }


def measure_on_cuda(name: str, numel: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same on a CUDA device, with sums of several payloads, beside the device's copy."""
    codec = _codec_of(name, options)
    values = with_zeros(values_of(min(numel, 1 << 22), options.input), options.zeros)
    measured = _bench_cuda.measure_codec(
        codec, numel, _floating(options.dtype), values, options.repeats
    )
    return {**_settings(codec, numel, options), **measured}


def _codec_of(name: str, options: argparse.Namespace) -> _core.Codec:
    if name == PLAIN:
        raise ConfigError("codec = 'none'; 'identity' measures the path without compression")
    codecs = config_of(name, options).codecs
    assert codecs is not None
    return codecs[0]


def _settings(codec: _core.Codec, numel: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "codec": codec.name,
        "device": options.device,
        "dtype": options.dtype,
        "numel": numel,
        "block_size": options.block_size,
        "rounding": options.rounding,
        "level": options.level,
        "rotation": options.rotation,
        "zeros": options.zeros,
    }


def values_of(numel: int, path: Path | None, seed: int = 0) -> np.ndarray:
    """`numel` float32 values: from a file, repeated where it is short, or made to look like
    gradients (normal, in rows of log-normal scale, which is kinder than real ones)."""
    if path is not None:
        return np.resize(_load(path), numel)
    generator = np.random.default_rng(seed)
    rows = np.exp(generator.standard_normal(numel // 1024 + 1, np.float32))
    scale = np.repeat(rows, 1024)[:numel] * np.float32(1e-3)
    return generator.standard_normal(numel, np.float32) * scale


def with_zeros(values: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """A random `share` of the values becomes 0."""
    if not 0 <= share <= 1:
        raise ConfigError(f"zeros = {share}; allowed: a share from 0 to 1")
    if share:
        values = np.where(np.random.default_rng(seed + 1).random(values.size) < share, 0, values)
    return values.astype(np.float32, copy=False)


def _aligned(nbytes: int) -> np.ndarray:
    """Memory aligned as that of the library's own pool and of tensors."""
    memory = np.empty(nbytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:nbytes]


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """Of `repeats` calls, after as many as wake a processor up."""
    begun = time.perf_counter()
    while True:
        call()
        if time.perf_counter() - begun > WARM_UP:
            break
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def emit(row: dict[str, Any], as_json: bool) -> None:
    """One result, for programs or for people."""
    if as_json:
        print(json.dumps(row), flush=True)
    else:
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print("  ".join(shown), flush=True)


def _load(path: Path) -> np.ndarray:
    """All floating-point values of a .npy or .npz file, as float32."""
    try:
        loaded = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"cannot read gradients from {str(path)!r}: {error}") from error
    arrays = [loaded] if isinstance(loaded, np.ndarray) else [loaded[key] for key in loaded.files]
    floats = [array.ravel() for array in arrays if array.dtype.kind == "f"]
    if sum(array.size for array in floats) == 0:
        raise ConfigError(f"{str(path)!r} holds no floating-point values")
    return np.concatenate(floats).astype(np.float32)


def _floating(name: str) -> _arrays.DType:
    dtype = _arrays.dtype_named(name)
    if not dtype.floating:
        raise UnsupportedError(f"dtype {name}: codecs are measured on floating-point values")
    return dtype


def _cast(values: np.ndarray, dtype: _arrays.DType) -> np.ndarray:
    """To any dtype of the core; bfloat16, which NumPy lacks, as its bits."""
    if dtype.name != "bfloat16":
        return values.astype(dtype.name)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _as_float64(values: np.ndarray, dtype: _arrays.DType) -> np.ndarray:
    if dtype.name == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)
