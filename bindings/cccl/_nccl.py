"""Which libnccl this process would use, and its version."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import _core
from .errors import UnsupportedError

SONAME = "libnccl.so.2"


@dataclass(frozen=True)
class Library:
    """A libnccl, where it was found, and its version or what is wrong with it."""

    found_by: str
    path: str
    version: str | None = None
    problem: str | None = None


def library() -> Library | None:
    """The copy already in the process; else that of CCCL_NCCL_PATH (a file), NCCL_HOME (a folder),
    the wheel nvidia-nccl-cu12 or -cu13, or the system's. Loads it; `None` where there is none.

    A build with CUDA code finds it itself, and is asked.
    """
    candidates = list(_candidates())
    if _core.cuda_built():
        return _library_of_core(candidates)
    for found_by, path in candidates:
        try:
            return Library(found_by, path, version_of(path))
        except OSError as error:
            if found_by != "system":
                return Library(found_by, path, problem=str(error))
    return None


def _library_of_core(candidates: list[tuple[str, str]]) -> Library | None:
    try:
        _, version, path = _core.nccl_version()
    except UnsupportedError as error:
        found_by, path = candidates[0]
        return None if found_by == "system" else Library(found_by, path, problem=str(error))
    for found_by, candidate in candidates:
        if candidate == path or (os.path.exists(candidate) and os.path.samefile(candidate, path)):
            return Library(found_by, path, version)
    return Library("system", path, version)


def load_wheel() -> None:
    """The copy in nvidia-nccl-cu12 or -cu13, for the core to find it in the process; not where
    there is a copy already, or where one is named."""
    found_by, path = next(_candidates())
    if found_by == "wheel":
        ctypes.CDLL(path)


def version_of(path: str) -> str:
    """Loads a libnccl and asks it, e.g. "2.27.5". Raises `OSError`."""
    library = ctypes.CDLL(path)
    number = ctypes.c_int()
    try:
        status = library.ncclGetVersion(ctypes.byref(number))
    except AttributeError as error:
        raise OSError(f"{path}: not NCCL: it has no ncclGetVersion") from error
    if status != 0:
        raise OSError(f"{path}: ncclGetVersion returned {status}")
    return _core.nccl_version_text(number.value)


def _candidates() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libnccl.so"):
            yield "already in the process", path
            break
    named = os.environ.get("CCCL_NCCL_PATH")
    if named:
        yield "CCCL_NCCL_PATH", named
    home = os.environ.get("NCCL_HOME")
    if home:
        for folder in ("lib", "lib64", "lib/x86_64-linux-gnu", "."):
            library = Path(home, folder, SONAME)
            if library.is_file():
                yield "NCCL_HOME", str(library)
                break
    wheel = _wheel()
    if wheel:
        yield "wheel", str(wheel)
    yield "system", SONAME


def _wheel() -> Path | None:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        library = Path(folder, "lib", SONAME)
        if library.is_file():
            return library
    return None
