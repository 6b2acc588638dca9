"""Paired trainings over gloo."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from output import printed

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

def zeros(training):
    return float((training.model.module.weight.abs() < 0.01).float().mean()) + dist.get_rank()
"""
RESUMING = (
    ENTRY
    + """
class Resuming(Training):
    fails_at = None

    def step(self):
        if self.count == self.fails_at:
            raise KeyboardInterrupt
        self.count += 1
        self.calls.append(self.count)
        return super().step()

    count, calls = 0, []

    def state_dict(self):
        return {"model": self.model.module.state_dict(), "count": self.count,
                "optimizer": self.optimizer.state_dict(), "draws": self.generator.get_state()}

    def load_state_dict(self, state):
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["draws"])
        self.count = state["count"]
"""
)


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

    scope: dict = {}
    exec(ENTRY, scope)
    run(make, {"compression_type": codec}, seeds=range(2), steps=steps, folder=folder, looks=3,
        evaluations={"zeros": scope["zeros"]})  # fmt: skip


def stopped(folder: str, fails_at: int | None, lost: bool = False) -> list[int]:
    """Runs until it fails; the steps that were trained."""
    from cccl.torch.converge import run

    scope: dict = {}
    exec(RESUMING, scope)
    entry = scope["Resuming"]
    entry.fails_at = fails_at
    if lost and dist.get_rank() == 1:
        for file in Path(folder).glob("*.rank1.pt"):
            file.unlink()
    config = {"compression_type": "block_float8"}
    stop = pytest.raises(KeyboardInterrupt) if fails_at else contextlib.nullcontext()
    with stop:
        run(entry, config, seeds=[0], steps=8, looks=4, folder=folder)
    return entry.calls


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
    assert [look["step"] for look in ours["looks"]] == [2, 4, 6]
    for look in ours["looks"]:
        assert look["validation"] is None and len(set(look["digests"])) == 1
        assert look["layers"].keys() == {"module.weight", "module.bias"}
        assert 1e-6 < look["layers"]["module.weight"] < 0.02, look
    assert all(not look["layers"] for look in plain["looks"])
    assert len(ours["norms"]) == 6 and ours["norms"][0] == pytest.approx(plain["norms"][0], 0.01)
    assert 0.5 < ours["scores"]["zeros"] < 1.5  # the mean over ranks 0 and 1


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


def test_an_interrupted_run_goes_on_from_its_last_look_and_ends_in_the_same_bits(ranks, tmp_path):
    whole, parts, lost = (str(tmp_path / name) for name in ("whole", "parts", "lost"))
    everything = [*range(1, 9), *range(1, 9)]
    assert ranks(2)(stopped, whole, None) == [everything] * 2
    for folder in parts, lost:
        assert ranks(2)(stopped, folder, 5) == [[1, 2, 3, 4, 5]] * 2
    assert ranks(2)(stopped, parts, None) == [everything[4:]] * 2  # from the look at step 4
    # One rank has no checkpoint: all begin anew.
    assert ranks(2)(stopped, lost, None, True) == [everything] * 2
    found = {}
    for folder in whole, parts, lost:
        assert not list(Path(folder).glob("*.pt"))
        for file in Path(folder).glob("run-*.json"):
            run = json.loads(file.read_text())
            found.setdefault(file.name, []).append(run)
            resumed = folder == parts and run["way"] == "none"
            assert run.pop("resumed_at") == ([4] if resumed else [])
    assert len(found) == 2
    for first, *others in found.values():
        assert others == [first, first]


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
         "--steps", "3", "--evaluate", f"{tmp_path}/train.py:zeros", "--output", str(out)],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "converge 4/4: block_float8, seed 1" in done.stderr
    told = printed(done.stdout)
    assert told.startswith("seed  plain") and "90 % interval" in told and "\nzeros  " in told
    assert Path(out, "report.html").exists()
