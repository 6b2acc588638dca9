"""`doctor`: what CCCL finds on this machine, and whether it works here."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, _arrays, _core, _nccl
from ._sources import read_toml
from .errors import UnsupportedError

_VALUES = 4099  # more than a CUDA tile of 1024, and no multiple of anything


def add_command(commands: Any) -> None:
    """Adds `doctor` to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="what is installed and found here, and whether it works; status 1 if not",
        epilog="example: python -m cccl doctor --json > doctor.json",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the findings; 1 if there are problems, else 0."""
    found = examine()
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """All findings, with a list of problems."""
    problems: list[str] = []
    found = {
        "versions": _versions(problems),
        "cpu": _cpu(),
        "build": _core.build,
        "cuda": _cuda(problems),
        "nccl": _nccl_library(problems),
        "network": _network(),
        "self_test": _self_test(problems),
    }
    return {**found, "warnings": known_bad(found), "problems": problems}


def known_bad(found: Mapping[str, Any]) -> list[str]:
    """What versions.toml lists as bad and is so here, with the remedy: slow or hanging, not
    broken."""
    devices = (found["cuda"] or {}).get("devices")
    ranks, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    warnings = []
    for entry in supported()["known_bad"]:
        name, _, value = entry["environment"].partition("=")
        holds = os.environ.get(name) == value
        holds = holds and bool(devices or not entry.get("cuda"))
        holds = holds and (ranks != local or not entry.get("several_hosts"))
        if holds:
            warnings.append(f"{entry['environment']}: {entry['problem']}: {entry['remedy']}")
    return warnings


def _network() -> dict[str, str]:
    """Interfaces with their state, and their line rate where the driver knows it."""
    found = {}
    for _, name in socket.if_nameindex():
        folder, parts = Path("/sys/class/net", name), []
        for file, unit in ("operstate", ""), ("speed", " Mbit/s"), ("mtu", " bytes MTU"):
            try:
                text = (folder / file).read_text().strip()
            except OSError:  # an interface that is down, or no sysfs
                continue
            if not text.startswith("-"):
                parts.append(text + unit)
        found[name] = ", ".join(parts) or "unknown"
    return found


def as_text(found: dict[str, Any]) -> str:
    """Aligned lines; problems last."""
    lines = []
    for section, fields in found.items():
        if section in ("warnings", "problems"):
            continue
        lines.append(section.replace("_", " "))
        for name, value in (fields or {"none": "not found"}).items():
            values = value if isinstance(value, list) else [value]
            shown = ", ".join(
                "  ".join(f"{v}" for v in entry.values()) if isinstance(entry, dict) else f"{entry}"
                for entry in values
            )
            lines.append(f"  {name:18} {shown or 'none'}")
    lines += [f"warning: {warning}" for warning in found["warnings"]]
    lines += [f"problem: {problem}" for problem in found["problems"]]
    return "\n".join([*lines, "" if found["problems"] else "all is well"]).rstrip()


def supported() -> dict[str, Any]:
    """The versions that CCCL is tested with (versions.toml)."""
    return read_toml(Path(__file__).with_name("versions.toml"))


def _versions(problems: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "cccl": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "libc": " ".join(platform.libc_ver()) or None,
    }
    oldest = supported()["torch"]["oldest"]
    for name in ("torch", "cupy"):
        try:
            # Imported, not looked up: torch brings its own libnccl into the process.
            found[name] = str(importlib.import_module(name).__version__)
        except ModuleNotFoundError as error:
            found[name] = None
            if error.name != name:
                problems.append(f"{name} is installed, but {error.name} is not: reinstall {name}")
        except Exception as error:  # whatever a broken installation raises
            found[name] = None
            problems.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    version = getattr(sys.modules.get("torch"), "version", None)
    found["torch_cuda"] = getattr(version, "cuda", None)
    if found["torch"] and _release(found["torch"]) < _release(oldest):
        problems.append(f"torch {found['torch']} is older than {oldest}: pip install -U torch")
    return found


def _cpu() -> dict[str, Any]:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "model": model,
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": _core.available_isas(),
        "in_use": _core.current_isa(),
        "codec_threads": _core.codec_threads(),
    }


def _cuda(problems: list[str]) -> dict[str, Any] | None:
    """The driver and its devices; `None` without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    status = driver.cuInit(0)
    number, count = ctypes.c_int(), ctypes.c_int()
    if status == 0:
        status = driver.cuDriverGetVersion(ctypes.byref(number))
        status = status or driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0:
        if status != 100:  # CUDA_ERROR_NO_DEVICE
            problems.append(f"the CUDA driver does not work: error {status} of cuInit")
        return {"driver": None, "devices": []}
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    toolkit = _core.build["cuda"]
    if toolkit and _release(version)[0] < _release(toolkit)[0]:
        problems.append(
            f"the driver supports CUDA {version}, this build was made with CUDA {toolkit}: "
            "update the driver, or install the wheel for the older CUDA"
        )
    return {"driver": version, "devices": [_device(driver, i) for i in range(count.value)]}


