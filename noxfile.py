"""Everything that is run on this project, each in an environment of its own: `nox -s NAME`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

# The CPU parts behave alike from torch 2.9 on; one release by default keeps runs comparable.
TORCH = os.environ.get("CCCLIB_TORCH", "2.13.0")
SANITIZERS = {"address": "address,undefined", "thread": "thread"}


def install(session: nox.Session, extras: str) -> None:
    """Builds the wheel of this checkout and installs it, with torch where an extra asks for it."""
    torch = [f"torch=={TORCH}"] if "torch" in extras else []
    session.install(f".[{extras}]", *torch)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT with DDP on CPU processes, plain and compressed, and compare."""
    install(session, "torch,demo")
    session.run("python", "examples/train_gpt.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the C++ and Python tests; arguments after `--` go to pytest."""
    install(session, "torch,test")
    cpp_tests(session, "plain", "")
    # Away from the sources, so that the installed package is what is tested.
    session.chdir("tests")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
@nox.parametrize("sanitizer", list(SANITIZERS))
def sanitize(session: nox.Session, sanitizer: str) -> None:
    """Run the C++ tests under AddressSanitizer and UBSan, or under ThreadSanitizer."""
    cpp_tests(session, sanitizer, SANITIZERS[sanitizer])


@nox.session
def lint(session: nox.Session) -> None:
    """Check formatting, style and types; `nox -s lint -- --fix` mends what tools can mend."""
    install(session, "lint")
    fix = "--fix" in session.posargs
    sources = [
        str(path)
        for folder in ("core", "bindings", "tests")
        for suffix in ("cpp", "h", "inl", "cu", "cuh")
        for path in sorted(Path(folder).rglob(f"*.{suffix}"))
    ]
    session.run("ruff", "format", *([] if fix else ["--check", "--diff"]), ".")
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *sources)
    session.run("mypy", "-p", "cccl")


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist, and from it the wheel, into dist/."""
    session.install("build")
    session.run("python", "-m", "build", "--outdir", "dist")


def cpp_tests(session: nox.Session, name: str, sanitizer: str) -> None:
    """Configures, builds and runs tests/cpp in build/NAME. Needs GoogleTest (libgtest-dev)."""
    if not shutil.which("g++") and not shutil.which("clang++"):
        session.error("no C++ compiler: install g++")
    if not any(Path(p, "gtest/gtest.h").exists() for p in ("/usr/include", "/usr/local/include")):
        if os.environ.get("CI"):
            session.error("GoogleTest is missing: apt-get install libgtest-dev")
        session.warn("C++ tests left out: GoogleTest is missing (apt-get install libgtest-dev)")
        return
    session.install("cmake>=3.28", "ninja")
    folder = str(Path("build", f"cpp-{name}").absolute())
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "CCCLIB_TESTS": "ON",
        "CCCLIB_PYTHON": "OFF",
        "CCCLIB_CUDA": "OFF",
        "CCCLIB_SANITIZE": sanitizer,
        "SKBUILD_PROJECT_VERSION": "0.0.0",
    }
    defines = [f"-D{key}={value}" for key, value in options.items()]
    session.run("cmake", "-S", ".", "-B", folder, "-G", "Ninja", *defines)
    session.run("cmake", "--build", folder)
    session.run("ctest", "--test-dir", folder, "--output-on-failure")
