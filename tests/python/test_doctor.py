"""`python -m cccl doctor` finds what is there, and what is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cccl
from cccl import _core, _nccl, doctor
from cccl.__main__ import main

NCCL_CALLS = (
    "GetUniqueId", "CommInitRankConfig", "CommSplit", "CommGetAsyncError", "CommAbort",
    "CommFinalize", "CommDestroy", "Send", "Recv", "GroupStart", "GroupEnd", "GetErrorString",
    "GetLastError",
)  # fmt: skip


def examine(**environment: str) -> tuple[int, dict]:
    """In a process of its own, since a loaded library stays."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NCCL_HOME", "CCCL_NCCL_PATH")}
    done = subprocess.run(
        [sys.executable, "-m", "cccl", "doctor", "--json"],
        env=clean | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


def examine_nccl(**environment: str) -> tuple[dict, list[str]]:
    """The same for NCCL alone, which spares the import of torch."""
    clean = {k: v for k, v in os.environ.items() if k not in ("NCCL_HOME", "CCCL_NCCL_PATH")}
    code = (
        "import json; from cccl import doctor; problems = []; "
        "print(json.dumps([doctor._nccl_library(problems), problems]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean | environment, check=True,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    found, problems = json.loads(done.stdout)
    return found, problems


@pytest.fixture(scope="module")
def build_nccl(tmp_path_factory):
    """Makes libraries that answer ncclGetVersion, as libnccl does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")

    def build(version: int) -> Path:
        folder = tmp_path_factory.mktemp("nccl") / "lib"
        folder.mkdir()
        source = [f"int ncclGetVersion(int* v) {{ *v = {version}; return 0; }}"]
        source += [f"int nccl{name}(void) {{ return 1; }}" for name in NCCL_CALLS]
        (folder / "nccl.c").write_text("\n".join(source))
        library = folder / _nccl.SONAME
        subprocess.run([compiler, "-shared", "-fPIC", folder / "nccl.c", "-o", library], check=True)
        return library

    return build


def test_a_sound_installation_has_no_problems_and_status_0():
    status, found = examine()
    assert found["problems"] == [] and status == 0
    assert found["versions"]["cccl"] == cccl.__version__
    assert found["cpu"]["in_use"] == _core.available_isas()[-1]
    assert "lo" in found["network"] and "MTU" in found["network"]["lo"]
    assert found["build"]["cuda"] is None or _core.cuda_built()
    tested = set(found["self_test"])
    assert tested >= {*cccl.codec_names(), "all_reduce"}


def test_known_bad_settings_are_warned_of_with_the_remedy(monkeypatch, capsys):
    for name in ("OMP_WAIT_POLICY", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert doctor.known_bad({"cuda": None}) == []  # neither a device nor several hosts
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    warnings = doctor.known_bad({"cuda": {"devices": [{"name": "one"}]}})
    assert ["CUDA_LAUNCH_BLOCKING" in warnings[0], "interface that hosts share" in warnings[1]] == [
        True, True,
    ]  # fmt: skip
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert main(["doctor"]) == 0  # a warning is no problem
    assert "warning: OMP_WAIT_POLICY=ACTIVE" in capsys.readouterr().out


def test_the_text_shows_every_section(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("cccl", cccl.__version__, "instruction_sets", "block_float8", "all is well"):
        assert word in shown


def test_a_codec_that_decodes_wrongly_is_a_problem_and_status_1(monkeypatch, capsys):
    identity = _core.make_codec("identity", {})

    class Broken:
        def __getattr__(self, name):
            return getattr(identity, name)

        def decode(self, *_):  # leaves the output as it was
            pass

    make = _core.make_codec
    monkeypatch.setattr(
        _core, "make_codec", lambda n, o: Broken() if n == "identity" else make(n, o)
    )
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["self_test"]["identity"] == "fails"
    assert len(found["problems"]) == 1 and "identity" in found["problems"][0]


def test_a_torch_that_cannot_be_imported_is_a_problem(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('half installed')")
    status, found = examine(PYTHONPATH=str(tmp_path))
    assert status == 1 and found["versions"]["torch"] is None
    assert "half installed" in found["problems"][0]


def test_a_torch_older_than_supported_is_a_problem(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.8.1'")
    status, found = examine(PYTHONPATH=str(tmp_path))
    assert status == 1 and "2.8.1 is older than" in found["problems"][0]


def test_the_copy_of_nccl_in_the_process_comes_first(build_nccl):
    loaded, home = build_nccl(22703), build_nccl(23007).parent.parent
    code = (
        f"import ctypes; ctypes.CDLL({str(loaded)!r}); from cccl import _nccl; "
        "found = _nccl.library(); print(found.found_by, found.version)"
    )
    environment = {**os.environ, "NCCL_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "already in the process 2.27.3", done.stderr


def test_cccl_nccl_path_comes_before_nccl_home(build_nccl):
    first, second = build_nccl(22703), build_nccl(23007)
    home = str(second.parent.parent)
    found, _ = examine_nccl(CCCL_NCCL_PATH=str(first), NCCL_HOME=home)
    assert found["found_by"] == "CCCL_NCCL_PATH" and found["version"] == "2.27.3"
    found, _ = examine_nccl(NCCL_HOME=home)
    assert found["found_by"] == "NCCL_HOME" and found["version"] == "2.30.7"


def test_a_path_that_names_no_library_is_a_problem(tmp_path):
    missing = str(tmp_path / "libnccl.so.2")
    _, problems = examine_nccl(CCCL_NCCL_PATH=missing)
    assert "CCCL_NCCL_PATH" in problems[0] and missing in problems[0]


def test_a_library_that_is_not_nccl_is_a_problem():
    _, problems = examine_nccl(CCCL_NCCL_PATH=_core.__file__)
    assert "ncclGetVersion" in problems[0]


def test_an_nccl_older_than_supported_is_a_problem(build_nccl):
    """F035: of any dtype, since payloads go as bytes."""
    _, problems = examine_nccl(CCCL_NCCL_PATH=str(build_nccl(21605)))
    assert "2.16.5" in problems[0] and "2.18" in problems[0]


@pytest.mark.parametrize(
    ("number", "text"),
    [(2708, "2.7.8"), (2804, "2.8.4"), (20900, "2.9.0"), (21003, "2.10.3"), (22703, "2.27.3")],
)
def test_nccls_version_numbers_of_both_kinds(number, text):
    """F093"""
    assert _core.nccl_version_text(number) == text


def test_versions_compare_by_number():
    assert doctor._release("2.13.0+cpu") > doctor._release("2.9")
