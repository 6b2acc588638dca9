"""DistributedDataParallel under the hook: ways to register it, and what must not change."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, gradient, parameters_digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch

ARTICLE = {
    "compression_type": "block_fp16_to_8bit",
    "sparsity_threshold": 0.5,
    "collective_filter": ["all_reduce"],
}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 300), nn.ReLU(), nn.Linear(300, 7))


def train(ddp: nn.Module, steps: int = 5, optimizer=None, shape=(8, 24)) -> nn.Module:
    """Each rank has its own batches; the same in every run."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        batch = gradient(dist.get_rank(), shape, torch.float32, seed=step)
        ddp(batch).square().mean().backward()
        optimizer.step()
    return ddp


def plain(build=mlp, **options) -> DistributedDataParallel:
    return DistributedDataParallel(build(), **options)


def compressed_rows() -> list[dict]:
    return [row for row in cccl.stats()["rows"] if not row["plain"]]


def _identity(view):
    reference = parameters_digest(train(plain(gradient_as_bucket_view=view), 10))
    ddp = plain(gradient_as_bucket_view=view)
    cccl.torch.compress(ddp, {"compression_type": "identity"})
    return reference, parameters_digest(train(ddp, 10))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_identity_equals_plain_ddp_bitwise_for_ten_iterations(ranks, world, view):
    """F048"""
    found = ranks(world)(_identity, view)
    assert_equal(found)
    assert found[0][0] == found[0][1]


def _register(how):
    if how == "article":  # nothing but configure, then plain DDP
        cccl.configure(ARTICLE)
        ddp = plain()
    elif how == "hook with None":
        cccl.configure({**ARTICLE, "attach_ddp": False})
        ddp = plain()
        ddp.register_comm_hook(None, cccl.torch.compression_hook)
    elif how == "hook with a group":
        cccl.configure({**ARTICLE, "attach_ddp": False})
        ddp = plain()
        ddp.register_comm_hook(dist.group.WORLD, cccl.torch.compression_hook)
    elif how == "hook with a state":
        ddp = plain()
        state = cccl.torch.CompressionState(config=ARTICLE)
        ddp.register_comm_hook(state, cccl.torch.compression_hook)
    else:
        ddp = plain()
        cccl.torch.compress(ddp, ARTICLE)
    train(ddp)
    rows = compressed_rows()
    assert rows and all(row["codec"].startswith("block_float8(") for row in rows)
    assert cccl.stats()["total"]["plain_calls"] == 0
    assert cccl.stats()["total"]["ratio"] > 3.5
    return parameters_digest(ddp)


WAYS = ("article", "hook with None", "hook with a group", "hook with a state", "compress")


def test_every_way_to_register_compresses_and_gives_the_same_weights(ranks):
    """F081, F114: the article's script, and the forms that trainers use."""
    found = [ranks(2)(_register, how) for how in WAYS]
    assert len({bits for per_rank in found for bits in per_rank}) == 1


def _close_to_plain(codec, options):
    reference = train(plain(), 10)
    ddp = plain()
    cccl.torch.compress(ddp, {"compression_type": codec, **options})
    train(ddp, 10)
    start = mlp()
    moved = far = 0.0
    for ours, theirs, first in zip(
        ddp.parameters(), reference.parameters(), start.parameters(), strict=True
    ):
        far += float((ours - theirs).square().sum())
        moved += float((theirs - first).square().sum())
    assert compressed_rows()
    return parameters_digest(ddp), (far / moved) ** 0.5


@pytest.mark.parametrize(
    ("codec", "options", "share"),
    [
        ("cast_fp16", {}, 0.002),
        ("cast_bf16", {}, 0.01),
        ("block_float8", {}, 0.02),
        ("block_float8", {"rounding": "stochastic"}, 0.03),
        ("block_float4", {}, 0.15),
        ("block_float4", {"level": "best"}, 0.12),
    ],
)
def test_replicas_stay_bitwise_equal_and_near_plain_ddp(ranks, codec, options, share):
    """F006: the weights' way differs from plain's by a stated share of its length."""
    found = ranks(3)(_close_to_plain, codec, options)
    assert_equal([bits for bits, _ in found])
    assert found[0][1] < share


def _twice():
    ddp = plain()
    state = cccl.torch.compress(ddp, ARTICLE)
    with pytest.raises(cccl.ConfigError, match="has a communication hook already"):
        cccl.torch.compress(ddp, {"compression_type": "block_float4"})
    train(ddp, 2)
    assert {row["codec"].split("(")[0] for row in compressed_rows()} == {"block_float8"}
    assert state.settings().compression_type == "block_fp16_to_8bit"
    with pytest.raises(cccl.ConfigError, match="state is a dict"):
        cccl.torch.compression_hook({}, None)


