"""The example of weights handed over runs as it stands: every rank checks every bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "hand_over.py"


def test_weights_arrive_in_two_thirds_of_the_bytes():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    options = ["--size", "tiny", "--steps", "3", "--repeats", "1"]
    done = subprocess.run(
        [*launcher, str(EXAMPLE), *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["ranks"] == 3
    assert 0.65 * found["plain_bytes"] < found["lossless_bytes"] < 0.72 * found["plain_bytes"]