def _device(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    memory, part = ctypes.c_size_t(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(handle), index)
    driver.cuDeviceGetName(name, len(name), handle)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(part), attribute, handle)
        capability.append(str(part.value))
    return {
        "name": name.value.decode(),
        "capability": ".".join(capability),
        "memory": f"{memory.value / 2**30:.0f} GiB",
    }


def _nccl_library(problems: list[str]) -> dict[str, Any] | None:
    found = _nccl.library()
    if found is None:
        return None
    oldest = supported()["nccl"]["oldest"]
    if found.problem:
        problems.append(f"NCCL, named by {found.found_by}: {found.problem}")
    elif _release(found.version or "") < _release(oldest):
        problems.append(f"NCCL {found.version} ({found.path}) is older than {oldest}")
    return dataclasses.asdict(found)


def _self_test(problems: list[str]) -> dict[str, str]:
    """Every codec on the CPU and the CUDA devices, and two ranks that reduce."""
    values = np.random.default_rng(0).standard_normal(_VALUES).astype(np.float32)
    outcome: dict[str, str] = {}

    def test(name: str, call: Any) -> None:
        try:
            outcome[name] = call() or "works"
        except Exception as error:  # a defect is what this looks for
            outcome[name] = "fails"
            problems.append(f"self-test of {name}: {type(error).__name__}: {error}")

    for name in _core.codec_names():
        test(name, lambda name=name: _test_codec(name, values))
        for device in range(_core.cuda_device_count()):
            test(
                f"{name} on cuda:{device}", lambda name=name, d=device: _test_cuda(name, values, d)
            )
    test("all_reduce", lambda: _test_all_reduce(values))
    return outcome


def _encode(core: Any, values: np.ndarray) -> np.ndarray:
    number = _arrays.DTYPES["float32"].number
    out = np.empty(core.max_encoded_bytes(values.size, number), np.uint8)
    size = core.encode(
        values.ctypes.data, values.size, number, out.ctypes.data, out.size, 0, 0, True
    )
    return out[:size]


def _test_codec(name: str, values: np.ndarray) -> None:
    core, number = _core.make_codec(name, {}), _arrays.DTYPES["float32"].number
    payload, back = _encode(core, values), np.full_like(values, np.nan)
    core.decode(payload.ctypes.data, payload.size, back.ctypes.data, back.size, number)
    bound = core.error_bound(values.ctypes.data, values.size, number)
    if not (np.abs(back.astype(np.float64) - values) <= bound).all():
        raise ValueError("the decoded values are farther off than the codec's bound")


def _test_cuda(name: str, values: np.ndarray, device: int) -> str | None:
    core, number = _core.make_codec(name, {}), _arrays.DTYPES["float32"].number
    try:
        on_device = _core.codec_on_cuda(core)
    except UnsupportedError:
        return "has no CUDA code"
    expected = _encode(core, values).tobytes()
    queue = _core.cuda_queue(device, 0)
    most = on_device.max_encoded_bytes(values.size, number)
    source, out = _core.DeviceMemory(device, values.nbytes), _core.DeviceMemory(device, most)
    _core.write_device(source.address, values.tobytes(), queue)
    size = on_device.encode(
        source.address, values.size, number, out.address, most, 0, 0, True, queue
    )
    if _core.read_device(out.address, size, queue) != expected:
        raise ValueError("the payload differs from the CPU's")
    return None


def _test_all_reduce(values: np.ndarray) -> None:
    codec, number = _core.make_codec("block_float8", {}), _arrays.DTYPES["float32"].number
    ranks = [_core.Communicator(transport, 20.0) for transport in _core.loopback(2)]
    arrays = [values.copy(), 3 * values]
    try:
        works = [
            rank.submit("all_reduce", array.ctypes.data, array.size, array.ctypes.data, array.size,
                        number, codec, codec)
            for rank, array in zip(ranks, arrays, strict=True)
        ]  # fmt: skip
        for work in works:
            if not work.wait(20.0):
                raise TimeoutError("no end within 20 s")
    finally:
        for rank in ranks:
            rank.close()
    if arrays[0].tobytes() != arrays[1].tobytes():
        raise ValueError("the ranks hold different bits")
    if np.abs(arrays[0] - 2 * values).max() > 0.05 * np.abs(values).max():
        raise ValueError("the result is not the mean")


def _release(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13, 0), for comparison."""
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())