def test_a_second_registration_is_refused_and_leaves_the_first_intact(ranks):
    """F045, F076"""
    ranks(2)(_twice)


def _own_hook_stays():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    cccl.configure(ARTICLE)
    ddp = plain()
    ddp.register_comm_hook(None, allreduce_hook)
    train(ddp, 2)
    assert cccl.stats()["rows"] == []
    cccl.configure({**ARTICLE, "attach_ddp": False})
    train(plain(), 2)
    assert cccl.stats()["rows"] == []
    cccl.configure({"compression_type": "none"})
    train(plain(), 2)
    assert cccl.stats()["rows"] == []


def test_a_model_with_a_hook_of_its_own_is_left_alone(ranks):
    ranks(2)(_own_hook_stays)


def _early_state():
    state = cccl.torch.CompressionState(config=ARTICLE)
    dist.init_process_group("gloo")
    try:
        ddp = plain()
        ddp.register_comm_hook(state, cccl.torch.compression_hook)
        train(ddp, 3)
        assert compressed_rows()
        return parameters_digest(ddp)
    finally:
        dist.destroy_process_group()


def test_a_state_may_be_made_before_the_process_group(own_ranks):
    """F053: and after the group is destroyed, another one works."""
    pool = own_ranks(2, backend="")
    assert_equal(pool(_early_state))


class Sometimes(nn.Module):
    """A layer that only some ranks use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.extra, self.last = (nn.Linear(24, 24) for _ in range(3))
        self.use = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        return self.last(self.extra(x).relu() if self.use else x)


def _uses(rank: int, step: int, micro: int) -> bool:
    return (rank + step + micro) % 2 == 0


def _accumulate(micros, steps):
    world, rank = dist.get_world_size(), dist.get_rank()
    ddp = plain(Sometimes, find_unused_parameters=True)
    cccl.torch.compress(ddp, ARTICLE)
    single = Sometimes()
    ours = torch.optim.SGD(ddp.parameters(), lr=0.1)
    theirs = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        for micro in range(micros):
            ddp.module.use = _uses(rank, step, micro)
            batch = gradient(rank, (8, 24), torch.float32, seed=10 * step + micro)
            if micro < micros - 1:
                with ddp.no_sync():
                    (ddp(batch).square().mean() / micros).backward()
            else:
                (ddp(batch).square().mean() / micros).backward()
            for other in range(world):  # the same as one big batch
                single.use = _uses(other, step, micro)
                batch = gradient(other, (8, 24), torch.float32, seed=10 * step + micro)
                (single(batch).square().mean() / micros / world).backward()
        ours.step()
        theirs.step()
    for mine, exact in zip(ddp.parameters(), single.parameters(), strict=True):
        assert (mine - exact).abs().max() < 0.01
    assert sum(r["calls"] for r in compressed_rows()) % steps == 0, "once per synchronisation"
    return parameters_digest(ddp)


def test_accumulation_with_a_conditional_layer_equals_one_big_batch(ranks):
    """F049: four micro-steps, three of them in no_sync, five times."""
    assert_equal(ranks(3)(_accumulate, 4, 5))


def _static_graph():
    ddp = plain(static_graph=True)
    cccl.torch.compress(ddp, ARTICLE)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(6):
        train(ddp, 1, optimizer)
        with torch.no_grad():
            ddp(gradient(step, (3, 24), torch.float32))
    assert {row["calls"] for row in compressed_rows()} == {6} or (
        sum(row["calls"] for row in compressed_rows()) % 6 == 0
    )
    return parameters_digest(ddp)


def test_static_graphs_may_have_extra_forwards(ranks):
    """F052: what is counted are synchronisations, not forwards."""
    assert_equal(ranks(2)(_static_graph))


def _join():
    ddp = plain()
    cccl.torch.compress(ddp, ARTICLE)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join():
        train(ddp, 3 + 2 * dist.get_rank(), optimizer)
    return parameters_digest(ddp)


def test_ranks_with_fewer_batches_may_join(ranks):
    """Uneven inputs, as DDP's own `join` allows."""
    assert_equal(ranks(2)(_join))


def _two_models():
    first, second = plain(), plain()
    cccl.torch.compress(first, ARTICLE)
    cccl.torch.compress(second, {"compression_type": "block_float4"})
    for step in range(4):
        batch = gradient(dist.get_rank(), (8, 24), torch.float32, seed=step)
        loss = first(batch).square().mean() + second(batch).abs().mean()
        loss.backward()
    codecs = {row["codec"].split("(")[0] for row in compressed_rows()}
    assert codecs == {"block_float8", "block_float4"}
    gradients = [p.grad.sum().item() for m in (first, second) for p in m.parameters()]
    return gradients


def test_two_models_in_one_backward_keep_their_own_settings(ranks):
    assert_equal(ranks(2)(_two_models))
