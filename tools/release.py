"""Checks what `wheels.py` left in dist/, and adds licences, SBOM and checksums: `release.py
[--tag v0.1.0]`. With a tag, the version and the changelog must say the same."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from toolchain import PYTHON, ROOT, call, new_environment, project_version
from wheels import DIST, check, digest

# Of what the package needs to run; another one is a question for a person.
LICENCES = {"Apache-2.0", "BSD License", "BSD-3-Clause", "0BSD", "MIT", "Zlib", "CC0-1.0"}


def main() -> None:
    """Ends at the first thing that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="the tag that is released")
    options = parser.parse_args()
    version = project_version()
    if options.tag:
        check_tag(options.tag, version)
    (sdist,) = DIST.glob("*.tar.gz")
    wheels = sorted(DIST.glob("*.whl"))
    for file in (sdist, *wheels):
        if file.name.split("-")[1].removesuffix(".tar.gz").split("+")[0] != version:
            raise SystemExit(f"{file.name} is not of version {version}: empty dist/ and build anew")
    if not wheels:
        raise SystemExit("no wheels in dist/: run nox -s build")
    call(PYTHON, "-m", "twine", "check", "--strict", sdist, *wheels)
    for wheel in wheels:
        label = wheel.name.split("-")[1].partition("+")[2]
        check(wheel, label or "cpu")
    describe(wheels[0])
    sums = [f"{digest(file)}  {file.name}" for file in sorted(DIST.iterdir()) if file.is_file()
            and file.name != "SHA256SUMS"]  # fmt: skip
    (DIST / "SHA256SUMS").write_text("\n".join([*sums, ""]))
    call("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=DIST)
    print("\n".join(sums))


def check_tag(tag: str, version: str) -> None:
    """The tag names the version, which has its section in the changelog."""
    if tag != f"v{version}":
        raise SystemExit(f"tag {tag}, but pyproject.toml says version {version}")
    if f"\n## {version}\n" not in (ROOT / "CHANGELOG.md").read_text():
        raise SystemExit(f"CHANGELOG.md has no section '## {version}'")


def describe(wheel: Path) -> None:
    """Licences and SBOM of the wheel with what it needs, as installed."""
    with tempfile.TemporaryDirectory() as scratch:
        python = new_environment(Path(scratch, "env"), wheel)
        shown = call(PYTHON, "-m", "piplicenses", f"--python={python}", "--format=json",
                     "--from=mixed", capture=True)  # fmt: skip
        found = {row["Name"]: row["License"] for row in json.loads(shown)}
        other = {k: v for k, v in found.items() if not set(v.split(" AND ")) <= LICENCES}
        if other:
            raise SystemExit(f"licences to look at: {other}")
        print(f"licences: {found}")
        # They came with the environment.
        call(python, "-m", "pip", "uninstall", "-q", "-y", "setuptools", "pip")
        call(PYTHON, "-m", "cyclonedx_py", "environment", python, "--output-reproducible",
             "--pyproject", "pyproject.toml", "--output-format", "JSON",
             "--output-file", DIST / "sbom.cdx.json")  # fmt: skip


if __name__ == "__main__":
    main()
