"""DDP whose parameters go different ways: a small GPT and what its rules must not change."""

from __future__ import annotations

import gc
import sys
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, parameters_digest
from test_ddp import compressed_rows, mlp, plain, train
from test_ddp_models import Words
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from gpt import GPT, Size

SIZE = Size(layers=2, width=192, heads=2, context=32, batch=2)

EMBEDDINGS = {"name": ["tokens.*", "positions.*"], "compression_type": "block_float8"}
SMALL_ONES = {"max_ndim": 1, "compression_type": "none"}  # norms and biases
MATRICES_AT_4 = {"compression_type": "block_float4", "rules": [EMBEDDINGS, SMALL_ONES]}


def gpt(**options) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(GPT(SIZE), bucket_cap_mb=1, **options)


def backward(ddp: nn.Module, step: int = 0, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    text = torch.randint(0, 256, (2, 33), generator=generator)
    (ddp(text[:, :-1], text[:, 1:]) * scale).backward()


def learn(ddp: nn.Module, steps: int) -> nn.Module:
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        backward(ddp, step)
        optimizer.step()
    return ddp


def gradients(ddp: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def _learned(options):
    ddp = gpt(**options)
    state = cccl.torch.compress(ddp, {**MATRICES_AT_4, "strict": True})
    learn(ddp, 4)
    ways = {d.name: (d.rule, d.way) for d in state.decisions()}
    assert ways.keys() == {name for name, _ in ddp.module.named_parameters()}
    for name, parameter in ddp.module.named_parameters():
        expected = (1, "none") if parameter.dim() == 1 else (None, "block_float4")
        expected = (
            (0, "block_float8") if name in ("tokens.weight", "positions.weight") else expected
        )
        assert ways[name] == expected, name
    return parameters_digest(ddp)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("view", [False, True])
def test_replicas_stay_bitwise_equal(ranks, world, view):
    """Through the rebuilding of buckets; every parameter goes as its rule says."""
    assert_equal(ranks(world)(_learned, {"gradient_as_bucket_view": view}))


def _first_gradients():
    exact = gpt()
    backward(exact)
    ddp = gpt()
    cccl.torch.compress(ddp, MATRICES_AT_4)
    backward(ddp)
    errors = {}
    for name, found in gradients(ddp).items():
        expected = gradients(exact)[name]
        errors[name] = float((found - expected).norm() / expected.norm())
        if found.dim() == 1:
            assert torch.equal(found, expected), name
    return errors


def test_each_parameter_is_as_exact_as_its_codec(ranks):
    """What goes plain has the bits of plain DDP, though it was copied out and in."""
    for errors in ranks(2)(_first_gradients):
        for name, error in errors.items():
            if name in ("tokens.weight", "positions.weight"):
                assert 1e-4 < error < 0.02, name
            elif "norm" not in name and name.endswith("weight") and error:
                assert 0.02 < error < 0.4, name


BITS = {"block_float8": 8.125, "block_float4": 4.125}


def _spent(rules):
    ddp = gpt()
    cccl.torch.compress(ddp, {**MATRICES_AT_4, "rules": rules})
    backward(ddp, 0)  # DDP builds its buckets anew behind the first step
    cccl.reset_stats()
    for step in range(3):
        backward(ddp, step)
    rows = compressed_rows()
    for row in rows:
        bits = BITS[row["codec"].split("(")[0]]
        assert row["bytes_sent"] == pytest.approx(row["values"] * bits / 8, rel=0.02), row["label"]
    of_rule = sum(row["values"] for row in rows if "rules[0]" in row["label"])
    plain = sum(row["values"] for row in cccl.stats()["rows"] if row["plain"])
    return of_rule, plain, cccl.stats()["total"]["bytes_sent"]


def test_the_bits_of_a_rule_are_really_spent(ranks):
    """Two ranks, each of which sends half of every payload twice: once to its owner, once back."""
    parameters = dict(GPT(SIZE).named_parameters())
    embeddings = sum(parameters[n].numel() for n in ("tokens.weight", "positions.weight"))
    small = sum(p.numel() for p in parameters.values() if p.dim() == 1)
    pool = ranks(2)
    none, with_rules = pool(_spent, []), pool(_spent, MATRICES_AT_4["rules"])
    for (_, _, before), (of_rule, exact, after) in zip(none, with_rules, strict=True):
        assert (of_rule, exact) == (3 * embeddings, 3 * small)
        # Small ones go plain, and mostly as zeros with the matrices that they lie between.
        at_most = 3 * (embeddings * 4 + small * 32) / 8
        at_least = 3 * (embeddings * 4 + small * 27.5) / 8
        assert at_least <= after - before <= at_most * 1.01


def _few_collectives():
    ddp = gpt()
    cccl.torch.compress(ddp, MATRICES_AT_4)
    backward(ddp, 0)
    cccl.reset_stats()
    backward(ddp, 1)
    return {row["label"]: row["calls"] for row in cccl.stats()["rows"]}


def test_small_parameters_of_all_buckets_are_one_collective_for_each_way(ranks):
    """Of these embeddings too. Small matrices lie between large ones, and go with them."""
    for calls in ranks(2)(_few_collectives):
        small = {label: n for label, n in calls.items() if label.startswith("small")}
        assert small == {"small parameters, rules[0]": 1, "small parameters, rules[1]": 1}
        large = {label for label in calls if label not in small}
        assert len(large) >= 3
        assert all(label.split()[0] == "bucket" and calls[label] == 1 for label in large)


LOSSLESS = {
    "compression_type": "lossless",
    "rules": [{"name": "*bias", "compression_type": "none"},
              {"name": "*.projection.*", "compression_type": "identity"}],
}  # fmt: skip


def _lossless(view):
    reference = parameters_digest(learn(gpt(gradient_as_bucket_view=view), 4))
    ddp = gpt(gradient_as_bucket_view=view)
    cccl.torch.compress(ddp, LOSSLESS)
    assert parameters_digest(learn(ddp, 4)) == reference
    assert compressed_rows()
    return reference


@pytest.mark.parametrize("view", [False, True])
def test_cutting_and_copying_loses_nothing(ranks, view):
    assert_equal(ranks(2)(_lossless, view))


def _per_leg():
    ddp = gpt()
    rules = [{"min_ndim": 2, "compression_type": "block_float4", "result_type": "block_float8"}]
    cccl.torch.compress(ddp, {"compression_type": "block_float8", "rules": rules})
    backward(ddp)
    return {row["codec"].count("block_float"): row["bytes_sent"] * 8 / row["values"]
            for row in compressed_rows()}  # fmt: skip


def test_a_rule_has_a_codec_for_each_leg(ranks):
    """Two ranks send half of the first leg's payload, and half of the second's."""
    for bits in ranks(2)(_per_leg):
        assert bits[1] == pytest.approx(8.125, rel=0.02)
        assert bits[2] == pytest.approx((4.125 + 8.125) / 2, rel=0.02)


def _state_needs_names():
    by_name = {"rules": [{"name": "0.*", "compression_type": "none"}]}
    ddp = plain()
    ddp.register_comm_hook(cccl.torch.CompressionState(config=by_name), cccl.torch.compression_hook)
    with pytest.raises(
        cccl.ConfigError, match=r"need the names.*CompressionState\(config=config, m"
    ):
        train(ddp, 1)
    ddp = plain()
    state = cccl.torch.CompressionState(config=by_name, model=ddp)
    ddp.register_comm_hook(state, cccl.torch.compression_hook)
    train(ddp, 2)
    assert {(d.name, d.rule) for d in state.decisions()} == {
        ("0.weight", 0), ("0.bias", 0), ("2.weight", None), ("2.bias", None)}  # fmt: skip
    ddp = plain()
    by_shape = {"rules": [{"max_ndim": 1, "compression_type": "none"}]}
    ddp.register_comm_hook(
        cccl.torch.CompressionState(config=by_shape), cccl.torch.compression_hook
    )
    train(ddp, 2)
    return parameters_digest(ddp)


def test_rules_by_name_need_the_model_and_rules_by_shape_do_not(ranks):
    assert_equal(ranks(2)(_state_needs_names))


def _configured():
    cccl.configure({"compression_type": "block_float4", "rules": [
        {"name": "*.weight", "compression_type": "block_float8"},
        {"name": "2.wieght", "compression_type": "none"}]})  # fmt: skip
    ddp = plain(mlp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ddp, 3)
    told = [str(w.message) for w in caught if "rules" in str(w.message)]
    assert told == [
        "rules[1] (name = ('2.wieght',)) matches no parameter; nearest names: 2.weight, 0.weight"
    ]
    ways = {row["label"]: row["codec"].split("(")[0] for row in compressed_rows()}
    assert ways == {
        "small parameters": "block_float4",
        "small parameters, rules[0]": "block_float8",
    }
    return parameters_digest(ddp)


def test_configure_alone_is_enough_and_warns_once(ranks):
    assert_equal(ranks(2)(_configured))


def _hierarchical():
    ddp = gpt()
    config = {**MATRICES_AT_4, "error_feedback": "both", "hierarchy": 2}
    cccl.torch.compress(ddp, config)
    learn(ddp, 3)
    between = [row for row in compressed_rows() if "block_float" in row["codec"]]
    assert between and all(row["feedback_calls"] == row["calls"] for row in between)
    return parameters_digest(ddp)


def test_rules_hold_between_hosts(ranks):
    assert_equal(ranks(4)(_hierarchical))


def _two_models():
    rules = [{"max_ndim": 1, "compression_type": "none"}]
    state = cccl.torch.CompressionState(config={"compression_type": "block_float4", "rules": rules})
    models = [plain(mlp), plain(mlp)]
    for ddp in models:
        ddp.register_comm_hook(state, cccl.torch.compression_hook)
    for _ in range(3):
        for ddp in models:
            train(ddp, 1)
    assert len(state.decisions()) == 2 * 4
    return [parameters_digest(ddp) for ddp in models]


def test_models_that_share_a_state_have_plans_of_their_own(ranks):
    assert_equal(ranks(2)(_two_models))


class Mixed(nn.Module):
    """Of two dtypes, which DDP keeps in buckets apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 3000), nn.Linear(3000, 30).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu().double())


def _mixed():
    ddp = plain(Mixed)
    rules = [{"max_ndim": 1, "compression_type": "lossless"}]
    state = cccl.torch.compress(ddp, {"compression_type": "block_float8", "rules": rules})
    train(ddp, 3)
    buckets = {decision.bucket for decision in state.decisions()}
    rows = [r for r in cccl.stats()["rows"] if r["label"] == "small parameters, rules[0]"]
    assert {row["dtype"] for row in rows} == {"float32", "float64"}
    return len(buckets), parameters_digest(ddp)


def test_small_parameters_of_two_dtypes_stay_apart(ranks):
    found = ranks(2)(_mixed)
    assert_equal(found)
    assert found[0][0] >= 2


def _sparse(more):
    rules = [{"max_numel": 30, "compression_type": "none"}]
    ddp = DistributedDataParallel(Words())
    state = cccl.torch.compress(ddp, {"compression_type": "block_float8", "rules": rules, **more})
    for step in range(3):
        indices = torch.tensor([[step, 3 + dist.get_rank()], [7, 7]])
        ddp(indices).square().sum().backward()
    assert len(state.decisions()) == 3
    assert any("no codec" in row.get("reason", "") for row in cccl.stats()["rows"])
    return digest(ddp.module.words.weight.grad.to_dense()), digest(ddp.module.out.weight.grad)


@pytest.mark.parametrize("more", [{}, {"spike_factor": 20}, {"max_relative_error": 0.1}])
def test_sparse_gradients_go_plain_beside_rules(ranks, more):
    """Neither a guard nor a budget looks at them."""
    assert_equal(ranks(2)(_sparse, more))


def _raises():
    ddp = gpt()
    rules = [{**EMBEDDINGS, "compression_type": "block_float6"}, SMALL_ONES]
    cccl.torch.compress(ddp, {**MATRICES_AT_4, "rules": rules, "non_finite": "raise"})
    ddp.module.tokens.weight.register_hook(
        lambda grad: grad.clone().fill_(float("nan")) if dist.get_rank() == 1 else grad
    )
    with pytest.raises(cccl.NonFiniteError, match=r"small parameters, rules\[0\]"):
        backward(ddp)
    found = gradients(ddp)
    assert found["tokens.weight"].isnan().all()
    return sorted(name for name, value in found.items() if value.isnan().any())


def test_an_error_names_bucket_and_rule_and_leaves_other_rules_whole(ranks):
    """F010: what lies beside it in the bucket, but goes another way, shares no block with it."""
    for names in ranks(2)(_raises):
        assert set(names) <= {"tokens.weight", "positions.weight"}


def _freed():
    gc.collect()
    gc.disable()
    try:
        ddp = gpt()
        config = {**MATRICES_AT_4, "error_feedback": "both", "spike_factor": 10}
        state = weakref.ref(cccl.torch.compress(ddp, config))
        for step in range(3):
            backward(ddp, step)
        assert cccl.stats()["total"]["state_bytes"] > 0
        del ddp
        assert state() is None
        until = time.monotonic() + 10
        while cccl.stats()["total"]["state_bytes"] and time.monotonic() < until:
            time.sleep(0.01)  # its thread lets go of the last call
        assert cccl.stats()["total"]["state_bytes"] == 0
    finally:
        gc.enable()


def test_what_a_hook_keeps_goes_with_its_model(ranks):
    """And not only when garbage is collected."""
    ranks(2)(_freed)
