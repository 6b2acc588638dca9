"""Builds the sdist and, from it, wheels: `wheels.py [cpu] [cuda12] [cuda13] [--twice] [--fetch]`.

Each is tagged by auditwheel, checked for what it must not contain or link, and tried in a bare
environment. `--twice` builds it again and compares the bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from toolchain import (
    PYTHON,
    ROOT,
    Unavailable,
    call,
    commit_time,
    cuda_home,
    new_environment,
    project_version,
)

DIST = ROOT / "dist"
# nvcc names symbols after the folder of their source: one for all, so that bytes are the same.
SCRATCH = Path(tempfile.gettempdir(), "cccl-wheel")
MOST_BYTES = 20 * 10**6
# What any Linux has; CUDA's runtime is inside, and libcuda and libnccl are loaded at run time.
MAY_LINK = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d|ld-linux-.*")
MUST_NOT_CONTAIN = re.compile(r"lib(nccl|cuda|cudart|torch|c10|nvrtc)[^/]*\.so")


def main() -> None:
    """Builds what the command line names; ends at the first thing that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flavours", nargs="*", metavar="cpu|cuda12|cuda13")
    parser.add_argument("--twice", action="store_true", help="build again and compare")
    parser.add_argument("--fetch", action="store_true", help="fetch CUDA compilers where none are")
    options = parser.parse_args()
    sdist = build_sdist()
    for flavour in options.flavours or ["cpu"]:
        wheel = build_wheel(sdist, flavour, options.fetch)
        if options.twice:
            again = build_wheel(sdist, flavour, options.fetch, "again")
            if digest(again) != digest(wheel):
                raise SystemExit(f"a second build has other bytes: compare {wheel} and {again}")
            shutil.rmtree(again.parent)
        check(wheel, flavour)
        works = smoke_test(wheel, flavour)
        size = wheel.stat().st_size / 1e6
        print(f"{wheel.name}: {size:.1f} MB, {works}, works by itself, sha256 {digest(wheel)}")


def build_sdist() -> Path:
    """Into dist/, dated by the last commit."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": commit_time()}
    call(PYTHON, "-m", "build", "--sdist", "--outdir", DIST, env=environment)
    return DIST / f"cccl-{project_version()}.tar.gz"


def build_wheel(sdist: Path, flavour: str, fetch: bool = False, folder: str = "") -> Path:
    """From the sdist alone, into dist/ or a folder of it."""
    define = ["CCCLIB_CUDA=OFF"]
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDACXX", "CUDA_HOME")}
    environment["SOURCE_DATE_EPOCH"] = commit_time()
    if flavour != "cpu":
        define = ["CCCLIB_CUDA=ON", "CCCLIB_CUDA_ALL=ON"]
        environment["CUDA_HOME"] = str(cuda_home(flavour.removeprefix("cuda"), fetch))
    environment["SKBUILD_CMAKE_DEFINE"] = ";".join(define)
    with scratch() as where:
        with tarfile.open(sdist) as archive:
            # Releases before 3.11.4, as Debian 12 has, know no filters. It is our own archive.
            archive.extractall(
                where, **{"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            )
        source = where / sdist.name.removesuffix(".tar.gz")
        built, tagged = where / "built", where / "tagged"
        stamp(source / "pyproject.toml", flavour)
        call(PYTHON, "-m", "build", "--wheel", "--outdir", built, source, env=environment)
        call(PYTHON, "-m", "auditwheel", "repair", "-w", tagged, *built.glob("*.whl"),
             env=environment)  # fmt: skip
        (wheel,) = tagged.glob("*.whl")
        (DIST / folder).mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, DIST / folder))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """The one folder to build in, for one build at a time."""
    try:
        SCRATCH.mkdir()
    except FileExistsError as error:
        raise Unavailable(f"{SCRATCH} is there: another build uses it, or was killed") from error
    try:
        yield SCRATCH
    finally:
        shutil.rmtree(SCRATCH)


def stamp(pyproject: Path, flavour: str) -> None:
    """CUDA wheels are versions of their own: 0.1.0+cuda13."""
    if flavour == "cpu":
        return
    version = project_version()
    text = pyproject.read_text()
    line = f'version = "{version}"'
    assert text.count(line) == 1
    pyproject.write_text(text.replace(line, f'version = "{version}+{flavour}"'))


def check(wheel: Path, flavour: str) -> None:
    """Size, names, licences, and what its libraries link."""
    from elftools.elf.elffile import (
        ELFFile,
    )  # comes with auditwheel; the matrix's list needs neither

    wrong = []
    if wheel.stat().st_size > MOST_BYTES:
        wrong.append(f"{wheel.stat().st_size} bytes; at most {MOST_BYTES}")
    if "manylinux" not in wheel.name:
        wrong.append("no manylinux tag")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        wrong += [f"contains {name}" for name in names if MUST_NOT_CONTAIN.search(name)]
        wrong += [
            f"lacks {name}" for name in ("LICENSE", "THIRD_PARTY_LICENSES.md")
            if not any(n.endswith(f"/licenses/{name}") for n in names)
        ]  # fmt: skip
        libraries = [name for name in names if name.endswith(".so")]
        for name in libraries:
            with archive.open(name) as file:
                dynamic = ELFFile(file).get_section_by_name(".dynamic")
                linked = [t.needed for t in dynamic.iter_tags() if t.entry.d_tag == "DT_NEEDED"]
            wrong += [f"{name} links {lib}" for lib in linked if not MAY_LINK.fullmatch(lib)]
    if len(libraries) != 1:
        wrong.append(f"holds libraries {libraries}; expected one")
    if wrong:
        raise SystemExit(f"{wheel.name} ({flavour}): " + "; ".join(wrong))


def smoke_test(wheel: Path, flavour: str) -> str:
    """`doctor` in an environment that holds the wheel and NumPy alone, away from the sources."""
    with tempfile.TemporaryDirectory() as scratch:
        python = new_environment(Path(scratch, "bare"), wheel)
        done = subprocess.run(
            [python, "-m", "cccl", "doctor", "--json"], capture_output=True, text=True, cwd=scratch
        )
        found = json.loads(done.stdout) if done.stdout else {"problems": [done.stderr]}
    # The driver of this machine need not fit; all else must.
    problems = [text for text in found["problems"] if "driver" not in text]
    if problems:
        raise SystemExit(f"{wheel.name}: doctor finds: " + "; ".join(problems))
    cuda = found["build"]["cuda"]
    label = f"+{flavour}" if flavour != "cpu" else ""
    assert found["versions"]["cccl"] == project_version() + label, found["versions"]
    assert (cuda or "cpu").partition(".")[0] == flavour.removeprefix("cuda"), found["build"]
    return f"CUDA {cuda}, {found['build']['cuda_code']}" if cuda else "no CUDA code"


def digest(path: Path) -> str:
    """Its sha256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    try:
        main()
    except Unavailable as error:
        raise SystemExit(str(error)) from error
