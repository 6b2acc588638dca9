"""The version matrix: `matrix.py [python|torch|cuda|nccl[=VERSION]]... [--list]`.

Each row runs in an environment of its own; torch and NCCL are downloaded, and so are CUDA
compilers where none are installed. What this machine cannot run is skipped, with the reason, and
counted. `--list` prints the rows as JSON, for a CI host to spread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from toolchain import PYTHON, ROOT, Unavailable, call, cuda_home, new_environment, versions
from wheels import build_sdist, build_wheel, check, smoke_test

# Beyond `doctor`; without torch, what needs it is left out.
TESTS = ("python", "conformance")
TORCH_TESTS = ("python", "distributed")
TORCH_BYTES = 12 * 10**9  # on disk for a while, with the CUDA libraries that its wheels ask for


def main() -> int:
    """Runs the rows asked for; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="AXIS[=VERSION]")
    parser.add_argument("--list", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    rows = chosen(options.rows)
    if options.list:
        print(json.dumps(rows))
        return 0
    run = Matrix()
    outcomes = [run.row(row["axis"], row["version"]) for row in rows]
    for row, (outcome, reason) in zip(rows, outcomes, strict=True):
        print(f"{row['axis']:7} {row['version']:8} {outcome:8} {reason}")
    count = {word: sum(o == word for o, _ in outcomes) for word in ("passed", "failed", "skipped")}
    print("matrix: " + ", ".join(f"{number} {word}" for word, number in count.items()))
    return 1 if count["failed"] else 0


def all_rows() -> list[dict[str, str]]:
    """Every version of every axis."""
    data = versions()
    listed = {
        "python": data["python"]["tested"],
        "torch": data["torch"]["tested"],
        "cuda": list(data["cuda"]),
        "nccl": [row["version"] for row in data["nccl"]["tested"]],
    }
    return [{"axis": axis, "version": v} for axis, found in listed.items() for v in found]


def chosen(wanted: list[str]) -> list[dict[str, str]]:
    """All rows, or those that are named as AXIS or AXIS=VERSION."""
    rows = all_rows()
    known = {word for row in rows for word in (row["axis"], f"{row['axis']}={row['version']}")}
    unknown = set(wanted) - known
    if unknown:
        raise SystemExit(
            f"no row {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        )
    return [
        row for row in rows
        if not wanted or {row["axis"], f"{row['axis']}={row['version']}"} & set(wanted)
    ]  # fmt: skip


class Matrix:
    """Runs rows. The CPU wheel is built once, for the rows that install it."""

    def __init__(self) -> None:
        self._wheel: Path | None = None

    def row(self, axis: str, version: str) -> tuple[str, str]:
        """Its outcome: passed, failed or skipped, and why."""
        run: Callable[[str], str] = getattr(self, f"_{axis}")
        print(f"== {axis} {version}", flush=True)
        try:
            return "passed", run(version)
        except Unavailable as error:
            return "skipped", str(error)
        except (SystemExit, subprocess.CalledProcessError, AssertionError) as error:
            return "failed", str(error)

    def _python(self, version: str) -> str:
        """Builds from the sdist and tests without torch, under this interpreter."""
        interpreter = shutil.which(f"python{version}")
        if not interpreter:
            raise Unavailable(f"no python{version} on PATH")
        with tempfile.TemporaryDirectory() as scratch:
            environment = {**os.environ, "SKBUILD_CMAKE_DEFINE": "CCCLIB_CUDA=OFF"}
            call(interpreter, "-m", "venv", f"{scratch}/env")
            python = Path(scratch, "env/bin/python")
            call(python, "-m", "pip", "install", "-q", f"{build_sdist()}[test]", env=environment)
            return test(python, TESTS)

    def _torch(self, version: str) -> str:
        """The Python and distributed tests with the wheel."""
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if free < TORCH_BYTES:
            raise Unavailable(
                f"{free / 1e9:.0f} GB free; torch takes up to {TORCH_BYTES / 1e9:.0f}"
            )
        if self._wheel is None:
            self._wheel = build_wheel(build_sdist(), "cpu")
        with tempfile.TemporaryDirectory() as scratch:
            wheel = f"cccl[torch,test] @ file://{self._wheel}"
            return test(new_environment(Path(scratch), wheel, f"torch=={version}"), TORCH_TESTS)

    def _cuda(self, version: str) -> str:
        """Builds and checks the wheel with that compiler."""
        flavour = f"cuda{version}"
        cuda_home(version, fetch=True)
        wheel = build_wheel(build_sdist(), flavour, fetch=True)
        check(wheel, flavour)
        return smoke_test(wheel, flavour)

    def _nccl(self, version: str) -> str:
        """Loads that libnccl as CCCL does, and asks its version."""
        (cuda,) = (r["cuda"] for r in versions()["nccl"]["tested"] if r["version"] == version)
        with tempfile.TemporaryDirectory() as scratch:
            call(PYTHON, "-m", "pip", "download", "-q", "--no-deps", "--dest", scratch,
                 f"nvidia-nccl-cu{cuda}=={version}")  # fmt: skip
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extract("nvidia/nccl/lib/libnccl.so.2", scratch)
            found = doctor(PYTHON, CCCL_NCCL_PATH=f"{scratch}/nvidia/nccl/lib/libnccl.so.2")["nccl"]
        assert found["found_by"] == "CCCL_NCCL_PATH" and found["version"] == version, found
        return f"loaded, says {found['version']}"


def test(python: Path, folders: tuple[str, ...]) -> str:
    """`doctor` and tests of the installed package, away from the sources."""
    found = doctor(python)
    assert not found["problems"], found["problems"]
    call(python, "-m", "pytest", "-q", *folders, cwd=ROOT / "tests")
    named = {k: v for k, v in found["versions"].items() if k in ("python", "torch", "numpy") and v}
    return ", ".join(f"{name} {version}" for name, version in named.items())


def doctor(python: str | Path, **environment: str) -> dict[str, dict[str, str]]:
    """What `python -m cccl doctor --json` finds with that interpreter."""
    done = subprocess.run(
        [python, "-m", "cccl", "doctor", "--json"],
        env={**os.environ, **environment}, cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    sys.exit(main())
