"""The ways that gradients go, by name: settings of `cccl.Config`, or what stands beside CCCL."""

from __future__ import annotations

import dataclasses
from typing import Any

PLAIN = "plain"
WIDTHS = tuple(f"block_float{bits}" for bits in (2, 3, 4, 5, 6))  # of noise budgets, and 8


@dataclasses.dataclass(frozen=True)
class Variant:
    """`kind`: "plain", "bf16" and "powersgd" as PyTorch's hooks have them, or "cccl" by
    `settings`."""

    kind: str
    group: str  # of the table and the figures
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def _cccl(group: str, codec: str, **settings: Any) -> Variant:
    return Variant("cccl", group, {"compression_type": codec, **settings})


def _noise(share: float) -> Variant:
    return _cccl("noise budget", "block_float8", max_noise_share=share, adaptive_codecs=WIDTHS)


_FEEDBACK = {"error_feedback": "both"}
_ROTATED = {"rotation": "hadamard"}
_SPARSE = "sparse"

VARIANTS: dict[str, Variant] = {
    PLAIN: Variant("plain", PLAIN),
    "bf16 hook": Variant("bf16", "PyTorch's hooks"),
    "8 bits": _cccl("fixed", "block_float8"),
    "6 bits": _cccl("fixed", "block_float6"),
    "5 bits": _cccl("fixed", "block_float5"),
    "4 bits": _cccl("fixed", "block_float4"),
    "3 bits": _cccl("fixed", "block_float3"),
    "2 bits": _cccl("fixed", "block_float2"),
    "4 bits best": _cccl("level and rotation", "block_float4", level="best"),
    "3 bits best": _cccl("level and rotation", "block_float3", level="best"),
    "4 bits rotated": _cccl("level and rotation", "block_float4", **_ROTATED),
    "3 bits rotated": _cccl("level and rotation", "block_float3", **_ROTATED),
    "4 bits feedback": _cccl("error feedback", "block_float4", **_FEEDBACK),
    "3 bits feedback": _cccl("error feedback", "block_float3", **_FEEDBACK),
    "2 bits feedback": _cccl("error feedback", "block_float2", **_FEEDBACK),
    "3 bits feedback sender": _cccl("error feedback", "block_float3", error_feedback="sender"),
    "3 bits feedback 0.9": _cccl("error feedback", "block_float3", residual_decay=0.9, **_FEEDBACK),
    "top 10 %": _cccl("sparse", _SPARSE, top_k=0.1),
    "top 10 % feedback": _cccl("sparse", _SPARSE, top_k=0.1, **_FEEDBACK),
    "top 1 %": _cccl("sparse", _SPARSE, top_k=0.01),
    "top 1 % feedback": _cccl("sparse", _SPARSE, top_k=0.01, **_FEEDBACK),
    "PowerSGD rank 4": Variant("powersgd", "PyTorch's hooks"),
    "error 0.12": _cccl("budget", "block_float8", max_relative_error=0.12),
    "error 0.25": _cccl("budget", "block_float8", max_relative_error=0.25),
    "target 4.2 bits": _cccl("budget", "block_float8", target_bits=4.2),
    "noise 0.01": _noise(0.01),
    "noise 0.03": _noise(0.03),
    "noise 0.1": _noise(0.1),
    "noise 0.3": _noise(0.3),
    "noise 1": _noise(1.0),
    "diff 4 bits": _cccl("diff", "diff(block_float4)"),
    "diff 3 bits": _cccl("diff", "diff(block_float3)"),
}
