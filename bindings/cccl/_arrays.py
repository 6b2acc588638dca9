"""What the core sees of an array: an address, a count and a dtype number."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _core, _cuda
from .errors import UnsupportedError

_NUMBERS: dict[str, tuple[int, int, bool]] = _core.dtypes()
_DLPACK_CPU = 1
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}


class DType(NamedTuple):
    """An element type: its name, its number on the wire, bytes per value and whether it is real."""

    name: str
    number: int
    size: int
    floating: bool


DTYPES = {name: DType(name, *row) for name, row in _NUMBERS.items()}
DTYPES_BY_NUMBER = {dtype.number: dtype for dtype in DTYPES.values()}


class Array(NamedTuple):
    """A contiguous array. `owner` keeps the memory alive; `queue` is the caller's current stream
    on its device, None on a CPU."""

    owner: Any
    address: int
    shape: tuple[int, ...]
    numel: int
    dtype: DType
    device: str = "cpu"
    queue: _core.Queue | None = None


def dtype_named(name: str) -> DType:
    """The dtype of that name; `UnsupportedError` lists what there is."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UnsupportedError(f"dtype {name!r} is unknown; known: {', '.join(DTYPES)}") from None


def describe(array: Any, *, writable: bool = False) -> Array:
    """`array` (NumPy, anything with DLPack on a CPU, torch or CuPy on CUDA) without a copy.

    Raises `UnsupportedError` for another device, an unknown dtype or, where it must be written,
    an array that is not contiguous or read-only. A non-contiguous input is copied.
    """
    if hasattr(array, "detach"):  # torch refuses DLPack of tensors that require grad
        array = array.detach()
    if isinstance(array, np.ndarray):
        return _describe_numpy(array, writable)
    if _cuda.holds(array):
        return _describe_cuda(array, writable)
    if writable and _is_read_only(array):
        raise UnsupportedError("the output array is read-only")
    try:
        fields = _core.describe(array)
    except TypeError as error:
        raise UnsupportedError(
            f"{type(array).__name__} is no array: NumPy or an object with __dlpack__ is needed"
        ) from error
    if fields["device_type"] != _DLPACK_CPU:
        raise UnsupportedError(
            f"the array is on DLPack device type {fields['device_type']}: codecs take arrays on a "
            "CPU, and those of torch and CuPy on CUDA (torch.from_dlpack(array) makes one)"
        )
    kind = _DLPACK_KINDS.get(fields["dtype_code"])
    name = "bool" if kind == "bool" else f"{kind}{fields['dtype_bits']}"
    if fields["dtype_lanes"] != 1 or name not in DTYPES:
        raise UnsupportedError(f"dtype {name} is not supported; known: {', '.join(DTYPES)}")
    if not fields["contiguous"]:
        if writable:
            raise UnsupportedError("the output array is not contiguous; pass a contiguous one")
        return describe(array.contiguous() if hasattr(array, "contiguous") else np.array(array))
    shape = tuple(fields["shape"])
    if _product(shape) and not fields["address"]:
        raise UnsupportedError(f"{type(array).__name__} has no memory behind it")
    return Array(fields["owner"], fields["address"], shape, _product(shape), DTYPES[name])


def _describe_cuda(array: Any, writable: bool) -> Array:
    dense = _cuda.contiguous(array)
    address, shape, name, device = _cuda.fields_of(dense)
    if writable and dense is not array and address != _cuda.fields_of(array)[0]:
        raise UnsupportedError("the output array is not contiguous; pass a contiguous one")
    if name not in DTYPES:
        raise UnsupportedError(f"dtype {name} is not supported; known: {', '.join(DTYPES)}")
    queue = _cuda.current_queue(_cuda.framework_of(array), device)
    count = _product(shape)
    return Array(dense, address, shape, count, DTYPES[name], f"cuda:{device}", queue)


def _is_read_only(array: Any) -> bool:
    try:
        return memoryview(array).readonly
    except TypeError:  # no buffer: only DLPack
        return False


def _describe_numpy(array: np.ndarray, writable: bool) -> Array:
    name = array.dtype.name
    if name not in DTYPES or not array.dtype.isnative:
        raise UnsupportedError(
            f"dtype {array.dtype} is not supported; known, in native byte order: "
            f"{', '.join(DTYPES)}"
        )
    if writable and not (array.flags.c_contiguous and array.flags.writeable):
        raise UnsupportedError("the output array must be contiguous and writable")
    array = np.ascontiguousarray(array) if array.ndim else array
    return Array(array, array.ctypes.data, array.shape, array.size, DTYPES[name])


def empty(shape: tuple[int, ...], dtype: DType, like: str = "numpy", device: str = "cpu") -> Any:
    """A new array. `like` is "numpy", "torch" or "cupy"; bfloat16 needs torch or ml_dtypes."""
    if device != "cpu":
        return _cuda.empty(shape, dtype.name, like, _cuda.device_number(device))
    if like == "torch":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype.name))
    try:
        return np.empty(shape, np.dtype(dtype.name))
    except TypeError:
        pass
    try:
        ml_dtypes = importlib.import_module("ml_dtypes")
    except ImportError:
        raise UnsupportedError(
            f"NumPy has no {dtype.name}: pass out=, or install ml_dtypes"
        ) from None
    return np.empty(shape, getattr(ml_dtypes, dtype.name))


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements could share memory: some dimension steps into a smaller one's reach.
    Strides are in elements."""
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False
