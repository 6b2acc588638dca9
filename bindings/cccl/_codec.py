"""Codecs for anyone: an array into a payload and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays, _core
from .errors import ConfigError, UnsupportedError


class Payload:
    """Encoded values, headed by what a decoder needs to know.

    `bytes(payload)` and `Payload.from_bytes` carry it through files and sockets. The header holds
    count and dtype; the shape is remembered in this process only.
    """

    def __init__(self, data: np.ndarray, shape: tuple[int, ...] | None = None, like: str = "numpy"):
        fields = _core.header_of(data.ctypes.data, data.nbytes)
        self._data = data[: fields["bytes"]]  # what follows is not the payload's
        self.codec: str = fields["codec"]
        self.dtype: str = _arrays.DTYPES_BY_NUMBER[fields["dtype"]].name
        self.count: int = fields["count"]
        self.shape = (self.count,) if shape is None else shape
        self._like = like

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Payload:
        """Checks and takes over encoded bytes; raises `CorruptPayloadError`."""
        return cls(np.frombuffer(data, np.uint8).copy())

    def __bytes__(self) -> bytes:
        return self._data.tobytes()

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return self._data.nbytes

    @property
    def bits_per_element(self) -> float:
        """Bits per value, header included; NaN for an empty payload."""
        return 8 * self.nbytes / self.count if self.count else float("nan")

    def __repr__(self) -> str:
        return f"Payload({self.codec}, {self.dtype}{list(self.shape)}, {self.nbytes} bytes)"


class Codec:
    """A codec with its options fixed. Make one with `cccl.codec`."""

    def __init__(self, name: str, **options: Any):
        self._core = _core.make_codec(name, options)

    @property
    def name(self) -> str:
        """The registered name, of which an alias may have been given."""
        return self._core.name

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""
        return self._core.lossless

    def __repr__(self) -> str:
        return self._core.spec

    def max_encoded_bytes(self, count: int, dtype: str = "float32") -> int:
        """Upper bound of a payload of `count` values (up to 2^48), header included."""
        if not 0 <= count <= 1 << 48:
            raise ConfigError(f"count = {count}; allowed: 0 to 2^48")
        return self._core.max_encoded_bytes(count, _arrays.dtype_named(dtype).number)

    def encode(self, array: Any, *, seed: int = 0, position: int = 0) -> Payload:
        """Encodes a CPU array of any shape (NumPy, torch, or anything with DLPack).

        `seed` keys stochastic rounding; `position` is that of the first value in a larger tensor:
        encoding a tensor in pieces cut at multiples of the block size gives the codes of the
        whole. Raises `UnsupportedError` for a dtype, device or layout that cannot be encoded;
        integers and bools are never taken by a lossy codec.
        """
        source = _arrays.describe(array)
        self._check(source.dtype)
        out = np.empty(self._core.max_encoded_bytes(source.numel, source.dtype.number), np.uint8)
        size = self._core.encode(
            source.address, source.numel, source.dtype.number, out.ctypes.data, out.nbytes,
            position, seed, True,
        )  # fmt: skip
        return Payload(out[:size], source.shape, _kind(array))

    def decode(self, payload: Payload | bytes, out: Any = None) -> Any:
        """The values of a payload, as an array like the one encoded, or in `out`.

        From bytes the result is a flat NumPy array. Raises `CorruptPayloadError` for bytes that
        are no intact payload, and `ConfigError` for a payload of another codec.
        """
        if not isinstance(payload, Payload):
            payload = Payload.from_bytes(payload)
        if payload.codec != self.name:
            raise ConfigError(
                f"the payload was made by codec {payload.codec!r}, this is {self.name!r}: "
                "use cccl.decode(payload), or the codec of that name"
            )
        return decode(payload, out)

    def error_bound(self, array: Any) -> np.ndarray:
        """Guaranteed |decoded - value| for each (finite) value of `array`, as float64."""
        source = _arrays.describe(array)
        self._check(source.dtype)
        bound = self._core.error_bound(source.address, source.numel, source.dtype.number)
        return np.array(bound).reshape(source.shape)

    def _check(self, dtype: _arrays.DType) -> None:
        if not self._core.supports(dtype.number):
            raise UnsupportedError(
                f"codec {self.name!r} does not take dtype {dtype.name}: integers and bools are "
                "never lossy; use 'identity'"
            )


def codec(name: str, **options: Any) -> Codec:
    """The codec of that name or alias, e.g. `cccl.codec("block_float4", block_size=64)`.

    Raises `ConfigError` for an unknown name, option or value.
    """
    return Codec(name, **options)


def decode(payload: Payload | bytes, out: Any = None) -> Any:
    """Decodes a payload of any codec; see `Codec.decode`."""
    if not isinstance(payload, Payload):
        payload = Payload.from_bytes(payload)
    dtype = _arrays.dtype_named(payload.dtype)
    if out is None:
        out = _arrays.empty(payload.shape, dtype, payload._like)
    target = _arrays.describe(out, writable=True)
    if target.numel != payload.count or target.dtype != dtype:
        raise UnsupportedError(
            f"the payload holds {payload.count} values of {dtype.name}, the output has "
            f"{target.numel} of {target.dtype.name}"
        )
    data = payload._data
    decoder = _core.codec_of(data.ctypes.data, data.nbytes)
    decoder.decode(data.ctypes.data, data.nbytes, target.address, target.numel, dtype.number)
    return out


def codec_names() -> dict[str, list[str]]:
    """Registered codecs, each with its aliases."""
    return _core.codec_names()


def _kind(array: Any) -> str:
    return "torch" if type(array).__module__.split(".")[0] == "torch" else "numpy"
