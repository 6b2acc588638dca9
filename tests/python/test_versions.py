"""versions.toml and pyproject.toml alone decide a version; other files repeat them."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cccl
from cccl import doctor

ROOT = Path(__file__).parents[2]
VERSIONS = doctor.supported()


def toml(path: str) -> dict[str, Any]:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return tomllib.loads((ROOT / path).read_text())


def test_the_package_says_the_version_of_pyproject():
    assert cccl.__version__.partition("+")[0] == toml("pyproject.toml")["project"]["version"]


def test_the_citation_names_the_same_version():
    found = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert found and found[1] == toml("pyproject.toml")["project"]["version"]


def test_packaging_metadata_asks_for_the_oldest_versions():
    project = toml("pyproject.toml")["project"]
    assert project["requires-python"] == f">={VERSIONS['python']['oldest']}"
    assert project["optional-dependencies"]["torch"] == [f"torch>={VERSIONS['torch']['oldest']}"]


def test_the_dockerfile_defaults_to_the_cpu_image():
    text = (ROOT / "docker/Dockerfile").read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S*)$", text, re.MULTILINE))
    row = VERSIONS["images"]["cpu"]
    assert defaults["BUILD_BASE"] == row["build"] and defaults["BASE"] == row["base"]
    assert defaults["TORCH"] == row["torch"] and defaults["TORCH_INDEX"] == row["torch_index"]
    assert defaults["CUDA"] == row["cuda"]


@pytest.mark.parametrize("name", list(VERSIONS["images"]))
def test_bake_builds_each_image_from_what_the_data_file_says(name):
    row = VERSIONS["images"][name]
    arguments = json.loads((ROOT / "docker/bake.json").read_text())["target"][name]["args"]
    assert arguments["BUILD_BASE"] == row["build"] and arguments["BASE"] == row["base"]
    assert arguments["TORCH"] == row["torch"] and arguments["CUDA"] == row["cuda"]
    assert arguments["TORCH_INDEX"] == row["torch_index"]


@pytest.mark.parametrize("name", list(VERSIONS["images"]))
def test_bases_are_pinned_by_digest_and_of_one_release(name):
    row = VERSIONS["images"][name]
    for image in (row["build"], row["base"]):
        assert re.fullmatch(r"[\w/.:-]+@sha256:[0-9a-f]{64}", image)
    release = [re.search(r"bookworm|ubuntu[\d.]+", row[key])[0] for key in ("build", "base")]
    assert release[0] == release[1]


def test_the_documentation_lists_the_tested_versions():
    text = (ROOT / "docs/install.md").read_text()
    nccl = [row["version"] for row in VERSIONS["nccl"]["tested"]]
    for name, tested, oldest in (
        ("Python", VERSIONS["python"]["tested"], VERSIONS["python"]["oldest"]),
        ("torch", VERSIONS["torch"]["tested"], VERSIONS["torch"]["oldest"]),
        ("CUDA", list(VERSIONS["cuda"]), next(iter(VERSIONS["cuda"]))),
        ("NCCL", nccl, VERSIONS["nccl"]["oldest"]),
    ):
        assert f"| {name} | {', '.join(tested)} | {oldest} |" in text
    for name, row in VERSIONS["images"].items():
        assert f"| `{name}` | {row['base'].partition('@')[0]} | {row['torch']} |" in text


def test_the_documentation_lists_the_known_bad_combinations():
    text = (ROOT / "docs/install.md").read_text()
    for entry in VERSIONS["known_bad"]:
        where = "GPUs" if entry.get("cuda") else "everywhere"
        where = "several hosts" if entry.get("several_hosts") else where
        row = f"| `{entry['environment']}` | {where} | {entry['problem']} | {entry['remedy']} |"
        assert row in text


def test_the_matrix_has_a_row_for_every_version():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/matrix.py", "--list"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = {(row["axis"], row["version"]) for row in json.loads(done.stdout)}
    expected = {("python", v) for v in VERSIONS["python"]["tested"]}
    expected |= {("torch", v) for v in VERSIONS["torch"]["tested"]}
    expected |= {("cuda", v) for v in VERSIONS["cuda"]}
    expected |= {("nccl", row["version"]) for row in VERSIONS["nccl"]["tested"]}
    assert rows == expected
