"""Versions, commands and CUDA compilers, for the tools beside this file."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PYTHON = sys.executable


class Unavailable(Exception):
    """What this machine lacks for a piece of work, and how to get it."""


def versions() -> dict[str, Any]:
    """What is supported and tested."""
    return tomllib.loads((ROOT / "bindings/cccl/versions.toml").read_text())


def project_version() -> str:
    """Of pyproject.toml, its one place."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def call(*command: object, **options: Any) -> str:
    """Runs a command, shown first, to its end; returns what it printed, if asked to capture."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    if options.pop("capture", False):
        options |= {"stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(words, check=True, **{"cwd": ROOT, **options})
    return done.stdout or ""


@functools.cache
def commit_time() -> str:
    """Seconds since 1970 of the last commit: all files in what is built are dated so."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return given or call("git", "log", "-1", "--format=%ct", capture=True).strip()


def new_environment(folder: Path, *packages: object, python: str = PYTHON) -> Path:
    """A virtual environment with these packages alone; returns its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    call(python, "-m", "venv", folder)
    interpreter = folder / "bin" / "python"
    call(interpreter, "-m", "pip", "install", "-q", *packages)
    return interpreter


def cuda_home(major: str, fetch: bool) -> Path:
    """A CUDA toolkit of that major version; with `fetch`, packages are unpacked into build/ where
    none is installed."""
    named = [os.environ.get(f"CUDA{major}_HOME"), os.environ.get("CUDA_HOME")]
    places = [Path(home) for home in named if home]
    places += [*sorted(Path("/usr/local").glob(f"cuda-{major}.*")), Path("/usr/local/cuda")]
    fetched = BUILD / f"cuda-{major}"
    for home in (*places, fetched):
        if release_of(home).startswith(f"{major}."):
            return home
    if not fetch:
        raise Unavailable(f"no CUDA {major} compiler: set CUDA{major}_HOME, or pass --fetch")
    if major == "12":
        if not shutil.which("apt-get"):
            raise Unavailable("no CUDA 12 compiler, and no apt to fetch one: set CUDA12_HOME")
        call(ROOT / "tools/fetch_cuda12.sh", fetched)
        return fetched
    pins = versions()["cuda"][major]["packages"]
    packages = BUILD / f"cuda-{major}-packages"
    call(PYTHON, "-m", "pip", "install", "-q", "--no-deps", "--target", packages,
         *(f"{name}=={version}" for name, version in pins.items()))  # fmt: skip
    # Two names that nvcc and FindCUDAToolkit look for.
    home = packages / "nvidia" / f"cu{major}"
    (home / "lib64").symlink_to("lib")
    (home / "lib" / "libcudart.so").symlink_to(f"libcudart.so.{major}")
    fetched.symlink_to(home)
    return fetched


def release_of(home: Path) -> str:
    """A toolkit's release, e.g. "12.4"; empty where there is no nvcc."""
    nvcc = home / "bin" / "nvcc"
    if not nvcc.exists():
        return ""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else ""
