"""Codecs that ranks choose by the error in the means that they hold, or by a number of bits."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest
from test_ddp_rules import SMALL_ONES, gpt, gradients, learn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl import _members

WIDEST = {"compression_type": "block_float8", "strict": True}
COUNT = 30_000  # values of a parameter: each is a bucket of its own
CODECS = [f"block_float{bits}" for bits in (3, 4, 5, 6, 8)]
SHAPES = {"uniform": 0, "normal": 1, "cubes": 3}  # powers of normal values; 0: none of them


class Given(nn.Module):
    """Whose gradients are what it is given."""

    def __init__(self, parameters: int = 3):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(COUNT) for _ in range(parameters))

    def forward(self, values: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(self.layers, values, strict=True)
        return torch.stack([(layer * given).sum() for layer, given in pairs]).sum()


def given(parameters: int = 3, **options) -> DistributedDataParallel:
    return DistributedDataParallel(Given(parameters), bucket_cap_mb=0.1, **options)


def values(kind: str, rank: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if kind == "uniform":
        return (torch.rand(COUNT, generator=generator) * 2 - 1) * scale
    return torch.randn(COUNT, generator=generator) ** SHAPES[kind] * scale


def step(ddp: nn.Module, kinds: list[str], seed: int, scales: list[float] | None = None) -> None:
    ddp.zero_grad()
    scales = scales or [1.0] * len(kinds)
    rank = dist.get_rank()
    ddp(
        [values(kind, rank, 10 * seed + i, scale)
         for i, (kind, scale) in enumerate(zip(kinds, scales, strict=True))]
    ).backward()  # fmt: skip


def ways(state) -> dict[str, str]:
    return {d.name.removeprefix("layers."): d.way for d in state.decisions()}


def bits_of_gradients(ddp: nn.Module) -> list[str]:
    return [digest(p.grad) for p in ddp.parameters()]


def alike(found) -> None:
    """On all ranks."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    assert all(other == found for other in everyone), everyone


def lost_by(codec: str, exact: torch.Tensor) -> float:
    """Relative error of one encoding."""
    coder = cccl.codec(codec)
    return float((coder.decode(coder.encode(exact)) - exact).norm() / exact.norm())


def _within(limit):
    ddp, kinds = given(), ["uniform", "normal", "cubes"]
    state = cccl.torch.compress(ddp, {**WIDEST, "max_relative_error": limit, "measure_every": 8})
    measured, ranks = {0, 1, 2, 4, 8, 16}, range(dist.get_world_size())
    for number in range(20):
        step(ddp, kinds, number)
        alike((bits_of_gradients(ddp), ways(state)))
        if number in measured:
            assert {*ways(state).values()} == {"block_float8"}
            continue
        for i, (kind, parameter) in enumerate(zip(kinds, ddp.parameters(), strict=True)):
            mean = sum(values(kind, rank, 10 * number + i) for rank in ranks) / len(ranks)
            taken = ways(state)[str(i)]
            narrower = CODECS[: CODECS.index(taken)]
            if taken != "block_float8":
                assert lost_by(taken, mean) <= limit * 1.05, (number, kind)
            assert all(lost_by(codec, mean) > limit * 0.95 for codec in narrower), (number, kind)
            if taken != "block_float8" and kind != "cubes":  # whose single ranks' have longer tails
                lost = float((parameter.grad - mean).norm() / mean.norm())
                assert lost <= math.sqrt(2) * limit * 1.05, "two legs, each of which loses so much"
    return ways(state)


@pytest.mark.parametrize("world, limit", [(2, 0.16), (2, 0.03), (2, 0.001), (3, 0.08), (4, 0.08)])
def test_each_bucket_goes_through_the_narrowest_codec_within_the_error(ranks, world, limit):
    """On all ranks alike; and the error stays within it in the steps that follow."""
    found = ranks(world)(_within, limit)
    assert_equal(found)
    assert ({*found[0].values()} == {"block_float8"}) == (limit == 0.001)


def _changes():
    ddp = given(1)
    state = cccl.torch.compress(ddp, {**WIDEST, "max_relative_error": 0.12, "measure_every": 4})
    seen = []
    for number in range(16):
        step(ddp, ["uniform" if number < 6 else "cubes"], number)
        seen.append(ways(state)["0"].removeprefix("block_float"))
    return "".join(seen)


def test_a_codec_follows_what_gradients_become(ranks):
    """Measured in steps 0, 1, 2, 4, 8 and 12."""
    assert {*ranks(2)(_changes)} == {"8884844485558555"}


