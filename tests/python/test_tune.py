"""`python -m cccl tune`: what it measures, the profile it writes, and what it says of the gain."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from output import printed

import cccl
from cccl import _core, _model, plan, tune
from cccl.__main__ import main
from cccl._model import Cluster, Rates

CODEC = "block_float8"
RATES = {"bits": 8.125, "encode": 20.0, "accumulate": 20.0, "decode": 20.0}


def found(plain: float = 0.1, ours: float = 0.03, **cluster) -> dict:
    """As `cccl.torch.tune.tune` returns it, of two ranks."""
    wins = ours < plain
    values = {"link_gbit": 1.0, "latency_us": 100.0, "codecs": {CODEC: RATES}, **cluster}
    settings = {"compression_type": "auto", "auto_codecs": [CODEC], "chunk_size": 1 << 20}
    return {
        "config": settings if wins else {"compression_type": "none"},
        "cluster": values,
        "world_size": 2,
        "measured": [{"bytes": 1 << 20, "none": plain, CODEC: ours}],
        "crossover_bytes": {CODEC: 1 << 20 if wins else None},
        "chunks": {"auto": 0.04, "65536": 0.05},
        "notes": ["a note"],
    }


def judged(measured: dict, *arguments, **options) -> dict:
    return measured | tune.judge(measured, *arguments, **options)


def test_a_profile_sets_what_was_found_and_plans_with_it(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(tune.profile(judged(found(stack_gbyte=float("inf")))))
    config = cccl.Config.load(file)
    assert config.compression_type == "auto" and config.chunk_bytes == 1 << 20
    assert config.auto_codecs == (CODEC,)
    cluster = plan.load_cluster(file)
    assert cluster == Cluster.of(found()["cluster"])
    assert "# a note" in file.read_text()


def test_a_fast_link_gains_nothing_and_the_profile_says_plain(tmp_path):
    result = judged(found(plain=0.03, ours=0.04))
    assert not result["gains"] and "the link is fast" in result["reasons"][0]
    (tmp_path / "p.toml").write_text(tune.profile(result))
    assert cccl.Config.load(tmp_path / "p.toml").compression_type == "none"


def test_waiting_under_5_percent_of_a_step_gains_nothing():
    result = judged(found(), 1e6, 10.0)
    assert not result["gains"] and "under 5%" in result["reasons"][0]
    result = judged(found(), 1e8, 0.2)
    assert result["gains"] and result["step"]["gain"] > 2 and result["step"]["codec"] == CODEC


def test_a_step_that_becomes_longer_gains_nothing():
    slow = {"bits": 8.125, "encode": 0.05, "accumulate": 0.05, "decode": 0.05}
    result = judged(found(codecs={CODEC: slow}), 1e7, 0.1)
    assert not result["gains"] and "of a plain one" in result["reasons"][0]


@pytest.mark.parametrize(("zeros", "gains"), [(0.995, False), (0.9, True)])
def test_gradients_over_99_percent_sparse_are_for_sparse_tensors(zeros, gains):
    result = judged(found(), zeros=zeros)
    assert result["gains"] is gains
    assert gains or "sparse" in result["reasons"][0]


def test_parameters_without_computation_are_refused(capsys):
    assert main(["tune", "--parameters", "1e6"]) == 2
    assert "--compute" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path, capsys):
    assert main(["tune", "--output", str(tmp_path / "no" / "x.toml")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_without_a_launcher_it_says_how_to_start_it(monkeypatch, capsys):
    pytest.importorskip("torch", reason="tune needs torch")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["tune"]) == 2
    assert "torchrun --nproc-per-node 2 -m cccl tune" in capsys.readouterr().err


def test_the_crossover_is_where_the_codec_begins_to_win_for_good():
    module = pytest.importorskip("cccl.torch.tune", reason="tune needs torch")
    from cccl._policy import Table

    def crossover(ours: tuple[float, ...]) -> int | None:
        sizes, curves = (1024, 8192, 65536), {"none": (1.0, 2.0, 3.0), CODEC: ours}
        return module.crossover_bytes(Table(sizes, curves, curves), CODEC)

    assert crossover((2.0, 1.0, 1.0)) == 8192
    assert crossover((0.5, 3.0, 2.0)) == 65536
    assert crossover((0.5, 1.0, 4.0)) is None


def test_two_ranks_measure_and_write_what_configure_and_plan_read(tmp_path):
    pytest.importorskip("torch", reason="tune needs torch")
    file, zeros = tmp_path / "cluster.toml", tmp_path / "zeros.npy"
    np.save(zeros, np.eye(300, dtype=np.float32))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "cccl", "tune", "--seconds", "0.3", "--output", str(file), "--input", str(zeros),
         "--parameters", "1e6", "--compute", "10ms", "--codec", CODEC, "block_float4", "--json"],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(printed(done.stdout))
    assert not result["gains"] and any("99.7%" in reason for reason in result["reasons"])
    assert [row["bytes"] for row in result["measured"]][:3] == [1 << 10, 1 << 13, 1 << 16]
    assert {"none", CODEC, "block_float4"} <= set(result["measured"][0])
    assert "auto" in result["chunks"] and "65536" in result["chunks"]
    assert all(seconds > 0 for seconds in result["chunks"].values())
    cluster = plan.load_cluster(file)
    assert cluster.latency_us > 0 and cluster.link_gbit > 0 and cluster.ranks_per_host == 2
    assert 0 < cluster.stack_gbyte < 1000 and 0 <= cluster.interference < 100
    assert 1 <= cluster.ranks_per_core < 100
    assert cluster.codecs["block_float4"].bits == pytest.approx(4.125, rel=1e-3)
    assert cccl.Config.load(file).compression_type == "none"
    lines = [line for line in done.stderr.splitlines() if line.startswith("tune ")]
    assert re.match(r"tune 1/5: codecs$", lines[0]) and len(lines) == 5  # rank 0 alone tells


@pytest.mark.parametrize("share", [0.0, 0.8, 2.5])
def test_steps_tell_the_interference_that_they_were_made_with(share):
    steps = pytest.importorskip("cccl.torch._steps")
    cluster = Cluster(link_gbit=4.0, stack_gbyte=2.0, interference=share)
    job = _model.Job(64e6, compute_seconds=0.05, overlap=0.4, bucket_bytes=16e6)
    ways = {"none": _model.plain, CODEC: _model.flat(Rates(**RATES), 4)}
    made = {name: _model.step(cluster, job, way, 4) for name, way in ways.items()}
    seconds = {name: step.seconds for name, step in made.items()}
    alone = {name: step.communication for name, step in made.items()}
    found = steps.interference_of(cluster, ways, 4, job, seconds, alone)
    assert found == pytest.approx(share, abs=1e-9)
    # Noise that has steps shorter than what they are made of is no interference below 0.
    seconds = {name: value - 0.5 for name, value in seconds.items()}
    assert steps.interference_of(cluster, ways, 4, job, seconds, alone) == 0.0


def test_a_slow_link_is_measured_with_smaller_steps():
    steps = pytest.importorskip("cccl.torch._steps")
    ways = {"none": _model.plain, CODEC: _model.flat(Rates(**RATES), 4)}
    widths = [
        steps.affordable(Cluster(link_gbit=rate), ways, 4, 10.0) for rate in (0.001, 0.5, 1, 10)
    ]
    assert widths == sorted(widths) and widths[0] == steps.WIDTHS[-1]
    assert widths[-1] == steps.WIDTHS[0] and len(set(widths)) > 2


def test_the_work_of_a_call_is_its_busiest_threads_or_shared_out_among_cores():
    measuring = pytest.importorskip("cccl.torch.tune", reason="tune needs torch")

    def busy(seconds):
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:

        def call():
            for working in (one.submit(busy, 0.06), other.submit(busy, 0.02)):
                working.result()

        call()  # makes both threads
        together, busiest = (measuring._work_seconds(call, cores) for cores in (1.0, 100.0))
    assert together >= 0.08
    assert 0.06 <= busiest < together


def test_the_codecs_threads_come_back_after_their_work_was_measured():
    measuring = pytest.importorskip("cccl.torch.tune", reason="tune needs torch")
    threads = _core.codec_threads()
    with pytest.raises(KeyError), measuring._one_codec_thread():
        assert _core.codec_threads() == 1
        raise KeyError
    assert _core.codec_threads() == threads
