"""The verdict of `python -m cccl converge`, by its rule, and its report."""

from __future__ import annotations

import json

import pytest

import cccl
from cccl import _converge_report, converge
from cccl.__main__ import main


def runs(*differences: float, equal: bool = True, scores: tuple[float, ...] = ()) -> list[dict]:
    """A pair for each relative difference to a plain loss of 2, and for each difference to a score
    of 0.5."""
    found = []
    for seed, difference in enumerate(differences):
        for way, final in ("none", 2.0), ("block_float4", 2.0 * (1 + difference)):
            layers = {"a.weight": 0.3, "b.weight": 0.1 * (seed + 1)} if way != "none" else {}
            look = {"step": 2, "validation": final, "digests": ["ab" * 32] * 2, "layers": layers}
            score = 0.5 + (scores[seed] if scores and way != "none" else 0.0)
            found.append({
                "way": way, "seed": seed, "final": final, "losses": [3.0, final],
                "norms": [1.5, 1.0], "looks": [look], "resumed_at": [],
                "replicas_equal": equal, "ratio": 4.0, "scores": {"hits": score} if scores else {},
                "settings": {"compression_type": "block_float4", "steps": 2, "world_size": 2},
            })  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ((0.001, -0.001, 0.0005), "same"),
        ((0.02, 0.021, 0.019), "worse"),
        ((-0.02, -0.021, -0.019), "better"),
        ((0.02, -0.02, 0.001), "undecided"),
        ((0.0,), "undecided"),
        ((float("nan"), 0.0), "failed"),
    ],
)
def test_the_verdict_follows_the_rule(differences, verdict):
    assert converge.judge(runs(*differences))["verdict"] == verdict


def test_the_interval_is_students_by_hand():
    # Mean 2 %, deviation 1 % of three: 2.920 * 0.01 / sqrt(3).
    low, high = converge.judge(runs(0.01, 0.02, 0.03))["interval"]
    assert (low, high) == pytest.approx((0.02 - 0.016859, 0.02 + 0.016859), abs=1e-5)


def test_replicas_that_differ_fail_whatever_the_loss():
    found = converge.judge(runs(0.0, 0.0, equal=False))
    assert found["verdict"] == "failed" and "replicas differ" in found["text"]


@pytest.mark.parametrize(
    ("scores", "judged", "verdict"),
    [
        ((0.001, -0.001, 0.0), "same", "same"),
        ((-0.1, -0.11, -0.09), "worse", "worse"),
        ((0.1, 0.11, 0.09), "better", "same"),
        ((0.1, -0.1, 0.0), "undecided", "same"),
    ],
)
def test_a_score_that_is_worse_makes_the_whole_worse(scores, judged, verdict):
    found = converge.judge(runs(0.0, 0.0, 0.0, scores=scores))
    assert found["scores"]["hits"]["verdict"] == judged and found["verdict"] == verdict
    assert ("worse in hits" in found["text"]) == (verdict == "worse")


def test_errors_of_layers_are_means_the_largest_first():
    assert list(_converge_report.layer_errors(runs(0.0, 0.0, 0.0)).items()) == [
        ("a.weight", pytest.approx(0.3)), ("b.weight", pytest.approx(0.2)),
    ]  # fmt: skip


def test_a_run_without_its_pair_does_not_count():
    assert len(converge.judge(runs(0.0, 0.0, 0.0)[:-1])["pairs"]) == 2


@pytest.mark.parametrize(
    ("differences", "status"),
    [((0.001, 0.0), 0), ((0.02, 0.021), 1), ((0.02, -0.02), 3)],
)
def test_the_command_judges_a_folder_and_writes_a_report(differences, status, tmp_path, capsys):
    pytest.importorskip("jinja2", reason="the report is a template")
    pytest.importorskip("matplotlib", reason="the report has a picture")
    for run in runs(*differences, scores=differences):
        (tmp_path / f"run-{run['way']}-{run['seed']}.json").write_text(json.dumps(run))
    assert main(["converge", "report", str(tmp_path), "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    page = (tmp_path / "report.html").read_text()
    assert f"<h1>block_float4: {found['verdict']}</h1>" in page
    assert page.count("data:image/png;base64,iVBOR") == 3  # losses, norms, errors of layers
    assert page.count("<tr><td>") == 2 + 1 + 4  # pairs, scores, digests
    assert "hits" in page and "abababababab" in page


def test_folders_and_margins_that_cannot_be_are_refused(tmp_path, capsys):
    assert main(["converge", "report", str(tmp_path)]) == 2
    assert "holds no runs" in capsys.readouterr().err
    (tmp_path / "run-none-0.json").write_text("{")
    assert main(["converge", "report", str(tmp_path)]) == 2
    assert "cannot read the runs" in capsys.readouterr().err
    with pytest.raises(cccl.ConfigError, match="margin"):
        converge.judge(runs(0.0, 0.0), 0.0)