def _not_finite(value, everyone):
    ddp = given(2)
    state = cccl.torch.compress(ddp, {**WIDEST, "max_relative_error": 0.12, "measure_every": 4})
    seen = []
    for number in range(20):
        bad = number in (0, 8, 12, 13) and (everyone or dist.get_rank() == 1)
        step(ddp, ["normal", "normal"], number, [value if bad else 1.0, 1.0])
        alike((bits_of_gradients(ddp), ways(state)))
        seen.append([way.removeprefix("block_float") for way in ways(state).values()])
    assert torch.isfinite(next(ddp.parameters()).grad).all()
    return ["".join(step) for step in seen]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("everyone", [False, True])
def test_steps_that_are_not_finite_leave_the_choice_as_it_was(ranks, value, everyone):
    """Of the bucket that is: the other is chosen by what it has."""
    for found in ranks(3)(_not_finite, value, everyone):
        assert found[:4] == ["88", "88", "88", "44"]
        assert found[4:8] == ["88", "44", "44", "44"]
        assert found[8:] == ["88", "44", "44", "44"] * 3


def _at_random(seed, budget):
    ddp = given(3)
    state = cccl.torch.compress(ddp, {**WIDEST, **budget, "measure_every": 3})
    chance = random.Random(seed)  # the same on all ranks, but for what only one has
    for number in range(14):
        kinds = [chance.choice([*SHAPES]) for _ in range(3)]
        scales = [10.0 ** chance.uniform(-12, 12) for _ in range(3)]
        odd, bad = (
            chance.randrange(dist.get_world_size()),
            chance.choice([1, 0, math.nan, math.inf]),
        )
        if dist.get_rank() == odd:
            scales[chance.randrange(3)] *= bad
        else:
            chance.randrange(3)
        step(ddp, kinds, number, scales)
        alike((bits_of_gradients(ddp), ways(state), state.step))
    return len({*ways(state).values()})


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("budget", [{"max_relative_error": 0.1}, {"target_bits": 4.5}])
def test_ranks_agree_whatever_the_gradients_are(ranks, world, budget):
    """Of any size and shape, of one rank zero or not finite: at every step of several runs."""
    for seed in range(2):
        ranks(world)(_at_random, seed, budget)


def _messages():
    ddp, kinds = given(2), ["normal", "cubes"]
    cccl.torch.compress(ddp, {**WIDEST, "max_relative_error": 0.11, "measure_every": 4})
    for number in range(10):  # each way that a bucket goes is compared once
        step(ddp, kinds, number)
    compared = []
    agree, _members.Members.agree = _members.Members.agree, lambda self, f: compared.append(f)
    try:
        for number in range(10, 20):
            step(ddp, kinds, number)
    finally:
        _members.Members.agree = agree
    return len(compared)


def test_choosing_takes_no_message(ranks):
    assert ranks(2)(_messages) == [0, 0]


def _beside_rules():
    ddp = gpt()
    rules = [{"name": "tokens.*", "compression_type": "block_float6"}, SMALL_ONES]
    state = cccl.torch.compress(
        ddp, {**WIDEST, "rules": rules, "max_relative_error": 0.2, "measure_every": 8}
    )
    learn(ddp, 8)
    alike([digest(g) for g in gradients(ddp).values()])
    decided = {d.name: (d.rule, d.way) for d in state.decisions()}
    for name, parameter in ddp.module.named_parameters():
        if name.startswith("tokens"):
            assert decided[name] == (0, "block_float6")
        elif parameter.dim() == 1:
            assert decided[name] == (1, "none")
        elif name == "positions.weight":  # sent with the small ones of all buckets
            assert decided[name] == (None, "block_float8")
        else:
            assert decided[name][0] is None and decided[name][1] in CODECS[:3], name
    return [*decided.items()]


@pytest.mark.parametrize("world", [2, 3])
def test_rules_hold_beside_a_budget(ranks, world):
    assert_equal(ranks(world)(_beside_rules))


def _bits(target):
    ddp, kinds = given(3), ["normal"] * 3
    state = cccl.torch.compress(ddp, {**WIDEST, "target_bits": target, "measure_every": 8})
    for number in range(7):
        cccl.reset_stats()
        step(ddp, kinds, number, [1.0, 100.0, 1.0])
        alike((bits_of_gradients(ddp), ways(state)))
    total = cccl.stats()["total"]
    sent = 8 * total["bytes_sent"] / total["values"] / (2 * (dist.get_world_size() - 1))
    return ways(state), sent * dist.get_world_size()


