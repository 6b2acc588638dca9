"""The demo's GPT for `python -m cccl converge run examples/converge_gpt.py:Training`."""

from __future__ import annotations

from typing import Any

import corpus
import torch
import torch.distributed as dist
from gpt import GPT, SIZES, device_of_group
from torch.nn.parallel import DistributedDataParallel

WINDOWS = 64  # of held-out text, over all ranks


class Training:
    """One run; every rank draws batches of its own from the same text."""

    def __init__(self, seed: int):
        self.size, self.device = SIZES["small"], device_of_group()
        self.model = DistributedDataParallel(GPT(self.size).to(self.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.text, held_out = corpus.load()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.held_out = [
            part[rank::world].to(self.device)
            for part in corpus.evenly(held_out, WINDOWS, self.size.context)
        ]
        self.generator = torch.Generator().manual_seed(1000 * seed + rank)

    def step(self) -> float:
        """Trains on one batch."""
        batch = corpus.sample(self.text, self.size.batch, self.size.context, self.generator)
        loss = self.model(*(part.to(self.device) for part in batch))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on this rank's part of the held-out text."""
        parts = zip(*(part.split(self.size.batch) for part in self.held_out), strict=True)
        model = self.model.module
        total = sum(model(tokens, targets).item() * len(tokens) for tokens, targets in parts)
        return total / len(self.held_out[0])

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
