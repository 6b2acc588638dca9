"""Steps whose gradients are suddenly huge or not finite: what follows is no worse for it."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, gradient, parameters_digest
from test_ddp import mlp, plain

import cccl
import cccl.torch


def step(ddp, number: int, scale: float = 1.0, odd_rank_only: bool = False) -> list[str]:
    """The bits of the gradients."""
    ddp.zero_grad()
    batch = gradient(dist.get_rank(), (8, 24), torch.float32, seed=number)
    if not odd_rank_only or dist.get_rank() == 1:
        batch = batch * scale
    ddp(batch).square().mean().backward()
    return [digest(p.grad) for p in ddp.parameters()]


def ways_of_steps(ddp, scales: dict[int, float], steps: int, odd: bool = False) -> list[str]:
    found = []
    for number in range(steps):
        cccl.reset_stats()
        step(ddp, number, scales.get(number, 1.0), odd)
        (row,) = cccl.stats()["rows"]
        found.append("plain" if row["plain"] else row["codec"].replace("block_float", "")[0])
    return found


def _guarded(scale, spike_type, caught):
    ddp = plain(mlp)
    config = {"compression_type": "block_float4", "spike_factor": 20, "spike_steps": 3,
              "spike_type": spike_type}  # fmt: skip
    cccl.torch.compress(ddp, config)
    handler = logging.Handler()
    told: list[str] = []
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("cccl").addHandler(handler)
    try:
        found = ways_of_steps(ddp, {12: scale}, 18, odd=True)
    finally:
        logging.getLogger("cccl").removeHandler(handler)
    assert len(told) == caught
    if caught:
        assert told[0].startswith("step 12: the largest mean gradient was ")
        assert told[0].endswith(f"the next 3 steps go as {spike_type}")
    return found


@pytest.mark.parametrize("spike_type", ["none", "block_float8"])
@pytest.mark.parametrize("scale", [1e3, float("inf"), float("nan")])
def test_the_steps_after_a_spike_of_one_rank_are_finer_on_all(ranks, scale, spike_type):
    finer = "plain" if spike_type == "none" else "8"
    for found in ranks(3)(_guarded, scale, spike_type, 1):
        assert found == ["4"] * 13 + [finer] * 3 + ["4"] * 2


def test_what_gradients_do_as_a_rule_is_no_spike(ranks):
    for found in ranks(2)(_guarded, 1.5, "none", 0):
        assert found == ["4"] * 18


def _looked_at():
    ddp, watched = plain(mlp), plain(mlp)
    cccl.torch.compress(ddp, {"compression_type": "block_float4"})
    cccl.torch.compress(watched, {"compression_type": "block_float4", "spike_factor": 1000.0})
    for number in range(10):
        assert step(ddp, number) == step(watched, number)
    return parameters_digest(watched)


def test_looking_changes_nothing(ranks):
    assert_equal(ranks(2)(_looked_at))


def _no_memory(scale):
    calm, spiked = plain(mlp), plain(mlp)
    for ddp in (calm, spiked):
        cccl.torch.compress(ddp, {"compression_type": "block_float4"})
    for number in range(6):
        before = step(calm, number), step(spiked, number, scale if number == 3 else 1.0)
        assert (before[0] == before[1]) == (number != 3)


@pytest.mark.parametrize("scale", [1e4, float("inf")])
def test_codecs_without_memory_carry_nothing_on_from_a_spike(ranks, scale):
    """Without any setting: the steps behind it have the bits that they have without it."""
    ranks(2)(_no_memory, scale)


def _relative_errors():
    exact, ddp = plain(mlp), plain(mlp)
    cccl.torch.compress(ddp, {"compression_type": "block_float4"})
    found = []
    for scale in (1.0, 1e6):
        for model in (exact, ddp):
            step(model, 0, scale)
        pairs = list(zip(exact.parameters(), ddp.parameters(), strict=True))
        far = sum(float((a.grad - b.grad).square().sum()) for a, b in pairs)
        found.append((far / sum(float(a.grad.square().sum()) for a, _ in pairs)) ** 0.5)
    return found


def test_a_spike_itself_is_as_exact_as_any_step(ranks):
    for usual, spike in ranks(2)(_relative_errors):
        assert 0.01 < spike < 1.5 * usual


def _feedback(guarded, scale):
    ddp = plain(mlp)
    config = {"compression_type": "block_float2", "error_feedback": "both",
              **({"spike_factor": 20, "spike_steps": 2} if guarded else {})}  # fmt: skip
    state = cccl.torch.compress(ddp, config)
    norms = []
    for number in range(16):
        step(ddp, number, scale if number == 12 else 1.0)
        norms.append(float(sum(p.grad.square().sum() for p in ddp.parameters())) ** 0.5)
        if number == 13 and guarded:
            assert state.store.nbytes == 0, "plain, and nothing is kept"
    return max(norms[13:]) / max(norms[:12]), parameters_digest(ddp)


def test_a_guard_forgets_residuals_that_a_spike_left(ranks):
    """Without it what the codec lost of the spike is added to the next gradients, unclipped."""
    pool = ranks(2)
    without, guarded = pool(_feedback, False, 1e3), pool(_feedback, True, 1e3)
    assert_equal(guarded)
    assert without[0][0] > 20
    assert guarded[0][0] < 2


def _non_finite_feedback():
    ddp = plain(mlp)
    cccl.torch.compress(ddp, {"compression_type": "block_float2", "error_feedback": "both"})
    norms = []
    for number in range(6):
        step(ddp, number, float("nan") if number == 3 else 1.0, odd_rank_only=True)
        norms.append(float(sum(p.grad.square().sum() for p in ddp.parameters())) ** 0.5)
    assert norms[3] != norms[3]
    return max(norms[4:]) / max(norms[:3])


def test_a_step_that_is_not_finite_leaves_residuals_as_they_were(ranks):
    """Without a guard too."""
    assert all(ratio < 2 for ratio in ranks(2)(_non_finite_feedback))
