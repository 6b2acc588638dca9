"""Whether the ranks still train one model."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from ..errors import MismatchError
from ._groups import resolve

_MOST_NAMED = 5  # parameters


def digests(model: torch.nn.Module) -> dict[str, str]:
    """SHA-256 of dtype, shape and bits of each parameter."""
    return {name: _digest(parameter) for name, parameter in model.named_parameters()}


def digest(model: torch.nn.Module) -> str:
    """Of all of them."""
    return hashlib.sha256(repr(digests(model)).encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(values.numpy())
    return found.hexdigest()


def check_replicas(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compares every bit of every parameter of `model` over the ranks of `group`; all call it.

    For replicas, as DistributedDataParallel has them; not for sharded models. Ranks drift apart
    where each does something of its own with averaged gradients: another loss scale, another
    learning rate, a step that one of them skips. Call it every few hundred steps, or in a test: it
    copies the parameters to the host and hashes them, at about a second for a gigabyte.

    Raises `MismatchError` on all ranks, with the parameters that differ and the ranks where they
    differ from rank 0's; None for a rank outside the group, as in c10d.
    """
    members = resolve(group)
    if members is None:
        return
    everyone: list[Any] = [None] * members.size()
    dist.all_gather_object(everyone, digests(model), group)
    first = everyone[0]
    others = [rank for rank, found in enumerate(everyone) if found.keys() != first.keys()]
    if others:
        raise MismatchError(f"ranks {others} have other parameters than rank 0: is it one model?")
    differ = {
        name: ranks
        for name in first
        if (ranks := [r for r, found in enumerate(everyone) if found[name] != first[name]])
    }
    if differ:
        named = ", ".join(f"{name} (ranks {differ[name]})" for name in [*differ][:_MOST_NAMED])
        raise MismatchError(
            f"{len(differ)} of {len(first)} parameters are not those of rank 0: {named}. Ranks do "
            "different things with the averaged gradients (a loss scale, a learning rate or a "
            "skipped step of their own); go back to a checkpoint and make them do the same"
        )
