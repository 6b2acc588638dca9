"""How far the gradients that DDP got from compressed collectives are from the exact means."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ._ddp import CompressionState


@contextlib.contextmanager
def layer_errors(model: torch.nn.Module) -> Iterator[dict[str, float]]:
    """Of the step inside: for each parameter that the hook sent, the norm of its gradient's error
    over the norm of the exact mean, filled in at the end. All ranks enter and leave it together.
    Holds copies of the gradients meanwhile."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen: list[tuple[dict[str, int], torch.Tensor, torch.Tensor]] = []

    def observe(bucket: dist.GradBucket) -> Callable[[torch.Tensor], torch.Tensor]:
        sizes = {
            names.get(parameter, f"bucket {bucket.index()}, {number}"): parameter.numel()
            for number, parameter in enumerate(bucket.parameters())  # of another model too
        }
        before = bucket.buffer().clone()

        def observed(result: torch.Tensor) -> torch.Tensor:
            seen.append((sizes, before, result.clone()))
            return result

        return observed

    found: dict[str, float] = {}
    CompressionState.observer = observe
    try:
        yield found
    finally:
        CompressionState.observer = None
    seen.sort(key=lambda bucket: list(bucket[0]))  # they end in any order: ranks agree on one
    for sizes, before, after in seen:
        exact = before.double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        parts = (whole.double().split(list(sizes.values())) for whole in (exact, after))
        for name, right, got in zip(sizes, *parts, strict=True):
            power, error = right.norm(), (got - right).norm()
            found[name] = float(error / power) if power > 0 else 0.0
