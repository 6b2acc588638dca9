"""The include rules, and the names that NVIDIA's toolkit has taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
SOURCES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".inl", ".inc"}


def sources(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in SOURCES)


def includes(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text())


def offenders(paths: list[Path], forbidden: str) -> list[str]:
    pattern = re.compile(forbidden, re.IGNORECASE)
    return [f"{p.relative_to(ROOT)}: {i}" for p in paths for i in includes(p) if pattern.search(i)]


def test_there_is_a_core_to_look_at():
    assert len(sources("core")) > 20


def test_the_core_includes_no_torch_python_or_cupy_header():
    assert not offenders(sources("core"), r"torch|aten/|c10/|python|pybind|nanobind|cupy")


@pytest.mark.parametrize("folder", ["api", "scheduler"])
def test_api_and_scheduler_include_no_cuda_or_nccl_header(folder):
    assert not offenders(sources(f"core/{folder}"), r"cuda|nccl|cub/|nvtx|\.cuh$")


def test_the_scheduler_includes_only_api_and_itself():
    own = {i for p in sources("core/scheduler") for i in includes(p) if "/" in i}
    assert {i.split("/")[0] for i in own} <= {"api", "scheduler"}


def test_the_api_includes_only_itself():
    own = {i for p in sources("core/api") for i in includes(p) if "/" in i}
    assert {i.split("/")[0] for i in own} <= {"api"}


def test_codecs_know_nothing_of_transports_and_transports_nothing_of_codecs():
    assert not offenders(sources("core/codecs"), r"^(transports|scheduler|collectives)/")
    assert not offenders(sources("core/transports"), r"^(codecs|scheduler|collectives)/")


def test_only_the_nccl_transport_includes_nccl():
    outside = [p for p in sources("core") if "transports/nccl" not in p.as_posix()]
    assert not offenders(outside, r"(^|/)nccl\.h$")


def test_only_cuda_sources_include_cuda():
    """So that a build without a toolkit needs no #ifdef."""
    host = [
        p for p in sources("core")
        if p.suffix not in {".cu", ".cuh"} and not {"cuda", "nccl", "direct"} & set(p.parts)
    ]  # fmt: skip
    assert not offenders(host, r"cuda|\.cuh$")


def test_no_member_of_ours_goes_without_an_address():
    """nvcc places what follows it elsewhere than the host's compiler: kernels got wrong values."""
    paths = [*sources("core"), *sources("bindings")]
    assert not [p for p in paths if "no_unique_address" in p.read_text()]


def test_no_macro_of_ours_begins_with_the_toolkits_prefix():
    """NVIDIA's headers define CCCL_* themselves."""
    taken = re.compile(r"^\s*#\s*(?:define|ifdef|ifndef|if|elif|undef)\b.*\bCCCL_", re.MULTILINE)
    paths = [*sources("core"), *sources("bindings"), *sources("tests/cpp")]
    assert not [p for p in paths if taken.search(p.read_text())]


def test_no_cmake_variable_or_option_of_ours_begins_with_the_toolkits_prefix():
    paths = [*ROOT.glob("CMakeLists.txt"), *(ROOT / "cmake").glob("*.cmake")]
    for folder in ("core", "bindings", "tests"):
        paths += (ROOT / folder).rglob("CMakeLists.txt")
    assert paths
    assert not [p for p in paths if re.search(r"(?<![\w$])CCCL_|\$\{CCCL_", p.read_text())]


def test_frontends_are_thin():
    """They translate tensors, streams and futures: a frontend that grows does something else. The
    tools beside it are no part of it."""
    tools = {"bench.py", "tune.py", "profile.py", "tensorboard.py", "converge.py", "_launched.py",
             "_explain.py", "_bench_table.py", "_layer_errors.py", "_steps.py",
             "_replicas.py"}  # fmt: skip
    for frontend in (ROOT / "frontends").iterdir():
        sources = [path for path in frontend.glob("*.py") if path.name not in tools]
        lines = sum(len(path.read_text().splitlines()) for path in sources)
        assert lines < 2850, frontend.name
