"""`benchmarks/convergence`: a survey repeats bit by bit, goes on where it ended, and says what it
found. Its means beside those of real ranks are in tests/distributed/test_convergence_means.py."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import cccl
from cccl import _core

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "convergence"))
import judged
import means
import one_run
import survey
import variants
from variants import VARIANTS
from workloads import WORKLOADS, load_digits

FOLDER = Path(judged.__file__).parent
ALIKE = [name for name, variant in VARIANTS.items()
         if variant.kind in ("plain", "bf16", "cccl") and "diff" not in name]  # fmt: skip
on_cuda = pytest.mark.skipif(
    not _core.cuda_device_count() or not torch.cuda.is_available(), reason="no CUDA device"
)

SMALL = ["--workloads", "gpt-tiny", "--steps", "3", "--looks", "1", "--device", "cpu"]
WAYS = ["--variants", "8 bits", "3 bits feedback", "noise 0.1", "error 0.12"]


@pytest.fixture(autouse=True)
def _threads():
    """Runs set torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def convergence(*arguments: object) -> int:
    main = runpy.run_path(str(FOLDER / "__main__.py"))["main"]
    return int(main([str(argument) for argument in arguments]))


def without_seconds(file: Path) -> list[dict]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in survey.load(file)]
    return sorted(rows, key=lambda row: (row["seed"], row["way"]))


def layout_of(rows: torch.Tensor) -> means.Layout:
    model = torch.nn.Linear(rows.shape[1] // 64, 64, bias=False)
    return means.Layout(model)


def gradients(world: int, count: int = 64 * 200, noise: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    shared = torch.randn(count, generator=generator) ** 3
    return shared + noise * torch.randn(world, count, generator=generator)


def mean(variant: variants.Variant, rows: torch.Tensor, step: int = 0) -> torch.Tensor:
    out = rows.new_zeros(rows.shape[1])
    means.mean_of(variant, layout_of(rows), rows)(step, rows, out)
    return out


def test_a_survey_is_kept_judged_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "runs.jsonl"
    assert convergence("run", *SMALL, *WAYS, "--seeds", 2, "--file", file) == 0
    rows = survey.load(file)
    assert [(row["way"], row["seed"]) for row in rows[:2]] == [("plain", 0), ("8 bits", 0)]
    assert len(rows) == 2 * 5
    for row in rows:
        assert len(row["losses"]) == len(row["norms"]) == len(row["bits"]) == 3
        assert row["final"] == row["looks"][-1]["validation"] < 6.0
    capsys.readouterr()
    assert convergence("report", "--file", file, "--figures", tmp_path) == 0
    text = capsys.readouterr().out
    assert "| 8 bits | 8.1" in text and "same" in text and "| plain | 32.00 |" in text
    assert (tmp_path / "convergence-gpt-tiny.png").stat().st_size > 10_000


def test_runs_repeat_bit_by_bit_also_in_processes(tmp_path):
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file, jobs in zip(files, ("1", "2"), strict=True):
        command = [
            sys.executable,
            str(FOLDER),
            "run",
            *SMALL,
            *WAYS,
            "--seeds",
            "1",
            "--jobs",
            jobs,
        ]
        subprocess.run([*command, "--file", str(file)], check=True, timeout=200, env=os.environ)
    one, two = map(without_seconds, files)
    assert one == two and len(one) == 5


def test_a_survey_goes_on_where_it_ended(tmp_path, capsys):
    file, run = tmp_path / "runs.jsonl", ["run", *SMALL, "--variants", "8 bits", "--file"]
    assert convergence(*run, file, "--seeds", 2) == 0
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:100])  # interrupted while it wrote
    assert convergence(*run, file, "--seeds", 2) == 2
    assert "--resume" in capsys.readouterr().err
    assert convergence(*run, file, "--seeds", 2, "--resume", "--time-limit", 1e-9) == 3
    assert file.read_text() == "".join(lines[:2])
    assert convergence(*run, file, "--seeds", 2, "--resume") == 0
    assert file.read_text().startswith("".join(lines[:2]))
    (tmp_path / "whole.jsonl").write_text(whole)
    assert without_seconds(file) == without_seconds(tmp_path / "whole.jsonl")
    assert convergence(*run, file, "--seeds", 2, "--resume", "--world", 2) == 2
    assert "another file" in capsys.readouterr().err


def test_a_run_that_fails_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(one_run, "mean_of", fail)
    file = tmp_path / "runs.jsonl"
    assert convergence("run", *SMALL, "--variants", "8 bits", "--seeds", 1, "--file", file) == 3
    assert capsys.readouterr().out.count("RuntimeError: out of memory") == 2
    assert survey.load(file) == []


