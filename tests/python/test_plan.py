"""`python -m cccl plan`: the model by hand, its limits, and the command."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

import cccl
from cccl import _model, plan
from cccl.__main__ import main
from cccl._model import Cluster, Job, Rates

FAST = Rates(8.125, 1e6, 1e6, 1e6)  # a codec that costs nothing
LINK = Cluster(link_gbit=8, efficiency=1.0, latency_us=0.0, message_us=0.0)  # 1 GB/s
COMMAND = ["plan", "--parameters", "4M", "--compute", "20ms", "--codec-rates", "20", "20", "20"]


def test_plain_is_a_ring_by_hand():
    cluster = Cluster(link_gbit=8, efficiency=0.5, latency_us=100)
    # 2 * 3/4 of 1 GB at 0.5 GB/s, and 6 hops.
    assert _model.plain(cluster, 1e9, 4).seconds == pytest.approx(3.0 + 6 * 100e-6)


def test_nccl_takes_a_tree_where_a_ring_has_more_hops():
    cluster = Cluster(backend="nccl", latency_us=10)
    many, moved = 1024, 2 * 1023 / 1024 * 8 / cluster.link
    assert _model.plain(cluster, 8, many).seconds == pytest.approx(20 * 10e-6 + moved)


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_without_costs_a_codec_gains_what_its_bits_promise(ranks):
    job = Job(1e9, 4, bucket_bytes=1e9)
    ways = [_model.plain, _model.flat(FAST, 4)]
    plainly, ours = (_model.step(LINK, job, way, ranks).seconds for way in ways)
    assert plainly / ours == pytest.approx(32 / 8.125, rel=1e-3)


def test_the_codec_is_the_limit_where_it_is_slower_than_the_link():
    rates = Rates(8.125, 1.0, 1.0, 1.0)  # GB/s: 1 GB takes 3.5 s with the sum encoded by two
    transfer = _model.flat(rates, 4)(LINK, 1e9, 2)
    assert transfer.work == pytest.approx(3.5 + 1e-6, abs=1e-3)
    assert transfer.seconds == pytest.approx(transfer.work * (1 + 1 / _model.CHUNKS), rel=0.01)


def test_ranks_that_share_a_host_share_its_link_unless_sums_are_hierarchical():
    shared = Cluster(link_gbit=8, efficiency=1.0, latency_us=0.0, message_us=0.0,
                     ranks_per_host=4, intra_gbyte=1e6)  # fmt: skip
    alone = _model.flat(FAST, 4)(LINK, 1e9, 16).seconds
    flat = _model.flat(FAST, 4)(shared, 1e9, 16).seconds
    between = _model.hierarchical(FAST, 4)(shared, 1e9, 16).seconds
    assert flat == pytest.approx(4 * (16 - 4) / (16 - 1) * alone, rel=0.01)
    assert between == pytest.approx(_model.flat(FAST, 4)(LINK, 1e9, 4).seconds, rel=0.01)


def test_a_step_hides_what_fits_and_never_the_last_bucket():
    job = Job(1e9, 4, compute_seconds=4.0, overlap=0.5, bucket_bytes=1e8)
    step = _model.step(LINK, job, _model.plain, 2)
    assert step.communication == pytest.approx(1.0)
    assert step.exposed == pytest.approx(0.1) and step.seconds == pytest.approx(4.1)
    job = Job(1e9, 4, compute_seconds=1.0, overlap=0.5, bucket_bytes=1e8)
    step = _model.step(LINK, job, _model.plain, 2)
    assert step.exposed == pytest.approx(0.5) and step.share == pytest.approx(1 / 1.5)


def test_interference_is_a_share_of_the_work_that_computation_meets():
    job = Job(1e9, 4, compute_seconds=1.0, overlap=0.5, bucket_bytes=1e8)
    cluster = Cluster(link_gbit=8, efficiency=1.0, latency_us=0.0, stack_gbyte=2.0,
                      interference=0.5)  # fmt: skip
    step = _model.step(cluster, job, _model.plain, 2)
    # 0.5 s of work for 1 s of communication, of which half is hidden.
    met = 0.5 * 0.5 * 0.5**_model.CONTENTION
    assert step.interference == pytest.approx(0.5 * met)
    assert step.seconds == pytest.approx(1.0 + 0.5 + 0.5 * met)
    # All of communication is work: computation meets all of it.
    busy = dataclasses.replace(cluster, stack_gbyte=1.0)
    assert _model.step(busy, job, _model.plain, 2).interference == pytest.approx(0.5 * 0.5)


def test_ranks_that_share_a_core_work_as_much_longer():
    rates = Rates(8.125, 1.0, 1.0, 1.0)
    alone = _model.flat(rates, 4)(LINK, 1e9, 4)
    shared = _model.flat(rates, 4)(dataclasses.replace(LINK, ranks_per_core=2.0), 1e9, 4)
    assert shared.work == pytest.approx(2 * alone.work)
    assert shared.seconds == pytest.approx(2 * alone.seconds)  # it is what limits


@pytest.mark.parametrize("ranks", [2, 16])
def test_at_the_break_even_rate_both_take_equally_long(ranks):
    cluster, job = Cluster(latency_us=20), Job(1e8, 4, 0.01)
    way = _model.flat(Rates(8.125, 5.0, 5.0, 5.0), 4)
    rate = _model.break_even_gbit(cluster, job, way, ranks)
    assert 1 < rate < 1000
    there = Cluster(latency_us=20, link_gbit=rate)
    plainly, ours = (_model.step(there, job, w, ranks).seconds for w in (_model.plain, way))
    assert ours == pytest.approx(plainly, rel=1e-2)


def test_the_break_even_is_the_first_where_a_gain_comes_back_on_faster_links():
    cluster = Cluster(stack_gbyte=1.0, interference=1.0, message_us=200.0)
    job = Job(64e6, 4, compute_seconds=0.25, overlap=0.7, bucket_bytes=16e6)
    way = _model.flat(Rates(8.125, 15.0, 15.0, 15.0), 4)

    def gain(gbit):
        there = dataclasses.replace(cluster, link_gbit=gbit)
        ours, plainly = (_model.step(there, job, w, 4).seconds for w in (way, _model.plain))
        return plainly - ours

    rate = _model.break_even_gbit(cluster, job, way, 4)
    assert gain(0.9 * rate) > 0 > gain(1.1 * rate) and gain(10.0) > 0


def test_a_codec_that_saves_no_bits_breaks_even_nowhere():
    way = _model.flat(Rates(32.0, 5.0, 5.0, 5.0), 4)
    assert _model.break_even_gbit(Cluster(), Job(1e8), way, 4) == 0.0


def test_one_rank_sends_nothing():
    found = plan.plan(1e6, Cluster(), compute_seconds=0.1, rates=FAST, ranks=[1])["rows"][0]
    assert found["plain"]["seconds"] == found["flat"]["seconds"] == 0.1 and found["gain"] == 1.0


def test_a_module_stands_for_its_parameters():
    torch = pytest.importorskip("torch", reason="plans for a torch module")
    model = torch.nn.Linear(100, 10)
    found = plan.plan(model, Cluster(), compute_seconds=0.1, rates=FAST, ranks=[2])
    assert found["job"]["gradient_bytes"] == 4 * 1010


def test_the_command_prints_2_to_4096_ranks_as_json(capsys):
    assert main([*COMMAND, "--link", "1gbit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in found["rows"]] == [2**power for power in range(1, 13)]
    assert found["rows"][0]["gain"] > 2
    assert found["job"]["gradient_bytes"] == 16e6 and found["codec"]["bits"] < 8.2


def test_the_command_prints_plain_lines_in_a_pipe():
    done = subprocess.run([sys.executable, "-m", "cccl", *COMMAND, "--ranks", "2", "8"],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert len(lines) == 4 and lines[1].startswith("ranks  plain ms") and "\x1b" not in done.stdout
    assert lines[3].split()[0] == "8" and lines[3].split()[5].endswith("x")


def test_status_1_where_nothing_is_gained(capsys):
    assert main([*COMMAND, "--link", "100tbit", "--ranks", "2", "4", "--json"]) == 1
    assert all(row["gain"] <= 1 for row in json.loads(capsys.readouterr().out)["rows"])


def test_a_profile_is_read_and_options_come_first(tmp_path, capsys):
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[cccl]\ncompression_type = "auto"\n[cluster]\nlink_gbit = 2.5\nlatency_us = 7.0\n'
        "[cluster.codecs.block_float8]\nbits = 8.1\nencode = 3.0\naccumulate = 4.0\ndecode = 5.0\n"
    )
    command = ["plan", "--parameters", "1e6", "--compute", "1ms", "--profile", str(file), "--json"]
    main([*command, "--latency", "1ms"])
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"]["link_gbit"] == 2.5 and found["cluster"]["latency_us"] == 1000
    assert (found["codec"]["encode"], found["codec"]["decode"]) == (3.0, 5.0)
    assert cccl.Config.load(file).compression_type == "auto"  # the same file has settings


def test_an_h200_stands_for_nccls_ranks():
    rates = plan.rates_of("block_float8", "bfloat16", Cluster(backend="nccl"))
    assert 2000 < rates.encode < 4200 and 2000 < rates.decode < 4200


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[cluster]\nlink_gbits = 1.0", "did you mean 'link_gbit'"),
        ("[cluster]\nlink_gbit = -1.0", "link_gbit = -1.0"),
        ("[cluster]\ninterference = -1.0", "interference = -1.0"),
        ("[cluster]\nranks_per_core = 0.5", "ranks_per_core = 0.5"),
        ("[cluster]\nefficiency = 0.0", "efficiency = 0.0"),
        ('[cluster]\nbackend = "mpi"', "gloo or nccl"),
        ("[cluster.codecs.block_float8]\nbits = 8.0", "block_float8"),
        ("[cluster.codecs]\nblock_float8 = 8.1", "cluster.codecs.block_float8 has no keys"),
        (
            "[cluster.codecs.block_float8]\nbits = 8.1\nencode = 3.0\naccumulate = 4.0\n"
            "decode = 5.0\ninterference = 1.0",
            "Run `python -m cccl tune` again",
        ),
        ('compression_type = "auto"', "no table [cluster]"),
        ("cluster =", "no valid TOML"),
    ],
)
def test_a_bad_profile_ends_in_one_line_and_status_2(text, part, tmp_path, capsys):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    assert main([*COMMAND, "--profile", str(file)]) == 2
    captured = capsys.readouterr()
    assert part in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--codec", "none"], "name one"),
        (["--codec", "zip"], "zip"),
        (["--dtype", "int32"], "int32"),
        (["--overlap", "1.5"], "overlap"),
        (["--ranks", "0"], "ranks"),
        (["--compute", "inf"], "compute"),
    ],
)
def test_bad_arguments_end_with_status_2(arguments, part, capsys):
    try:
        status = main(["plan", "--parameters", "1e6", "--compute", "1ms", *arguments])
    except SystemExit as error:  # argparse's own
        status = error.code
    assert status == 2 and part in capsys.readouterr().err


def test_the_articles_example():
    """7B parameters, bfloat16: 320 ms and 35 % become 280 ms and 22 % (docs/plan.md)."""
    cluster = Cluster(link_gbit=200, latency_us=5, backend="nccl", message_us=2, interference=1.9)
    rates = Rates(8.125, 400.0, 400.0, 400.0)
    found = plan.plan(7e9 / 8, cluster, compute_seconds=0.26, overlap=0.2, dtype="bfloat16",
                      rates=rates, ranks=[4])["rows"][0]  # fmt: skip
    for way, seconds, share in ("plain", 0.32, 0.35), ("flat", 0.28, 0.22):
        assert found[way]["seconds"] == pytest.approx(seconds, rel=0.01)
        assert found[way]["communication_share"] == pytest.approx(share, abs=0.005)
