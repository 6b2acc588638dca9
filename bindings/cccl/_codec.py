"""Codecs for anyone: an array into a payload and back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from . import _arrays, _core, _cuda
from .errors import ConfigError, UnsupportedError


class Payload:
    """Encoded values, headed by what a decoder needs to know.

    It lies where the values were: in host memory, or on their CUDA device. `bytes(payload)` and
    `Payload.from_bytes` carry it through files and sockets, `payload.to` between devices. The
    header holds count and dtype; the shape is remembered in this process only.
    """

    def __init__(
        self,
        data: Any,
        shape: tuple[int, ...] | None = None,
        like: str = "numpy",
        fields: dict[str, Any] | None = None,
    ):
        where = _arrays.describe(data)
        if fields is None:
            fields = _core.header_of(where.address, where.numel, where.queue)
        self._data = data[: fields["bytes"]]  # what follows is not the payload's
        self.codec: str = fields["codec"]
        self.dtype: str = _arrays.DTYPES_BY_NUMBER[fields["dtype"]].name
        self.count: int = fields["count"]
        self.shape = (self.count,) if shape is None else shape
        self.device: str = where.device
        self._nbytes: int = fields["bytes"]
        self._like = like

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Payload:
        """Checks and takes over encoded bytes; raises `CorruptPayloadError`."""
        return cls(np.frombuffer(data, np.uint8).copy())

    def __bytes__(self) -> bytes:
        return self._on_host().tobytes()

    def to(self, device: str) -> Payload:
        """The same payload on "cpu", "cuda" or "cuda:<number>". On CUDA its memory is torch's or
        CuPy's, and so are the values that it decodes to."""
        if device == "cpu":
            like = "torch" if self._like == "torch" else "numpy"
            return Payload(self._on_host(), self.shape, like, self._fields())
        like = _cuda.available_framework() if self._like == "numpy" else self._like
        data = _cuda.to_device(self._on_host(), like, _cuda.device_number(device))
        return Payload(data, self.shape, like, self._fields())

    def _on_host(self) -> np.ndarray:
        return self._data if self.device == "cpu" else _cuda.to_host(self._data)

    def _fields(self) -> dict[str, Any]:
        number = _arrays.dtype_named(self.dtype).number
        return {"codec": self.codec, "dtype": number, "count": self.count, "bytes": self._nbytes}

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included."""
        return self._nbytes

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

    @functools.cached_property
    def _on_cuda(self) -> _core.Codec:
        return _core.codec_on_cuda(self._core)

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
        """Encodes an array of any shape: NumPy, torch, or anything with DLPack on a CPU; torch or
        CuPy on a CUDA device, where the payload then is and the caller's current stream works.

        `seed` keys stochastic rounding; `position` is that of the first value in a larger tensor:
        encoding a tensor in pieces cut at multiples of the block size gives the codes of the
        whole. Raises `UnsupportedError` for a dtype, device or layout that cannot be encoded;
        integers and bools are never taken by a lossy codec.
        """
        source = _arrays.describe(array)
        self._check(source.dtype)
        core = self._core if source.queue is None else self._on_cuda
        like = _cuda.framework_of(array)
        most = core.max_encoded_bytes(source.numel, source.dtype.number)
        out = _arrays.empty((most,), _arrays.dtype_named("uint8"),
                            "numpy" if source.queue is None else like, source.device)  # fmt: skip
        size = core.encode(
            source.address, source.numel, source.dtype.number, _arrays.describe(out).address, most,
            position, seed, True, source.queue,
        )  # fmt: skip
        if source.queue is not None and not core.fixed_size:  # the device knows
            return Payload(out, source.shape, like)
        fields = {"codec": self.name, "dtype": source.dtype.number, "count": source.numel,
                  "bytes": size}  # fmt: skip
        return Payload(out, source.shape, like, fields)

    def decode(self, payload: Payload | bytes, out: Any = None) -> Any:
        """The values of a payload, as an array like the one encoded, or in `out`.

        From bytes the result is a flat NumPy array. Raises `CorruptPayloadError` for bytes that
        are no intact payload, and `ConfigError` for a payload of another codec. On a CUDA device
        the host waits for the checksum; what `out` holds after an error is undefined.
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
        """Guaranteed `|decoded - value|` for each (finite) value of `array`, as float64."""
        source = _arrays.describe(array)
        self._check(source.dtype)
        if source.queue is not None:
            raise UnsupportedError("error bounds are computed on a CPU: pass array.cpu()")
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
        out = _arrays.empty(payload.shape, dtype, payload._like, payload.device)
    target = _arrays.describe(out, writable=True)
    if target.numel != payload.count or target.dtype != dtype:
        raise UnsupportedError(
            f"the payload holds {payload.count} values of {dtype.name}, the output has "
            f"{target.numel} of {target.dtype.name}"
        )
    if target.device != payload.device:
        raise UnsupportedError(
            f"the payload is on {payload.device}, the output on {target.device}: move it with "
            f"payload.to({target.device!r})"
        )
    data = _arrays.describe(payload._data)
    decoder = _core.codec_of(data.address, data.numel, target.queue)
    decoder.decode(data.address, data.numel, target.address, target.numel, dtype.number,
                   target.queue)  # fmt: skip
    if target.queue is not None:
        target.queue.synchronize()  # raises CorruptPayloadError
    return out


def codec_names() -> dict[str, list[str]]:
    """Registered codecs, each with its aliases."""
    return _core.codec_names()
