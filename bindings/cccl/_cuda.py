"""Arrays of torch and CuPy on CUDA devices, always on the caller's current stream."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import numpy as np

from . import _core
from .errors import UnsupportedError


def framework_of(array: Any) -> str:
    """ "torch", "cupy", or "numpy" for everything else."""
    name = type(array).__module__.split(".")[0]
    return name if name in ("torch", "cupy") else "numpy"


def holds(array: Any) -> bool:
    """Whether `array` is a torch or CuPy array on a CUDA device."""
    framework = framework_of(array)
    return framework == "cupy" or (framework == "torch" and bool(array.is_cuda))


def contiguous(array: Any) -> Any:
    """The array itself where its values lie in order, else a copy whose values do."""
    if framework_of(array) == "cupy":
        return importlib.import_module("cupy").ascontiguousarray(array)
    if str(array.layout) != "torch.strided":
        raise UnsupportedError(f"a tensor of layout {array.layout} cannot be encoded")
    return array.resolve_neg().contiguous()


def fields_of(array: Any) -> tuple[int, tuple[int, ...], str, int]:
    """Address, shape, name of the dtype and number of the device of a contiguous array."""
    if framework_of(array) == "cupy":
        return array.data.ptr, array.shape, array.dtype.name, array.device.id
    name = str(array.dtype).removeprefix("torch.")
    return array.data_ptr(), tuple(array.shape), name, array.device.index


def current_queue(framework: str, device: int) -> _core.Queue:
    """The framework's current stream on that device, as the core's queue."""
    if framework == "cupy":
        cupy = importlib.import_module("cupy")
        with cupy.cuda.Device(device):
            return _core.cuda_queue(device, cupy.cuda.get_current_stream().ptr)
    torch = importlib.import_module("torch")
    return _core.cuda_queue(device, torch.cuda.current_stream(device).cuda_stream)


def empty(shape: tuple[int, ...], dtype: str, framework: str, device: int) -> Any:
    """A new array on a device."""
    if framework == "torch":
        torch = importlib.import_module("torch")
        return torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{device}")
    cupy = importlib.import_module("cupy")
    try:
        with cupy.cuda.Device(device):
            return cupy.empty(shape, np.dtype(dtype))
    except TypeError as error:
        raise UnsupportedError(f"CuPy has no {dtype}: decode into a torch tensor") from error


def to_host(array: Any) -> np.ndarray:
    """The bytes of a uint8 array, in host memory."""
    host = array.get() if framework_of(array) == "cupy" else array.cpu().numpy()
    return np.asarray(host)


def to_device(data: np.ndarray, framework: str, device: int) -> Any:
    """Bytes in host memory, as a uint8 array on a device."""
    if framework == "cupy":
        cupy = importlib.import_module("cupy")
        with cupy.cuda.Device(device):
            return cupy.asarray(data)
    torch = importlib.import_module("torch")
    return torch.from_numpy(data).to(f"cuda:{device}")


def available_framework() -> str:
    """The one in use, else the first that is installed; it holds payloads on a device."""
    for name in ("torch", "cupy"):
        if name in sys.modules:
            return name
    for name in ("torch", "cupy"):
        if importlib.util.find_spec(name):
            return name
    raise UnsupportedError("a payload on a CUDA device needs torch or CuPy to hold it")


def device_number(device: str) -> int:
    """0 for "cuda", 1 for "cuda:1"."""
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise UnsupportedError(f"device {device!r}; allowed: 'cpu', 'cuda' or 'cuda:<number>'")
    return int(number or 0)
