"""Runs Python blocks of the documentation as one rank: `snippets.py RANK WORLD BLOCKS.json`.

Each block runs in a process of its own, forked once torch is imported: that is what costs time.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp  # noqa: F401


def run(block: dict[str, Any], rank: int, world: int, out: Path) -> bool:
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(block["port"])}  # fmt: skip
    status = 1
    try:
        scope: dict[str, Any] = {"__name__": "__main__"}
        for part in "before", "code", "after":
            exec(compile(block[part], f"{block['name']}, {part}", "exec"), scope)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    rank, world, blocks = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    results = []
    for number, block in enumerate(json.loads(blocks.read_text())):
        out = Path(f"block-{number}.{rank}.txt")
        results.append(run(block, rank, world, out))
    Path(f"results.{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
