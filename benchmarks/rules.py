"""What rules cost: a GPT's gradients through DDP's hook, with and without rules or a budget.

    torchrun --nproc-per-node 2 benchmarks/rules.py --size large

A row for each configuration: collectives and MB sent in the last step, microseconds of processor
time that the hook takes of its thread per bucket (median), and milliseconds from the first bucket
to the last result (median of turns in random order).
"""

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, SIZES

NORMS = {"max_ndim": 1}
EMBEDDINGS = {"name": ["tokens.*", "positions.*"]}
AT_4 = {"compression_type": "block_float4"}
AT_8 = {"compression_type": "block_float8"}
SETS: dict[str, dict[str, Any]] = {
    "no rules": AT_4,
    "one way for all": {**AT_4, "rules": [{"name": "*", **AT_4}]},
    "norms, biases at 8": {**AT_4, "rules": [{**NORMS, **AT_8}]},
    "norms, biases plain; embeddings at 8": {
        **AT_4, "rules": [{**NORMS, "compression_type": "none"}, {**EMBEDDINGS, **AT_8}]
    },
    "error within 0.12": {**AT_8, "max_relative_error": 0.12},
}  # fmt: skip


class Way:
    """A model under one configuration."""

    def __init__(self, config: dict[str, Any], size: str):
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(GPT(SIZES[size]), gradient_as_bucket_view=True)
        state = cccl.torch.CompressionState(config=config, model=self.ddp)
        self.ddp.register_comm_hook(state, self._hook)
        self.host: list[float] = []
        self.whole: list[float] = []
        self.calls, self.sent = 0, 0
        self._begun = 0.0

    def _hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._begun = time.perf_counter()
        begun = time.thread_time()
        future = cccl.torch.compression_hook(state, bucket)
        self.host.append(time.thread_time() - begun)
        return future

    def step(self) -> None:
        cccl.reset_stats()
        text = torch.randint(0, 256, (1, 9))
        loss = self.ddp(text[:, :-1], text[:, 1:])
        dist.barrier()
        loss.backward()
        self.whole.append(time.perf_counter() - self._begun)
        total = cccl.stats()["total"]
        self.calls, self.sent = total["calls"], total["bytes_sent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="large", choices=SIZES)
    parser.add_argument("--steps", type=int, default=12, help="of which the first two warm up")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    ways = {name: Way(config, options.size) for name, config in SETS.items()}
    for number in range(options.steps):
        order = list(ways.values())
        random.Random(number).shuffle(order)  # alike on all ranks
        for way in order:
            way.step()
            if number < 2:
                way.host.clear()
                way.whole.clear()
    rows = [
        {
            "rules": name,
            "collectives": way.calls,
            "sent_mb": round(way.sent / 1e6, 2),
            "hook_cpu_us": round(1e6 * statistics.median(way.host), 1),
            "backward_ms": round(1e3 * statistics.median(way.whole), 1),
        }
        for name, way in ways.items()
    ]
    if dist.get_rank() == 0:
        for row in rows:
            print(json.dumps(row) if options.json else row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
