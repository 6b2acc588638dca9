"""What each rank holds, what the exact result is, and how far off a codec may be."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import cccl
import cccl.torch

EVERYTHING = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
KINDS = ("weights", "any bits", "one block", "nothing")  # of weights()


def gradient(rank: int, shape: Any, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The same on every rank that asks, on the default device."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        return _gradient(rank, shape, dtype, seed).to(device)


def _gradient(rank: int, shape: Any, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        other = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.complex(values, other).to(dtype)
    if not dtype.is_floating_point:
        return (values * 3).round().clamp(0, 9).to(dtype)
    return (values * torch.randn(shape, generator=generator).abs()).to(dtype)


def gathered_like_the_cpu(
    dtype: torch.dtype, count: int, config: cccl.Config, devices: tuple[str, str] = ("cpu", "cuda")
) -> torch.Tensor:
    """A reduce-scatter of `count` values for each rank, and the all-gather of its result, on both
    devices with the same bits; returns what was gathered."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = gradient(rank, count * world, dtype)
    parts = [torch.empty(count, dtype=dtype, device=d) for d in devices]
    gathered = [torch.empty_like(whole, device=d) for d in devices]
    for part, everything in zip(parts, gathered, strict=True):
        cccl.torch.reduce_scatter(part, whole.to(part.device), config=config)
        cccl.torch.all_gather(everything, part, config=config)
    assert digest(parts[1]) == digest(parts[0]), f"reduce_scatter {dtype} x {count}"
    assert digest(gathered[1]) == digest(gathered[0]), f"all_gather {dtype} x {count}"
    return gathered[0]


def error_of(call: Callable[[], Any]) -> cccl.Error | None:
    """What it raised, if it did."""
    try:
        call()
    except cccl.Error as error:
        return error
    return None


def check_spoiled(output: torch.Tensor, before: torch.Tensor, error: Exception | None) -> None:
    """NaN where a collective failed; as `before` where the error says that it did not begin."""
    if error is not None and "did not begin" in str(error):
        assert torch.equal(output, before), error
    else:
        assert output.isnan().all(), error


def sparse(rank: int, count: int, zeros: float) -> torch.Tensor:
    """Positive float32 values, a random share of them 0. The same on every rank that asks."""
    values = gradient(rank, count, torch.float32).abs() + 1e-3
    kept = torch.rand(count, generator=torch.Generator().manual_seed(rank)) >= zeros
    return torch.where(kept, values, torch.zeros(()))


def weights(rank: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """The same on every rank that asks. With NaN payloads and -0.0 where bits are anything."""
    generator = torch.Generator().manual_seed(rank)
    count = {"weights": 300_001, "any bits": 100_000, "one block": 4096, "nothing": 0}[kind]
    if kind == "any bits":
        raw = torch.randint(-128, 128, (count * dtype.itemsize,), generator=generator)
        return raw.to(torch.int8).view(dtype)
    values = torch.randn(count, dtype=torch.float64, generator=generator) * 0.02
    return values.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int8) if tensor.numel() else tensor


def digest(tensor: torch.Tensor) -> str:
    """Of the values' bits in logical order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def allowed(codec: str, parts: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """Bound of a two-leg mean of `parts`: what the legs state, and the sum's rounding."""
    coder = cccl.codec(codec, **options)
    dtype = parts[0].dtype
    if parts[0].numel() == 0:
        return torch.zeros(parts[0].shape, dtype=torch.float64)
    exact = sum(p.double() for p in parts) / len(parts)
    legs = sum(torch.from_numpy(coder.error_bound(p.contiguous())) for p in parts) / len(parts)
    # The second leg codes the erring mean of a whole shard: bound it by its largest value.
    largest = (exact.abs() + legs).amax() * (1 + 2.0**-7)
    legs = legs + float(coder.error_bound(largest.to(dtype).reshape(1))[0])
    step = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}.get(dtype, 2.0**-20)
    return legs + (exact.abs() + legs) * step + (2.0**-24 if dtype is torch.float16 else 0)


def check(found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    error = (found.double() - exact).abs()
    excess = (error - bound).max() if error.numel() else torch.tensor(0.0)
    assert excess <= 0, f"{what}: {excess:g} beyond its bound of up to {bound.max():g}"


def check_order_of_streams(
    exact: torch.Tensor, want: torch.Tensor, config: Any, turns: int
) -> None:
    """That an all_reduce of CUDA tensors sees what was written on one stream just before, and that
    its result, `want` of equal inputs, is there for another stream just after."""
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(turns):
        tensor = torch.full_like(exact, float("nan"))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # cycles
            tensor.copy_(exact)
            work = cccl.torch.all_reduce(tensor, config=config, async_op=True)
        with torch.cuda.stream(other):
            if turn % 2:
                work.wait()
                found = tensor.clone()
            else:
                found = work.get_future().wait().clone()
            assert torch.equal(found, want), turn


def assert_equal(per_rank: list[Any]) -> None:
    """Promise 1: what the ranks return (digests of their results) is the same."""
    assert all(found == per_rank[0] for found in per_rank), "ranks hold different bits"


def rows_of(collective: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The rows of `cccl.stats()` for this collective and dtype."""
    name = str(dtype).removeprefix("torch.")
    rows = [r for r in cccl.stats()["rows"] if (r["collective"], r["dtype"]) == (collective, name)]
    assert rows, f"no {collective} of {name} was counted"
    return rows


def parameters_digest(model: torch.nn.Module) -> str:
    parts = [digest(p) for p in model.parameters()]
    assert all(math.isfinite(float(p.detach().double().sum())) for p in model.parameters())
    return hashlib.sha256("".join(parts).encode()).hexdigest()
