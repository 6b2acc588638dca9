"""NumPy and CuPy arrays as the core sees them, and what is the same for both."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, NamedTuple

import numpy as np

from .._arrays import DTYPES, DType
from ..errors import UnsupportedError

_COMPLEX = {"complex64": "float32", "complex128": "float64"}


class Memory(NamedTuple):
    """Of a contiguous array: complex values count as pairs of real ones. `device` is None on a
    CPU."""

    address: int
    numel: int
    dtype: DType
    nbytes: int
    device: int | None

    def meets(self, other: Memory) -> bool:
        """Whether they share bytes."""
        return (
            self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )


def memory_of(array: Any, where: str, *, written: bool = False) -> Memory:
    """Raises `UnsupportedError` for what is no NumPy or CuPy array, is not contiguous, has an
    unknown dtype or is to be written and is read-only."""
    if on_host(array):
        address, device = array.__array_interface__["data"][0], None
        if written and not array.flags.writeable:
            raise UnsupportedError(f"{where}: the output is read-only")
    elif "cupy" in sys.modules and isinstance(array, cupy().ndarray):
        address, device = array.data.ptr, array.data.device_id
    else:
        kind = type(array)
        raise UnsupportedError(
            f"{where} takes NumPy and CuPy arrays, not {kind.__module__}.{kind.__qualname__}: "
            "cupy.asarray(x), cupy.from_dlpack(x) or numpy.asarray(x) make one"
        )
    if not array.flags.c_contiguous:
        library = "numpy" if device is None else "cupy"
        raise UnsupportedError(
            f"{where}: an array of shape {array.shape} and strides {array.strides} is not "
            f"contiguous; pass {library}.ascontiguousarray(x), or a view whose values lie in order"
        )
    found = _dtype_of(array.dtype)
    if found is None:
        known = ", ".join([*DTYPES, *_COMPLEX])
        raise UnsupportedError(f"{where}: dtype {array.dtype} is not one of {known}")
    dtype, values = found
    return Memory(address, array.size * values, dtype, array.nbytes, device)


@functools.lru_cache(maxsize=256)
def _dtype_of(dtype: np.dtype[Any]) -> tuple[DType, int] | None:
    """That of the core, and how many of its values make one."""
    found = DTYPES.get(_COMPLEX.get(dtype.name, dtype.name))
    if found is None or not dtype.isnative:
        return None
    return found, 2 if dtype.name in _COMPLEX else 1


def from_scalar(array: Any) -> Any:
    """A NumPy scalar, as a sum is, as an array; anything else as it is."""
    return np.asarray(array) if isinstance(array, np.generic) else array


def on_host(array: Any) -> bool:
    """Whether it is NumPy's; those of subclasses may mean something else, as masked ones do."""
    return type(array) is np.ndarray or type(array) is np.memmap


def empty(shape: tuple[int, ...], like: Any) -> Any:
    """A new array of that shape, of the dtype and on the device of another."""
    if on_host(like):
        return np.empty(shape, like.dtype)
    with cupy().cuda.Device(like.data.device_id):
        return cupy().empty(shape, like.dtype)


def moved(host: np.ndarray, like: Any) -> Any:
    """A NumPy array to where another array is."""
    if on_host(like):
        return host
    with cupy().cuda.Device(like.data.device_id):
        return cupy().asarray(host)


def repeated(flat: Any, size: int) -> Any:
    """So many values, those of an array over and over."""
    found = empty((size,), flat)
    filled = min(flat.size, size)
    found[:filled] = flat[:filled]
    while filled < size:
        more = min(filled, size - filled)
        found[filled : filled + more] = found[:more]
        filled += more
    return found


def sum_over_ranks(gathered: Any, out: Any) -> None:
    """Of a row of values per rank, in their own dtype."""
    if on_host(out):
        np.sum(gathered, axis=0, dtype=out.dtype, out=out.reshape(-1))
        return
    with cupy().cuda.Device(out.data.device_id):
        cupy().sum(gathered, axis=0, dtype=out.dtype, out=out.reshape(-1))


def stream_of(device: int | None) -> Any:
    """The current stream of a device; None on a CPU."""
    return None if device is None else cupy().cuda.get_current_stream(device)


def cupy() -> Any:
    """CuPy, which is loaded where its arrays are."""
    return sys.modules.get("cupy") or importlib.import_module("cupy")
