"""The survey's workloads with real ranks: an entry of `python -m cccl converge run`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from one_run import validation_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import WORKLOADS, rate_at


class Training:
    """One run. WORKLOAD and STEPS in the environment say of what and how long."""

    def __init__(self, seed: int):
        steps = int(os.environ["STEPS"])
        index = torch.cuda.current_device() if dist.get_backend() == "nccl" else None
        device = torch.device("cpu") if index is None else torch.device("cuda", index)
        self._task = WORKLOADS[os.environ["WORKLOAD"]](seed, device, os.environ.get("DIGITS"))
        devices = None if index is None else [index]
        self.model = DistributedDataParallel(self._task.model, device_ids=devices)
        drawn = self._task.draw(steps, dist.get_world_size(), seed)
        self._batches = iter(drawn[:, dist.get_rank()])
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._task.optimizer, lambda step: rate_at(step, steps)
        )

    def step(self) -> float:
        """Trains on one batch, as the survey does."""
        loss = self._task.loss(self.model, *self._task.take(next(self._batches)))
        self._task.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._task.optimizer.step()
        self._schedule.step()
        return float(loss)

    def evaluate(self) -> float:
        """The loss on what is held out."""
        return validation_loss(self._task)