@pytest.mark.parametrize(
    "target, large, others",
    [(2.0, 3, [3, 3]), (4.2, 6, [3, 3]), (5.0, 8, [3, 3]), (6.5, 8, [5, 6]), (9.0, 8, [8, 8])],
)
def test_all_buckets_together_take_so_many_bits(ranks, target, large, others):
    """And the bits go to the bucket whose error is largest."""
    for found, sent in ranks(2)(_bits, target):
        bits = {name: int(way[-1]) for name, way in found.items()}
        assert bits["1"] == large
        assert sorted([bits["0"], bits["2"]]) == others
        assert sent <= max(target, 3.15) * 1.01


def _hosts():
    ddp, kinds = given(2), ["uniform", "cubes"]
    config = {**WIDEST, "max_relative_error": 0.12, "measure_every": 8, "hierarchy": 2}
    state = cccl.torch.compress(ddp, config)
    for number in range(6):
        step(ddp, kinds, number)
        alike((bits_of_gradients(ddp), ways(state)))
    return ways(state)


def test_ranks_of_several_hosts_agree(ranks):
    for found in ranks(4)(_hosts):
        assert found["0"] == "block_float3" or found["0"] == "block_float4"


def _differ(what):
    odd = dist.get_rank() == 1
    config = {**WIDEST, "max_relative_error": 0.1}
    if odd:
        config |= what
    group = dist.new_group()
    ddp = given(1, process_group=group)
    cccl.torch.compress(ddp, config)
    with pytest.raises(cccl.MismatchError) as caught:
        step(ddp, ["normal"], 0)
    dist.destroy_process_group(group)
    return str(caught.value)


@pytest.mark.parametrize(
    "what",
    [{"max_relative_error": 0.2}, {"measure_every": 8}, {"adaptive_codecs": ["block_float2"]},
     {"max_relative_error": None}],
)  # fmt: skip
def test_ranks_with_different_budgets_are_told(ranks, what):
    found = ranks(3)(_differ, what)
    assert_equal(found)
    assert "rank 1 has" in found[0]


def _goes_on():
    group = dist.new_group()
    ddp = given(1, process_group=group)
    config = {**WIDEST, "max_relative_error": 0.12, "measure_every": 8, "deadline": 5.0}
    state = cccl.torch.compress(ddp, config)
    for number in range(3):
        step(ddp, ["normal"], number)
    assert state.step == 3
    if dist.get_rank() == 1:  # one rank is a step ahead, as after a failure that some did not see
        state._steps.begin([], {}, 0, state.settings().of("all_reduce"))
    cccl.torch.recover(group)
    state.step = 3
    seen = []
    for number in range(3, 9):
        step(ddp, ["normal"], number)
        alike((bits_of_gradients(ddp), ways(state), state.step))
        seen.append(ways(state)["0"][-1])
    dist.destroy_process_group(group)
    return "".join(seen)


def test_it_begins_anew_where_a_group_was_recovered(ranks):
    """Steps 3, 4, 5 and 7 are then the first ones."""
    assert {*ranks(2)(_goes_on)} == {"888484"}


def _learned(dtype, view):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 700), nn.ReLU(), nn.Linear(700, 300)).to(dtype)
    ddp = DistributedDataParallel(layers, gradient_as_bucket_view=view)
    state = cccl.torch.compress(ddp, {**WIDEST, "max_relative_error": 0.2, "measure_every": 4})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for number in range(8):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(8, 24, generator=generator).to(dtype)
        ddp(batch).square().mean().backward()
        optimizer.step()
    assert {*ways(state).values()} <= {"block_float3", "block_float4"}
    return [digest(p) for p in ddp.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("view", [False, True])
def test_replicas_stay_bitwise_equal(ranks, dtype, view):
    assert_equal(ranks(3)(_learned, dtype, view))


def _with_feedback():
    ddp = given(2)
    config = {**WIDEST, "max_relative_error": 0.12, "measure_every": 4, "error_feedback": "both"}
    state = cccl.torch.compress(ddp, config)
    for number in range(10):
        step(ddp, ["normal", "cubes"], number)
        alike((bits_of_gradients(ddp), ways(state)))
        if number == 1:  # DDP has rebuilt its buckets
            rebuilt = state.store.resets, state.store.moves, state.store.nbytes
    assert {*ways(state).values()} == {"block_float4", "block_float5"}
    assert state.store.nbytes > 0
    assert (state.store.resets, state.store.moves, state.store.nbytes) == rebuilt


def test_residuals_stay_where_the_codec_changes(ranks):
    ranks(2)(_with_feedback)


def _fsdp(budget):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(cccl.UnsupportedError, match="DistributedDataParallel"):
        cccl.torch.compress_fsdp(model, {**WIDEST, **budget})


@pytest.mark.parametrize("budget", [{"max_relative_error": 0.1}, {"target_bits": 4}])
def test_fsdp_refuses_a_budget(ranks, budget):
    ranks(2)(_fsdp, budget)
