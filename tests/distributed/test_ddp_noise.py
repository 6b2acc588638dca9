"""Codecs that ranks choose by the noise of their gradients, as shards' owners measure it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest
from test_ddp_budget import COUNT, WIDEST, alike, bits_of_gradients, given, values, ways
from test_ddp_rules import SMALL_ONES, gpt, gradients, learn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch
from cccl._budget import bits_of_ways
from cccl._by_parameter import Way


def step(ddp: nn.Module, number: int, noise: list[float]) -> list[torch.Tensor]:
    """Each parameter's gradients: normal ones that all ranks share, and so much noise beside.
    Returns those of all ranks."""
    ddp.zero_grad()
    given = []
    for i, scale in enumerate(noise):
        shared = values("normal", 99, 10 * number + i)
        given.append(torch.stack([
            shared + scale * values("normal", rank, 10 * number + i)
            for rank in range(dist.get_world_size())
        ]))  # fmt: skip
    ddp([all_ranks[dist.get_rank()] for all_ranks in given]).backward()
    return given


def relative_noise(ranks: torch.Tensor) -> float:
    """Standard deviation of their mean over its root mean square."""
    ranks = ranks.double()
    variance = ranks.var(dim=0, unbiased=True).mean() / len(ranks)
    return float((variance / ranks.mean(dim=0).square().mean()).sqrt())


def _chooses(share):
    noise = [3.0, 0.3, 0.03, 0.0]
    ddp = given(4)
    config = {**WIDEST, "max_noise_share": share, "measure_every": 8}
    state = cccl.torch.compress(ddp, config)
    bits = bits_of_ways(cccl.Config(**config))
    for number in range(12):
        everyone = step(ddp, number, noise)
        alike((bits_of_gradients(ddp), state.decisions(), state.history))
        decided = sorted(state.decisions(), key=lambda d: d.name)
        if number in (0, 1, 2, 4, 8):
            assert {d.way for d in decided} == {"block_float8"}
            continue
        for d, ranks, parameter in zip(decided, everyone, ddp.parameters(), strict=True):
            exact, expected = ranks.double().mean(dim=0), relative_noise(ranks)
            error = float((parameter.grad - exact).norm() / exact.norm())
            if not expected:
                assert (d.way, d.noise, d.share) == ("block_float8", 0.0, None)
                continue
            assert d.noise == pytest.approx(expected, rel=0.1)
            assert d.error == pytest.approx(error, rel=0.15), (number, d, error, expected)
            assert d.share == pytest.approx((d.error / d.noise) ** 2)
            if d.way != "block_float8":
                assert (error / expected) ** 2 <= share * 1.3
    latest = {chosen.parameter: chosen for chosen in state.history}
    spent = [latest[f"layers.{i}"].bits for i in range(4)]
    assert spent == sorted(spent), "the more noise, the fewer bits"
    assert spent[-1] == bits[Way("block_float8")] and spent[0] < 5
    return ways(state)


@pytest.mark.parametrize("world, share", [(2, 0.1), (3, 0.1), (2, 0.02)])
def test_each_bucket_takes_as_few_bits_as_its_noise_allows(ranks, world, share):
    """On all ranks alike; what is measured is the gradients' own noise, and the error that follows
    stays within its share."""
    assert_equal(ranks(world)(_chooses, share))


def _same_batch():
    ddp = given(2)
    state = cccl.torch.compress(ddp, {**WIDEST, "max_noise_share": 1.0, "measure_every": 4})
    for number in range(10):
        step(ddp, number, [0.0, 0.0])
        alike((bits_of_gradients(ddp), ways(state)))
        assert {*ways(state).values()} == {"block_float8"}
    return [chosen.noise for chosen in state.history]


@pytest.mark.parametrize("world", [2, 3])
def test_without_noise_all_goes_as_compression_type(ranks, world):
    for noise in ranks(world)(_same_batch):
        assert noise and {*noise} == {0.0}


def _not_finite(value):
    ddp = given(1)
    state = cccl.torch.compress(ddp, {**WIDEST, "max_noise_share": 0.2, "measure_every": 4})
    seen = []
    for number in range(14):
        bad = number in (0, 8) and dist.get_rank() == 1
        step(ddp, number, [value if bad else 2.0])
        alike((bits_of_gradients(ddp), ways(state)))
        seen.append(ways(state)["0"])
    return seen


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_steps_that_are_not_finite_leave_the_choice_as_it_was(ranks, value):
    for seen in ranks(3)(_not_finite, value):
        assert seen[:3] == ["block_float8"] * 3 and seen[3] != "block_float8"
        assert {*seen[5:8]} == {seen[3]} == {*seen[9:12]}


def _learned(dtype, more):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 700), nn.ReLU(), nn.Linear(700, 300)).to(dtype)
    ddp = DistributedDataParallel(layers)
    state = cccl.torch.compress(ddp, {**WIDEST, "max_noise_share": 0.2, "measure_every": 4, **more})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for number in range(8):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        batch = torch.randn(4, 24, generator=generator).to(dtype)
        ddp(batch).square().mean().backward()
        optimizer.step()
        alike((state.decisions(), state.history))
    assert state.history and {*ways(state).values()} != {"block_float8"}
    return [digest(p) for p in ddp.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "more",
    [{}, {"error_feedback": "both"}, {"algorithm": "one_shot"},
     {"rounding": "stochastic"}],
)  # fmt: skip
def test_replicas_stay_bitwise_equal(ranks, dtype, more):
    assert_equal(ranks(3)(_learned, dtype, more))


def _beside_rules():
    ddp = gpt()
    rules = [{"name": "tokens.*", "compression_type": "block_float6"}, SMALL_ONES]
    config = {**WIDEST, "rules": rules, "max_noise_share": 0.2, "measure_every": 8}
    state = cccl.torch.compress(ddp, config)
    learn(ddp, 8)
    alike([digest(g) for g in gradients(ddp).values()])
    alike(state.decisions())
    measured = [d for d in state.decisions() if d.noise]
    for d in state.decisions():
        if d.name.startswith("tokens"):
            assert (d.rule, d.way, d.noise) == (0, "block_float6", None)
    assert measured and all(d.rule is None for d in measured)
    return [(d.name, d.way) for d in state.decisions()]


@pytest.mark.parametrize("world", [2, 3])
def test_rules_hold_beside_it(ranks, world):
    assert_equal(ranks(world)(_beside_rules))


def _statistics():
    cccl.reset_stats()
    ddp = given(1)
    cccl.torch.compress(ddp, {**WIDEST, "max_noise_share": 0.1, "measure_every": 8})
    for number in range(4):
        step(ddp, number, [0.5])
    return {row["codec"]: row["relative_noise"] for row in cccl.stats()["rows"]}


def test_statistics_show_it_of_steps_that_measure(ranks):
    for found in ranks(2)(_statistics):
        expected = math.sqrt(0.5**2 / 2 / (1 + 0.5**2 / 2))
        measured = {codec: noise for codec, noise in found.items() if noise}
        assert len(found) == 2 and len(measured) == 1
        assert "block_float8" in next(iter(measured))
        assert [*measured.values()] == [pytest.approx(expected, rel=0.1)]


def _cannot_measure_alone():
    ddp = DistributedDataParallel(
        nn.Linear(64, 64),
        process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True),
    )
    state = cccl.torch.compress(ddp, {"compression_type": "block_float8", "max_noise_share": 0.1})
    for _ in range(3):
        ddp(torch.ones(2, 64)).sum().backward()
    return state.history


def test_a_group_of_one_has_no_noise(ranks):
    assert ranks(2)(_cannot_measure_alone) == [[], []]


def _fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(cccl.UnsupportedError, match="max_noise_share"):
        cccl.torch.compress_fsdp(model, {**WIDEST, "max_noise_share": 0.1})


def test_fsdp_refuses_it(ranks):
    ranks(2)(_fsdp)


def _drawn(folder):
    ddp = given(2)
    state = cccl.torch.compress(ddp, {**WIDEST, "max_noise_share": 0.1, "measure_every": 4})
    for number in range(6):
        step(ddp, number, [1.0, 0.01])
    path = f"{folder}/{dist.get_rank()}.png"
    state.draw_history(path)
    with open(path, "rb") as picture:
        return picture.read(4)


def test_the_choices_are_drawn_over_the_steps(ranks, tmp_path):
    pytest.importorskip("matplotlib", reason="draws")
    assert ranks(2)(_drawn, str(tmp_path)) == [b"\x89PNG"] * 2


assert COUNT > 16384, "a bucket's sample is in several pieces"
