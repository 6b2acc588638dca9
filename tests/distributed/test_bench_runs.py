"""What `python -m cccl bench` measures between ranks."""

from __future__ import annotations

import argparse
import csv
import json

import pytest
import torch

import cccl
from cccl import _bench_table, bench

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_commands(parser.add_subparsers())
    return parser.parse_args(["bench", *arguments])


def rows(collective: str) -> list[dict]:
    from cccl.torch import bench as module

    options = parsed("collective", "--collective", collective, "--repeats", "2")
    return [
        module._measure(module._config(codec, options), 30001, torch.device("cpu"), options)
        for codec in ("block_float8", "none")
    ]


@pytest.mark.parametrize("collective", COLLECTIVES[1:])
def test_bench_collective_measures_a_codec_beside_plain(ranks, collective):
    compressed, plain = ranks(2)(rows, collective)[0]  # rank 0 prints
    assert not compressed["plain"] and plain["plain"]
    assert compressed["bitwise_equal"] in (True, None)
    assert 8.1 < compressed["bits_per_element"] < 8.4
    assert compressed["relative_error"] < 0.02 and plain["relative_error"] < 1e-6


def table(*arguments: str) -> list[dict]:
    from cccl.torch import _bench_table as module

    return module.measure(parsed("table", *arguments), torch.device("cpu"))


def test_the_table_has_every_codec_collective_and_peer(ranks, tmp_path, capsys):
    """F104: what a first call costs stands apart from the percentiles of those behind it."""
    pytest.importorskip("matplotlib", reason="the table has a figure")
    options = ("--least", "1KiB", "--most", "16KiB", "--factor", "16", "--repeats", "3",
               "--seconds", "10")  # fmt: skip
    found, other = ranks(2)(table, *options)
    key = "collective", "way", "bytes"
    assert [[row[k] for k in key] for row in found] == [[row[k] for k in key] for row in other]
    codecs = {"none", *cccl.codec_names()}
    peers = {"PyTorch bf16 hook", "PyTorch fp16 hook", "PyTorch PowerSGD, rank 4"}
    for collective in COLLECTIVES:
        ways = {row["way"] for row in found if row["collective"] == collective}
        assert ways == codecs | (peers if collective == "all_reduce" else set())
    for row in found:
        assert 0 < row["least_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["first_ms"] > 0
    shown = parsed("table", "--output", str(tmp_path))
    _bench_table.show(found, shown)
    assert capsys.readouterr().out.startswith("collective")
    with (tmp_path / "bench.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found) == len(json.loads((tmp_path / "bench.json").read_text()))
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_what_takes_too_long_is_left_out_on_all_ranks(ranks):
    options = ("--collective", "all_reduce", "--codec", "identity", "--no-peers", "--least",
               "64KiB", "--most", "1GiB", "--factor", "16384", "--seconds", "0.01")  # fmt: skip
    for found in ranks(2)(table, *options):
        assert ["skipped" in row for row in found] == [False, True] * 2
        assert "s per call" in found[1]["skipped"]
