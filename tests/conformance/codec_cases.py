"""Every codec with every set of options, and raw calls into the core that guard its memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cccl
from cccl import _core

DTYPES: dict[str, tuple[int, int, bool]] = _core.dtypes()
FLOATS = [name for name, (_, _, floating) in DTYPES.items() if floating]
INTEGERS = [name for name, (_, _, floating) in DTYPES.items() if not floating]
ISAS = _core.available_isas()
SIZES = (0, 1, 2, 3, 7, 8, 9, 31, 33, 127, 2305, 65537)

_GUARD = 64
_GUARD_BYTE = 0xA5
_OPTION_SETS: tuple[dict[str, Any], ...] = (
    {},
    {"rounding": "stochastic"},
    {"level": "best"},
    {"block_size": 32},
    {"block_size": 1024},
    {"block_size": 32, "level": "best"},
    {"block_size": 1024, "rounding": "stochastic"},
    {"rotation": "hadamard"},
    {"rotation": "hadamard", "block_size": 32, "rounding": "stochastic"},
    {"rotation": "hadamard", "block_size": 1024, "level": "best"},
)
# Of the narrower block codecs, which share their source with block_float8 and block_float4.
_NARROW_OPTION_SETS: tuple[dict[str, Any], ...] = (
    {},
    {"block_size": 1024, "rounding": "stochastic"},
    {"block_size": 32, "level": "best"},
    {"rotation": "hadamard"},
)
_SPARSE_OPTION_SETS: tuple[dict[str, Any], ...] = (
    {},
    {"inner": "block_float8", "sparsity_threshold": 0.25},
    {"inner": "block_float3", "block_size": 32, "rounding": "stochastic"},
    {"inner": "cast_bf16", "threshold": 0.01},
    {"top_k": 0.1},
)
_DIFF_OPTION_SETS: tuple[dict[str, Any], ...] = (
    {},
    {"inner": "block_float3", "block_size": 32, "rounding": "stochastic"},
    {"inner": "cast_bf16"},
)


class Case(NamedTuple):
    """A codec, its options and its device, as a test parameter."""

    name: str
    options: dict[str, Any]
    device: str = "cpu"

    @property
    def core(self) -> Any:
        core = _core.make_codec(self.name, self.options)
        return core if self.device == "cpu" else OnCuda(core)

    def on(self, device: str) -> Case:
        return self._replace(device=device)

    def __str__(self) -> str:
        where = [] if self.device == "cpu" else [self.device]
        return "-".join([self.name, *(f"{k}={v}" for k, v in self.options.items()), *where])


class OnCuda:
    """A codec on the first CUDA device. Calls wait for the device, and raise what it found."""

    def __init__(self, core: Any):
        self.codec = _core.codec_on_cuda(core)
        self.queue = _core.cuda_queue(0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def _call(self, name: str, *arguments: Any, **more: Any) -> Any:
        plain = [getattr(a, "codec", a) for a in arguments]
        result = getattr(self.codec, name)(*plain, self.queue, **more)
        self.queue.synchronize()
        return result

    def _size(self, most: int, address: int, nbytes: int) -> int:
        """Of a payload: its header has it where the values decide it."""
        if self.codec.fixed_size:
            return most
        return _core.header_of(address, nbytes, self.queue)["bytes"]

    def encode(self, *arguments: Any) -> int:
        return self._size(self._call("encode", *arguments), *arguments[3:5])

    def decode(self, *arguments: Any) -> None:
        self._call("decode", *arguments)

    def reduce(self, *arguments: Any) -> None:
        self._call("reduce", *arguments)

    def reduce_encode(self, *arguments: Any, measures: bool = False) -> int:
        second: OnCuda = arguments[3]
        size = self._call("reduce_encode", *arguments, measures=measures)
        return second._size(size, *arguments[4:6])


def _option_sets(name: str) -> list[dict[str, Any]]:
    if name == "sparse":
        return list(_SPARSE_OPTION_SETS)
    if name == "diff":
        return list(_DIFF_OPTION_SETS)
    if name in ("block_float6", "block_float5"):
        return [o for o in _NARROW_OPTION_SETS if "level" not in o]  # it makes no difference
    narrow = name in ("block_float3", "block_float2")
    return [o for o in (_NARROW_OPTION_SETS if narrow else _OPTION_SETS) if _takes(name, o)]


def _takes(name: str, options: dict[str, Any]) -> bool:
    try:
        _core.make_codec(name, options)
    except cccl.ConfigError:
        return False
    return True


def _runs_on(device: str, case: Case) -> bool:
    try:
        case.on(device).core.supports(1)
    except cccl.UnsupportedError:
        return False
    return True


DEVICES = ("cpu", "cuda") if _core.cuda_device_count() else ("cpu",)
CASES = [
    Case(name, options, device)
    for device in DEVICES
    for name in cccl.codec_names()
    for options in _option_sets(name)
    if _runs_on(device, Case(name, options))
]
LOSSY = [case for case in CASES if not case.core.lossless]
BLOCKS = [case for case in CASES if case.name.startswith("block_float")]


def supported(case: Case) -> list[str]:
    return [name for name, (number, _, _) in DTYPES.items() if case.core.supports(number)]


CASES_BY_DTYPE = [(case, dtype) for case in CASES for dtype in FLOATS if dtype in supported(case)]


def storage(dtype: str) -> np.dtype:
    """NumPy's type for the bits: bfloat16 is kept as uint16."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def unsigned(dtype: str) -> np.dtype:
    return np.dtype(f"uint{8 * DTYPES[dtype][1]}")


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The values as float64, exactly."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.astype(np.float64)


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values in `dtype`: nearest even, twice rounded where NumPy has no direct way."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != "bfloat16":
            return values.astype(dtype)
        single = values.astype(np.float32)
        bits = single.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(single), np.uint16(0x7FC0), rounded).astype(np.uint16)


