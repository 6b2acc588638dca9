"""The examples run as they stand, and show what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *options: str) -> str:
    """What it prints."""
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_logistic_regression_learns_as_well_compressed():
    pytest.importorskip("sklearn", reason="it has the data")
    rows = re.findall(
        r"(\w+) +loss ([\d.]+) +held-out accuracy ([\d.]+) +([\d.]+) MB",
        run("logistic_regression.py", "--steps", "60"),
    )
    assert [name for name, *_ in rows] == ["none", "block_float8", "block_float4"]
    losses, accuracies, sent = ([float(row[i]) for row in rows] for i in (1, 2, 3))
    assert min(accuracies) > 0.95
    assert max(losses) - min(losses) < 0.002
    assert sent[0] > 3.8 * sent[1] > 7 * sent[2]


@pytest.mark.parametrize("ranks", (1, 3))
def test_heat_is_exact_with_exact_halos_and_its_sum_within_the_bound(ranks):
    printed = run("heat.py", "--ranks", str(ranks), "--side", "100", "--steps", "20")
    exact, encoded = re.findall(r"halos \w+ +off by ([\d.e+-]+)", printed)
    assert float(exact) == 0
    assert (0 < float(encoded) < 0.05) == (ranks > 1)
    assert "at most" in printed


def test_an_example_runs_under_torchrun():
    """Which listens on MASTER_PORT itself."""
    pytest.importorskip("torch", reason="it has torchrun")
    port = ["--master-port", str(free_port())]  # the next one, which ranks take, is free too
    launcher = ["-m", "torch.distributed.run", *port, "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, str(EXAMPLES / "heat.py"), "--side", "50", "--steps", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("column sums") == 1


def test_an_example_runs_under_any_launcher():
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_port())}  # fmt: skip
    command = [sys.executable, str(EXAMPLES / "heat.py"), "--side", "50", "--steps", "5"]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "column sums" in said[0][0] and not said[1][0]
