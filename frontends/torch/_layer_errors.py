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
    seen: list[tuple[list[str], list[torch.Tensor], list[torch.Tensor]]] = []

    def observe(bucket: dist.GradBucket) -> Callable[[], None]:
        views = bucket.gradients()
        before = [view.clone() for view in views]
        of = [names.get(parameter, "?") for parameter in bucket.parameters()]
        return lambda: seen.append((of, before, [view.clone() for view in views]))

    found: dict[str, float] = {}
    CompressionState.observer = observe
    try:
        yield found
    finally:
        CompressionState.observer = None
    seen.sort(key=lambda bucket: bucket[0])  # they end in any order; ranks must agree on one
    for of, before, after in seen:
        exact = torch.cat([part.double().flatten() for part in before])
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        for name, right, got in zip(
            of, exact.split([part.numel() for part in before]), after, strict=True
        ):
            power, error = right.norm(), (got.double().flatten() - right).norm()
            found[name] = float(error / power) if power > 0 else 0.0