class _GuardedOnCuda:
    """The same on the first CUDA device."""

    def __init__(self, nbytes: int, offset: int = 0, content: bytes = b""):
        self._queue = _core.cuda_queue(0, 0)
        self._host = _Guarded(nbytes, offset, content)
        self._memory = _core.DeviceMemory(0, self._host.memory.nbytes)
        self.nbytes, self.address = nbytes, self._memory.address + self._host.first
        _core.write_device(self._memory.address, self._host.memory.tobytes(), self._queue)

    def _read(self) -> _Guarded:
        held = _core.read_device(self._memory.address, self._memory.bytes, self._queue)
        self._host.memory = np.frombuffer(held, np.uint8)
        return self._host

    @property
    def bytes(self) -> np.ndarray:
        return self._read().bytes

    def check(self) -> None:
        self._read().check()


def guarded(core: Any, nbytes: int, offset: int = 0, content: bytes = b"") -> Any:
    """Where `core` works: `nbytes` bytes of memory between guards."""
    kind = _GuardedOnCuda if isinstance(core, OnCuda) else _Guarded
    return kind(nbytes, offset, content)


class _Guarded:
    """Memory at a chosen misalignment whose surroundings must stay as they are."""

    def __init__(self, nbytes: int, offset: int = 0, content: bytes = b""):
        self.memory = np.full(nbytes + offset + 2 * _GUARD, _GUARD_BYTE, np.uint8)
        self.first, self.nbytes = _GUARD + offset, nbytes
        if content:
            self.bytes[:] = np.frombuffer(content, np.uint8)

    @property
    def bytes(self) -> np.ndarray:
        return self.memory[self.first : self.first + self.nbytes]

    @property
    def address(self) -> int:
        return self.memory.ctypes.data + self.first

    def check(self) -> None:
        before, after = self.memory[: self.first], self.memory[self.first + self.nbytes :]
        assert (before == _GUARD_BYTE).all(), "wrote in front of its memory"
        assert (after == _GUARD_BYTE).all(), "wrote behind its memory"


def encode(
    core: Any, raw: np.ndarray, dtype: str, *, seed: int = 0, position: int = 0, offset: int = 0
) -> bytes:
    number = DTYPES[dtype][0]
    source = guarded(core, raw.nbytes, offset, raw.tobytes())
    out = guarded(core, core.max_encoded_bytes(raw.size, number), offset)
    size = core.encode(
        source.address, raw.size, number, out.address, out.nbytes, position, seed, True
    )
    out.check()
    assert source.bytes.tobytes() == raw.tobytes(), "changed its input"
    return out.bytes[:size].tobytes()


def decode(core: Any, payload: bytes, count: int, dtype: str, *, offset: int = 0) -> np.ndarray:
    number, size, _ = DTYPES[dtype]
    source = guarded(core, len(payload), offset, payload)
    out = guarded(core, count * size, offset)
    core.decode(source.address, len(payload), out.address, count, number)
    out.check()
    return np.frombuffer(out.bytes.tobytes(), storage(dtype))


def round_trip(core: Any, raw: np.ndarray, dtype: str, **where: int) -> np.ndarray:
    return decode(core, encode(core, raw, dtype, **where), raw.size, dtype)


def _sources(core: Any, payloads: list[bytes]) -> list[Any]:
    """In memory of one size, as they arrive: what follows a shorter one is not its own."""
    most = max(map(len, payloads))
    return [guarded(core, most, 0, p + bytes([_GUARD_BYTE]) * (most - len(p))) for p in payloads]


def reduce(core: Any, payloads: list[bytes], divisor: float, count: int, dtype: str) -> np.ndarray:
    number, size, _ = DTYPES[dtype]
    sources = _sources(core, payloads)
    nbytes = sources[0].nbytes
    out = guarded(core, count * size)
    core.reduce([s.address for s in sources], nbytes, divisor, out.address, count, number)
    out.check()
    return np.frombuffer(out.bytes.tobytes(), storage(dtype))


def reduce_encode(
    core: Any, second: Any, payloads: list[bytes], divisor: float, count: int, dtype: str,
    *, seed: int = 0, position: int = 0, measures: bool = False,
) -> bytes:  # fmt: skip
    number = DTYPES[dtype][0]
    sources = _sources(core, payloads)
    out = guarded(core, second.max_encoded_bytes(count, number))
    size = core.reduce_encode(
        [s.address for s in sources], sources[0].nbytes, divisor, second, out.address, out.nbytes,
        count, number, position, seed, measures=measures,
    )  # fmt: skip
    out.check()
    return out.bytes[:size].tobytes()


def bound_of(core: Any, raw: np.ndarray, dtype: str) -> np.ndarray:
    held = np.ascontiguousarray(raw)
    return np.array(core.error_bound(held.ctypes.data, raw.size, DTYPES[dtype][0]))
