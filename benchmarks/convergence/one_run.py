"""One training with simulated ranks: what it lost, how large gradients were, what was sent."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch
from legs import queue_of
from means import BUCKET, Layout, mean_of
from torch import Tensor, nn
from variants import VARIANTS
from workloads import WORKLOADS, Task, rate_at

_CLIP = 1.0  # norm of the mean gradient
_WARM = 3  # passes before a capture


class Settings(NamedTuple):
    """What all runs of a survey share."""

    steps: int = 600
    world: int = 4
    rate: float = 1.0  # factor of the learning rate
    looks: int = 6
    bucket_bytes: int = BUCKET
    device: str = "cpu"
    digits: str | None = None
    until: float = float("inf")  # of time.time()


class Gradients:
    """Of all ranks, a row each, at the same weights. On a GPU their passes are one CUDA graph."""

    def __init__(self, task: Task, layout: Layout, world: int, batches: Tensor):
        self.task, self._batches = task, batches
        self._parameters = [place.parameter for place in layout.places]
        device = batches.device
        self.rows = torch.zeros(world, layout.size, device=device)
        self.losses = torch.zeros(world, device=device)
        self._views = [[place.within(row) for place in layout.places] for row in self.rows]
        self._inputs, self._targets = task.take(batches[0])
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    def at(self, step: int) -> Tensor:
        """Of that step's batches."""
        inputs, targets = self.task.take(self._batches[step])
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        if self._graph is None:
            self._pass()
        else:
            self._graph.replay()
        return self.rows

    def _pass(self) -> None:
        for rank, views in enumerate(self._views):
            loss = self.task.loss(self.task.model, self._inputs[rank], self._targets[rank])
            found = torch.autograd.grad(loss, self._parameters)
            torch._foreach_copy_(views, list(found))
            self.losses[rank].copy_(loss.detach())

    def _capture(self) -> None:
        aside, current = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM):
                self._pass()
        current.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._pass()


def train(workload: str, way: str, seed: int, settings: Settings) -> dict[str, Any] | None:
    """The record of a run; None where time ran out."""
    begun = time.perf_counter()
    device, (steps, world) = torch.device(settings.device), settings[:2]
    task = WORKLOADS[workload](seed, device, settings.digits)
    layout = Layout(task.model, settings.bucket_bytes)
    gradients = Gradients(task, layout, world, task.draw(steps, world, seed))
    mean = torch.zeros(layout.size, device=device)
    for place in layout.places:
        place.parameter.grad = place.within(mean)
    reduce = mean_of(VARIANTS[way], layout, gradients.rows)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        task.optimizer, lambda step: settings.rate * rate_at(step, steps)
    )
    losses, norms = torch.zeros(2, steps, device=device)
    looks_at = {max(1, steps * look // settings.looks) for look in range(1, settings.looks + 1)}
    bits, looks = [], []
    for step in range(steps):
        if time.time() > settings.until:
            return None
        rows = gradients.at(step)
        torch.mean(gradients.losses, 0, out=losses[step])
        bits.append(reduce(step, rows, mean))
        norms[step] = nn.utils.clip_grad_norm_(task.model.parameters(), _CLIP)
        task.optimizer.step()
        schedule.step()
        if step + 1 in looks_at:
            if (queue := queue_of(rows.device)) is not None:
                queue.synchronize()
            looks.append({"step": step + 1, "validation": validation_loss(task)})
    return {
        "workload": workload,
        "way": way,
        "seed": seed,
        "final": looks[-1]["validation"],
        "looks": looks,
        "losses": _short(losses.tolist()),
        "norms": _short(norms.tolist()),
        "bits": _short(bits),
        "bits_per_value": statistics.mean(bits),
        "parameters": layout.numel,
        "buckets": len(layout.buckets),
        "seconds": time.perf_counter() - begun,
    }


@torch.no_grad()
def validation_loss(task: Task) -> float:
    """Mean over what is held out."""
    total = sum(task.loss(task.model, *batch) * len(batch[0]) for batch in task.held_out)
    return float(total) / sum(len(batch[0]) for batch in task.held_out)


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
