"""Prometheus text in files and on a port, and `python -m cccl watch`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest

import cccl
from cccl import _arrays, _core, monitor, watch
from cccl.__main__ import main

pytest.importorskip("prometheus_client", reason="monitoring needs prometheus-client")


def reduce(label: str = "bucket 0", times: int = 1) -> None:
    """All-reduces of 1000 values between two ranks in this process."""
    codec, number = _core.make_codec("block_float8", {}), _arrays.DTYPES["float32"].number
    ranks = [_core.Communicator(transport, 20.0) for transport in _core.loopback(2)]
    for _ in range(times):
        arrays = [np.ones(1000, np.float32) for _ in ranks]
        works = [
            rank.submit("all_reduce", a.ctypes.data, 1000, a.ctypes.data, 1000, number, codec,
                        codec, label=label)
            for rank, a in zip(ranks, arrays, strict=True)
        ]  # fmt: skip
        assert all(work.wait(20.0) for work in works)
    for rank in ranks:
        rank.close()


@pytest.fixture(autouse=True)
def _counted():
    cccl.reset_stats()
    reduce()
    yield
    cccl.reset_stats()


def samples(text: str) -> dict[tuple[str, str], float]:
    from prometheus_client.parser import text_string_to_metric_families as parse

    return {
        (sample.name, sample.labels.get("label", "")): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def test_the_text_has_what_the_statistics_have():
    found, row = samples(monitor.text()), cccl.stats()["rows"][0]
    assert row["calls"] > 0
    for name in monitor.COUNTERS:
        assert found[f"cccl_{name}_total", "bucket 0"] == pytest.approx(row[name])
    assert found["cccl_relative_error", "bucket 0"] == row["relative_error"]
    assert ("cccl_pool_bytes", "") in found


def test_a_file_is_written_at_once_kept_current_and_written_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with monitor.Monitor(tmp_path / "stats.{rank}.prom", interval=0.05) as running:
        file = tmp_path / "stats.3.prom"
        assert running.file == file
        assert samples(file.read_text())["cccl_calls_total", "bucket 0"] == 2
        reduce("bucket 1")
        until = time.monotonic() + 10
        while ("cccl_calls_total", "bucket 1") not in samples(file.read_text()):
            assert time.monotonic() < until
            time.sleep(0.01)
        running.interval = 1000.0
    with monitor.Monitor(file, interval=1000.0):
        reduce("bucket 2")
    assert ("cccl_calls_total", "bucket 2") in samples(file.read_text())
    assert 'rank="3"' in file.read_text()


def test_a_port_serves_this_machine_alone_until_it_stops():
    with monitor.Monitor(port=0) as running:
        url = f"http://127.0.0.1:{running.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as reply:
            assert "cccl_calls_total" in reply.read().decode()
        assert running._server.server_address[0] == "127.0.0.1"
        with pytest.raises(cccl.ConfigError, match=f"port {running.port}"):
            monitor.Monitor(port=running.port)
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)


def test_nothing_runs_unless_asked_for():
    code = (
        "import sys, threading, cccl; "
        "print(threading.active_count(), 'prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_a_disk_that_fills_up_is_a_warning(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    with caplog.at_level(logging.WARNING, "cccl"), monitor.Monitor(folder / "x.prom") as running:
        running.file = tmp_path / "missing" / "x.prom"
    assert "cannot write" in caplog.text


@pytest.mark.parametrize("arguments", [{}, {"file": "/missing/x"}, {"port": 70000},
                                       {"port": 0, "interval": 0.0}])  # fmt: skip
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(cccl.ConfigError):
        monitor.Monitor(**arguments)


def test_a_look_costs_less_than_1_percent_of_the_interval():
    for number in range(100):  # as many buckets
        reduce(f"bucket {number}")
    begun, times = time.thread_time(), 10
    for _ in range(times):
        monitor.text()
    assert (time.thread_time() - begun) / times < 0.01 * 10.0


def test_differences_count_from_a_reset():
    before = cccl.stats()
    assert monitor.since(before, before) == []
    reduce(times=3)
    (row,) = monitor.since(before, cccl.stats())
    assert row["calls"] == 6  # of two ranks
    cccl.reset_stats()
    reduce()
    before["rows"][0]["calls"] = 100
    assert monitor.since(before, cccl.stats())[0]["calls"] == 2


def test_watch_shows_rates_of_a_file_and_a_port_in_a_pipe(tmp_path):
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            reduce(times=10)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with monitor.Monitor(tmp_path / "x.prom", port=0, interval=0.05) as running:
            command = [sys.executable, "-m", "cccl", "watch", "--interval", "500ms", "--count", "1"]
            for source in str(running.file), str(running.port):
                done = subprocess.run([*command, source, "--json"], capture_output=True, text=True,
                                      timeout=60)  # fmt: skip
                assert done.returncode == 0, done.stderr
                (row,) = json.loads(done.stdout)["rows"]
                assert (
                    row["calls_per_second"] > 0 and row["ratio"] > 2 and row["label"] == "bucket 0"
                )
            done = subprocess.run([*command, str(running.port)], capture_output=True, text=True,
                                  timeout=60)  # fmt: skip
            head, line = done.stdout.splitlines()
            assert head.startswith("rank  label") and "block_float8" in line
    finally:
        stop.set()
        thread.join()


def test_where_nothing_happened_watch_shows_the_whole_job(tmp_path):
    (tmp_path / "x.prom").write_text(monitor.text())
    sample = watch.look([str(tmp_path / "x.prom")])
    (row,) = watch.rows(sample, sample, 2.0)
    assert row["calls_per_second"] == 0.0 and row["ms_per_call"] > 0 and row["ratio"] > 2


@pytest.mark.parametrize(
    ("text", "part"),
    [(None, "is the job running"), ("up 1\n", "no statistics of cccl"), ("{{{", "no Prometheus")],
)
def test_a_source_that_tells_nothing_ends_with_status_2(text, part, tmp_path, capsys):
    file = tmp_path / "x.prom"
    if text is not None:
        file.write_text(text)
    assert main(["watch", str(file), "--count", "1"]) == 2
    assert part in capsys.readouterr().err