def test_identity_is_plain():
    for world in (2, 3, 4):
        rows = gradients(world)
        identity = variants.Variant("cccl", "", {"compression_type": "identity"})
        assert torch.equal(mean(identity, rows), mean(VARIANTS["plain"], rows))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_a_mean_and_its_bits(name):
    rows, variant = gradients(2), VARIANTS[name]
    out, exact = torch.zeros(rows.shape[1]), rows.mean(0)
    reduce = means.mean_of(variant, layout_of(rows), rows)
    bits = [reduce(step, rows, out) for step in range(12)]
    error = float((out - exact).norm() / exact.norm())
    assert error < (2.0 if "feedback" in name else 1.0)
    assert 0 < bits[-1] <= 32
    assert bits[-1] < 9 or name in ("plain", "bf16 hook")


@on_cuda
@pytest.mark.parametrize("name", ALIKE)
def test_a_gpu_makes_the_same_mean(name):
    rows = gradients(4)
    assert torch.equal(mean(VARIANTS[name], rows.cuda()).cpu(), mean(VARIANTS[name], rows))


@on_cuda
def test_captured_passes_give_each_step_its_gradients():
    task = WORKLOADS["gpt-tiny"](0, torch.device("cuda"), None)
    layout = means.Layout(task.model)
    batches = task.draw(3, 2, 0)
    captured = one_run.Gradients(task, layout, 2, batches)
    for step in (2, 0, 1):
        inputs, targets = task.take(batches[step])
        for rank, row in enumerate(captured.at(step)):
            loss = task.loss(task.model, inputs[rank], targets[rank])
            found = torch.autograd.grad(loss, [place.parameter for place in layout.places])
            for place, part in zip(layout.places, found, strict=True):
                torch.testing.assert_close(place.within(row), part, rtol=1e-2, atol=1e-4)


def test_a_noise_budget_keeps_its_share():
    """Errors are estimated from a sample of the mean: to a fifth."""
    rows, bits, chosen = gradients(4, noise=3.0), [], []
    for share in (0.003, 0.03, 0.3):
        settings = VARIANTS["noise 0.1"].settings | {"max_noise_share": share}
        budget = means.mean_of(variants.Variant("cccl", "", settings), layout_of(rows), rows)
        out = torch.zeros(rows.shape[1])
        bits.append([budget(step, rows, out) for step in range(4)][-1])
        noise = float(rows.var(0).sum()) / 4
        error = float((out - rows.mean(0)).square().sum())
        assert error <= 1.2 * share * noise
        chosen.append(error / noise)
    assert bits == sorted(bits, reverse=True) and len(set(bits)) == 3
    assert chosen == sorted(chosen)


def test_where_ranks_do_not_differ_a_noise_budget_saves_nothing():
    rows = gradients(1).repeat(4, 1)
    budget = means.mean_of(VARIANTS["noise 1"], layout_of(rows), rows)
    out = torch.zeros(rows.shape[1])
    assert all(budget(step, rows, out) > 8 for step in range(4))


def test_a_budget_of_bits_is_kept_between_measurements():
    rows = gradients(3)
    variant = variants.Variant("cccl", "", {"target_bits": 4.2})
    budget = means.mean_of(variant, layout_of(rows), rows)
    out = torch.zeros(rows.shape[1])
    bits = [budget(step, rows, out) for step in range(4)]
    assert bits[0] > 8 and bits[3] <= 4.2  # the steps 0, 1 and 2 are measured


def test_a_variant_without_codec_is_left_out_with_a_reason():
    shared = {"world": 2, "steps": 1, "device": "cpu"}
    plain = {"workload": "w", "way": "plain", "seed": 0, "final": 1.0, "bits_per_value": 32.0,
             "norms": [1.0], "settings": shared, "parameters": 1, "buckets": 1}  # fmt: skip
    lacks = {"workload": "w", "way": "diff 4 bits", "seed": 0, "error": "no CUDA build"}
    rows = judged.rows_of([plain, lacks], 0.005)
    assert rows[1] == {"way": "diff 4 bits", "error": "no CUDA build"}


def test_digits_are_looked_for_and_checked(tmp_path, capsys):
    wrong = tmp_path / "digits.csv"
    wrong.write_text("1,2,3\n4,5,6\n")
    run = ["run", "--workloads", "digits-sgd", "--steps", "1", "--file", tmp_path / "runs.jsonl"]
    assert convergence(*run, "--digits", wrong) == 2
    assert "1797 rows of 65" in capsys.readouterr().err
    assert convergence(*run, "--digits", tmp_path / "none.csv") == 2
    assert "none.csv" in capsys.readouterr().err


def test_digits_are_those_of_scikit_learn():
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = load_digits(None)
    theirs = datasets.load_digits()
    assert images.shape == (1797, 1, 8, 8) and float(images.max()) == 1.0
    assert torch.bincount(labels).tolist() == torch.bincount(
        torch.from_numpy(theirs.target)).tolist()  # fmt: skip


def test_lines_that_are_no_runs_are_refused(tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_text("no json\n")
    with pytest.raises(cccl.ConfigError, match="holds no runs"):
        survey.load(file)
    file.write_text(json.dumps({"way": "plain"}) + "\n")
    assert survey.load(file) == [{"way": "plain"}]
