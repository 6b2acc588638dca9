"""Every Python block of the README and of docs/ runs on two gloo ranks (F082)."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the scripts use torch")
ROOT = Path(__file__).parents[2]
WHOLE = ("README.md", "docs/guide.md")  # their blocks stand alone
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (.*?) -->\n+)?```python\n(.*?)```", re.DOTALL)
# What fragments of scripts may take for granted.
BEFORE = """
import os
import torch
import torch.distributed as dist
import cccl
import cccl.torch
dist.init_process_group("gloo")
rank, step = dist.get_rank(), 0
gradient = torch.randn(1000)
model = torch.nn.Linear(64, 64)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
dist.barrier()
"""
AFTER = "dist.barrier()\ndist.destroy_process_group()\n"


def blocks() -> list[dict[str, str]]:
    found = []
    for file in FILES:
        name, text = str(file.relative_to(ROOT)), file.read_text()
        for number, match in enumerate(BLOCK.finditer(text)):
            whole = name in WHOLE
            found.append({
                "name": f"{name} {number}", "reason": match[1], "code": match[2],
                "before": "" if whole else BEFORE, "after": "" if whole else AFTER,
            })  # fmt: skip
    return found


BLOCKS = blocks()
RUN = [block for block in BLOCKS if block["reason"] is None]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[tuple[bool, str]]]:
    """Of each block, on each rank: whether it ran, and what it printed."""
    folder, free = tmp_path_factory.mktemp("snippets"), []
    for _ in range(2 * len(RUN)):  # the README takes the port behind MASTER_PORT too
        free.append(socket.socket())
        free[-1].bind(("localhost", 0))
    ports = sorted(s.getsockname()[1] for s in free)
    for one in free:
        one.close()
    listed = [block | {"port": ports[2 * i]} for i, block in enumerate(RUN)]
    (folder / "blocks.json").write_text(json.dumps(listed))
    (folder / "cluster.toml").write_text('[cccl]\ncompression_type = "auto"\n')
    script = Path(__file__).with_name("snippets.py")
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), "2", "blocks.json"], cwd=folder)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=280) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    results = [json.loads((folder / f"results.{rank}.json").read_text()) for rank in range(2)]
    return {
        block["name"]: [
            (results[rank][i], (folder / f"block-{i}.{rank}.txt").read_text()) for rank in range(2)
        ]
        for i, block in enumerate(RUN)
    }


@pytest.mark.parametrize("name", [block["name"] for block in RUN])
def test_block_runs(name, outcomes):
    code = next(block["code"] for block in RUN if block["name"] == name)
    for use, module in ("cccl.monitor", "prometheus_client"), (".tensorboard", "tensorboard"):
        if use in code and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    for ran, output in outcomes[name]:
        assert ran, output
    if "cccl.report()" in code:
        assert "block_float8" in outcomes[name][0][1]


def test_only_what_needs_other_machines_is_not_run():
    left = [block for block in BLOCKS if block["reason"] is not None]
    assert len(left) <= 3 and len(RUN) > 15
    for block in left:
        compile(block["code"], block["name"], "exec")
