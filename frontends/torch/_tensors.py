"""What is asked of a tensor, and its memory, before it is sent."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError


def check_kind(tensor: Any, where: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{where} takes tensors, not {type(tensor).__name__}")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.is_nested:
        raise UnsupportedError(
            f"{where}: a {type(tensor).__name__} is no plain tensor; pass what it is made of, as "
            "DTensor.to_local()"
        )


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Without its graph; a sparse one itself, as what is written to a detached one stays there."""
    return tensor.detach() if tensor.layout is torch.strided else tensor


def copy_back(received: torch.Tensor, output: torch.Tensor) -> None:
    if received.data_ptr() != output.data_ptr():
        with torch.inference_mode(output.is_inference()):
            output.copy_(received)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex values as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def reach(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last + 1 address of its elements."""
    if tensor.numel() == 0:
        return 0, 0
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (steps + 1) * tensor.element_size()
