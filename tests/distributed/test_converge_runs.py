"""Paired trainings over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cccl

ENTRY = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Training:
    def __init__(self, seed):
        self.model = DistributedDataParallel(torch.nn.Linear(64, 64))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())

    def step(self):
        x = torch.randn(32, 64, generator=self.generator)
        loss = (self.model(x) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()
"""


def make(seed: int):
    scope: dict = {}
    exec(ENTRY, scope)
    return scope["Training"](seed)


def make_compressed(seed: int):
    import cccl.torch

    training = make(seed)
    cccl.torch.compress(training.model, {"compression_type": "block_float8"})
    return training


def paired(folder: str, codec: str = "block_float8", steps: int = 6) -> None:
    from cccl.torch.converge import run

    run(make, {"compression_type": codec}, seeds=range(2), steps=steps, folder=folder)


def test_runs_of_a_pair_share_all_but_the_codec(ranks, tmp_path):
    ranks(2)(paired, str(tmp_path))
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("run-*.json")}
    assert set(found) == {
        f"run-{way}-{seed}" for way in ("none", "block_float8") for seed in (0, 1)
    }
    for run in found.values():
        assert run["replicas_equal"] and len(run["losses"]) == 6
        assert run["final"] == pytest.approx(run["losses"][-1])  # of the last tenth
    plain, ours = found["run-none-0"], found["run-block_float8-0"]
    assert plain["losses"][0] == ours["losses"][0] != found["run-none-1"]["losses"][0]
    assert plain["losses"][-1] == pytest.approx(ours["losses"][-1], rel=0.01)
    assert plain["losses"][-1] != ours["losses"][-1] and ours["ratio"] > 3


def test_an_interrupted_comparison_goes_on_where_it_was(ranks, tmp_path):
    ranks(2)(paired, str(tmp_path))
    missing = tmp_path / "run-block_float8-1.json"
    whole = missing.read_text()
    missing.unlink()
    (tmp_path / "run-block_float8-1.part").write_text("{")  # what an interruption may leave
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("run-*.json")}
    ranks(2)(paired, str(tmp_path))
    assert json.loads(missing.read_text()) == json.loads(whole)  # and reproduces it
    assert {path: path.stat().st_mtime_ns for path in times} == times


def refused(folder: str) -> list[str]:
    from cccl.torch.converge import run

    with pytest.raises(cccl.ConfigError) as own:
        run(make_compressed, {"compression_type": "block_float8"}, steps=2, folder=f"{folder}/own")
    paired(f"{folder}/other", steps=2)
    with pytest.raises(cccl.ConfigError) as other:
        paired(f"{folder}/other", steps=3)
    return [str(own.value), str(other.value)]


def test_what_compares_nothing_is_refused(ranks, tmp_path):
    for own, other in ranks(2)(refused, str(tmp_path)):
        assert "the entry must name no configuration" in own
        assert "another folder" in other


def test_the_command_trains_and_reports(tmp_path):
    pytest.importorskip("jinja2", reason="the report is a template")
    (tmp_path / "train.py").write_text(ENTRY)
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "cccl", "converge", "run", f"{tmp_path}/train.py:Training", "--seeds", "2",
         "--steps", "3", "--output", str(out)],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "converge 4/4: block_float8, seed 1" in done.stderr
    assert done.stdout.startswith("seed  plain") and "90 % interval" in done.stdout
    assert Path(out, "report.html").exists()
