"""Everything that is run on this project, each in an environment of its own: `nox -s NAME`."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

# The CPU parts behave alike from torch 2.9 on; one release by default keeps runs comparable.
TORCH = os.environ.get("CCCLIB_TORCH", "2.13.0")


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
    cpp_tests(session, "tests")
    # Away from the sources, so that the installed package is what is tested.
    session.chdir("tests")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session
@nox.parametrize("preset", ["asan", "tsan"])
def sanitize(session: nox.Session, preset: str) -> None:
    """Run the C++ tests under AddressSanitizer and UBSan, or under ThreadSanitizer."""
    cpp_tests(session, preset)


@nox.session
def neon(session: nox.Session) -> None:
    """Compile the core for 64-bit Arm. Needs its cross compiler (g++-aarch64-linux-gnu)."""
    session.install("cmake>=3.28", "ninja")
    session.run("cmake", "--workflow", "--preset", "neon")


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


def cpp_tests(session: nox.Session, preset: str) -> None:
    """Configures, builds and runs tests/cpp as CMakePresets.json says. Needs GoogleTest."""
    if not any(Path(p, "gtest/gtest.h").exists() for p in ("/usr/include", "/usr/local/include")):
        if os.environ.get("CI"):
            session.error("GoogleTest is missing: apt-get install libgtest-dev")
        session.warn("C++ tests left out: GoogleTest is missing (apt-get install libgtest-dev)")
        return
    session.install("cmake>=3.28", "ninja")
    session.run("cmake", "--workflow", "--preset", preset)
