"""`python -m cccl bench`: one JSON object per line, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import cccl
from cccl import _bench_peers, _bench_table, _core
from cccl.__main__ import main

CODEC_FIELDS = {
    "codec", "device", "dtype", "numel", "bits_per_element", "nmse",
    "encode_gbps", "decode_gbps", "copy_gbps",
}  # fmt: skip
COLLECTIVE_FIELDS = {
    "codec", "world_size", "numel", "baseline_ms", "ms", "speedup", "payload_bytes",
    "bits_per_element", "relative_error", "bitwise_equal", "plain",
}  # fmt: skip


@pytest.mark.parametrize("name", list(cccl.codec_names()))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_bench_codec_measures_every_codec(name, dtype, capsys):
    """F100"""
    command = ["bench", "codec", "--codec", name, "--device", "cpu", "--dtype", dtype]
    assert main([*command, "--numel", "40000", "--repeats", "2", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row.keys() >= CODEC_FIELDS
    assert row["codec"] == name and row["dtype"] == dtype and row["numel"] == 40000
    assert row["nmse"] < {"block_float3": 0.06, "block_float2": 0.3}.get(name, 0.02)
    assert min(row["encode_gbps"], row["decode_gbps"], row["copy_gbps"]) > 0


@pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")
def test_bench_codec_on_a_device_measures_what_runs_there_and_says_what_does_not(capsys):
    pytest.importorskip("torch", reason="the benchmark's memory and events")
    command = ["bench", "codec", "--device", "cuda", "--codec", "all", "--numel", "40000"]
    assert main([*command, "--repeats", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["codec"] for row in rows] == list(cccl.codec_names())
    for row in rows:
        assert "CPU" in row["skipped"] if "skipped" in row else row["encode_of_copy"] > 0
    assert sum("skipped" in row for row in rows) < len(rows) / 2


@pytest.mark.parametrize("name", ["bitsandbytes", "torchft", "deepspeed"])
def test_a_library_that_is_not_installed_is_named_with_how_to_get_it(name):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    assert _bench_peers.load(name) == (None, f"{name} is not installed: pip install {name}")


def test_a_library_that_does_not_load_is_reported_with_its_own_reason(tmp_path):
    """An installation without what it needs, or whose own code fails: the others still load."""
    for name, text in [
        ("torchft", "import a_module_that_is_nowhere"),
        ("bitsandbytes", "print('hello')\nraise OSError('\\n no library\\n at all')"),
    ]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    program = (
        "import json; from cccl import _bench_peers as peers\n"
        "print(json.dumps([peers.load(name)[1] for name in ('torchft', 'bitsandbytes')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout) == [
        "a_module_that_is_nowhere is not installed: pip install torchft",
        "OSError: no library",
    ]
    assert "hello" in done.stderr


@pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")
def test_bench_peers_measures_each_library_or_says_why_not(capsys):
    pytest.importorskip("torch", reason="the benchmark's memory and events")
    command = ["bench", "codec", "--device", "cuda", "--codec", "block_float8", "--peers", "--json"]
    assert main([*command, "--numel", "262144", "--dtype", "float16", "--repeats", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1:]
    assert {row["peer"] for row in rows} == {peer.name for peer in _bench_peers._PEERS}
    for peer in _bench_peers._PEERS:
        measured = [row for row in rows if row["peer"] == peer.name]
        if reason := _bench_peers.load(peer.library)[1]:
            assert [row["skipped"] for row in measured] == [reason]
            continue
        assert [row["block_size"] for row in measured] == [128, _bench_peers.WIDE_BLOCK]
        for row in measured:
            assert min(row["encode_of_copy"], row["decode_of_copy"]) > 0, row
            assert row["nmse"] < (0.03 if row["bits_per_element"] < 5 else 2e-3)
            assert row.get("reduce_nmse", 0) < (0.06 if row["bits_per_element"] < 5 else 4e-3)


def test_bench_codec_reads_gradients_from_a_file(tmp_path, capsys):
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    np.save(tmp_path / "grads.npy", values)
    command = ["bench", "codec", "--codec", "block_fp16_to_4bit", "--repeats", "1", "--json"]
    assert main([*command, "--input", str(tmp_path / "grads.npy")]) == 0
    row = json.loads(capsys.readouterr().out)
    decoded = cccl.decode(cccl.codec("block_float4").encode(values))
    nmse = np.square(decoded - values, dtype=np.float64).sum() / np.square(values).sum()
    assert row["numel"] == 5000 and row["nmse"] == pytest.approx(nmse, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--codec", "zip"], "zip"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--dtype", "int32"], "int32"),
        (["--numel", "0"], "numel"),
        (["--input", "missing.npy"], "missing.npy"),
        (["--block-size", "100"], "block_size"),
        (["--peers"], "--device cuda"),
    ],
)
def test_bad_arguments_end_in_one_line_and_status_2(arguments, text, capsys):
    assert main(["bench", "codec", *arguments]) == 2
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.count("\n") == 1


def test_bench_collective_without_ranks_says_how_to_start_it(monkeypatch, capsys):
    pytest.importorskip("torch", reason="bench collective needs torch")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "collective"]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_bench_collective_prints_one_row_per_codec():
    """The other collectives: tests/distributed/test_bench_runs.py."""
    pytest.importorskip("torch", reason="bench collective needs torch")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments = ["--codec", "block_float8", "none", "--numel", "30001", "--repeats", "2", "--json"]
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", "-m", "cccl", "bench", "collective", *arguments],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compressed, plain = (json.loads(line) for line in done.stdout.splitlines() if "{" in line)
    assert compressed.keys() >= COLLECTIVE_FIELDS
    assert compressed["world_size"] == 2
    assert not compressed["plain"] and plain["plain"]
    assert compressed["bitwise_equal"] and 8.1 < compressed["bits_per_element"] < 8.4
    assert compressed["relative_error"] < 0.02 and plain["relative_error"] < 1e-6


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75), ("broadcast", 1.0)],
)
def test_bandwidths_are_those_of_nccl_tests(collective, factor):
    """Four ranks, 1 GB in half a second; percentiles of 0.1, 0.2 ... 1.1 s."""
    row = _bench_table.timed(collective, 10**9, 4, [0.5] * 3)
    assert row["algorithm_gbps"] == pytest.approx(2.0)
    assert row["bus_gbps"] == pytest.approx(2.0 * factor)
    row = _bench_table.timed(collective, 10**9, 4, [i / 10 for i in range(11, 0, -1)])
    assert [row[key] for key in ("least_ms", "p50_ms", "p90_ms", "p99_ms")] == pytest.approx(
        [100, 600, 1000, 1090]
    )


def test_the_tables_sizes_go_from_1_kib_to_1_gib():
    found = _bench_table.sizes(_bench_table.LEAST, _bench_table.MOST, 4)
    assert found[0] == 1 << 10 and found[-1] == 1 << 30 and len(found) == 11


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--factor", "1"], "factor"),
        (["--least", "2MiB", "--most", "1MiB"], "least"),
        (["--repeats", "2"], "repeats"),
    ],
)
def test_a_table_that_cannot_be_measured_is_refused(arguments, text, capsys):
    assert main(["bench", "table", *arguments]) == 2
    assert text in capsys.readouterr().err
