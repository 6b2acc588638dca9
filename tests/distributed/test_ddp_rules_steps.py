"""What ranks must agree on under rules, and what steps change."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from expect import assert_equal, digest, parameters_digest
from test_ddp import compressed_rows, mlp, plain, train
from test_ddp_rules import EMBEDDINGS, MATRICES_AT_4, SMALL_ONES, backward, gpt, learn

import cccl
import cccl.torch


def _disagree(what):
    odd = dist.get_rank() == dist.get_world_size() - 1
    config, step = MATRICES_AT_4, 0
    if what == "rules" and odd:
        config = {
            **config,
            "rules": [EMBEDDINGS, {**SMALL_ONES, "compression_type": "block_float8"}],
        }
    elif what == "a name" and odd:
        config = {**config, "rules": [{**EMBEDDINGS, "name": "tokens.*"}, SMALL_ONES]}
    elif what == "none" and odd:
        config = {"compression_type": "block_float4"}
    elif what == "step" and odd:
        step = 7
    elif what == "start_step":
        config = {**config, "start_step": 5 if odd else 0}
    group = dist.new_group()
    ddp = gpt(process_group=group)
    cccl.torch.compress(ddp, config, step=step)
    with pytest.raises(cccl.MismatchError) as caught:
        backward(ddp)
    dist.destroy_process_group(group)
    return str(caught.value)


@pytest.mark.parametrize("what", ["rules", "a name", "none", "step", "start_step"])
def test_ranks_that_decide_differently_are_told(ranks, what):
    found = ranks(3)(_disagree, what)
    assert_equal(found)
    assert "rank 2 has" in found[0]


def _scheduled():
    ddp = plain(mlp)
    config = {"compression_type": "block_float4", "start_step": 2,
              "schedule": [[3, "block_float8"], [5, "block_float6", "block_float8"]]}  # fmt: skip
    state = cccl.torch.compress(ddp, config)
    seen = []
    for step in range(7):
        assert state.step == step
        cccl.reset_stats()
        train(ddp, 1)
        (row,) = cccl.stats()["rows"]
        seen.append("plain" if row["plain"] else row["codec"].replace("block_float", "")[0])
    assert seen == ["plain", "plain", "4", "8", "8", "6", "6"]
    again = plain(mlp)
    cccl.torch.compress(again, config, step=state.step)
    cccl.reset_stats()
    train(again, 1)
    assert compressed_rows()[0]["codec"].startswith("block_float6"), "it goes on, and warms up once"
    return parameters_digest(ddp)


def test_steps_change_the_codec_on_all_ranks_alike(ranks):
    assert_equal(ranks(2)(_scheduled))


def _first_steps_plain():
    reference = [digest(p) for p in train(plain(mlp), 3).parameters()]
    ddp = plain(mlp)
    cccl.torch.compress(ddp, {"compression_type": "block_float2", "start_step": 3})
    assert [digest(p) for p in train(ddp, 3).parameters()] == reference
    train(ddp, 1)
    assert compressed_rows()


def test_steps_before_the_start_have_the_bits_of_plain_ddp(ranks):
    ranks(2)(_first_steps_plain)


def _feedback():
    ddp = gpt()
    config = {**MATRICES_AT_4, "compression_type": "block_float2", "error_feedback": "both",
              "schedule": [[4, "block_float3"]]}  # fmt: skip
    state = cccl.torch.compress(ddp, config)
    learn(ddp, 3)
    rows = compressed_rows()
    assert rows and all(row["feedback_calls"] == row["calls"] for row in rows)
    names = {name for tensor in state.store.state_dict()["tensors"] for name, _ in tensor["layout"]}
    lossy = {n for n, p in ddp.module.named_parameters() if p.dim() > 1}
    assert {n for n in names if not n.endswith("(apart)")} == lossy
    kept = state.store.nbytes
    learn(ddp, 3)
    assert state.store.nbytes == kept
    return parameters_digest(ddp)


def test_what_a_rule_sends_plain_has_no_residual(ranks):
    """Others' residuals follow their parameters through rebuilt buckets and changes of codec."""
    assert_equal(ranks(2)(_feedback))


def _alone():
    ddp = gpt()
    state = cccl.torch.compress(ddp, MATRICES_AT_4)
    backward(ddp)
    assert {row["reason"] for row in cccl.stats()["rows"]} == {"world size 1"}
    assert state.decisions() == []


def test_a_single_rank_sends_nothing(ranks):
    ranks(1)(_alone)


def _accumulated_and_joined():
    ddp = gpt(find_unused_parameters=True)
    state = cccl.torch.compress(ddp, MATRICES_AT_4)
    with ddp.no_sync():
        backward(ddp, 0)
    assert state.step == 0
    backward(ddp, 1)
    assert state.step == 1
    with ddp.join():
        for step in range(2 + 2 * dist.get_rank()):
            ddp.zero_grad()
            backward(ddp, step)
    return state.step, parameters_digest(ddp)


def test_steps_are_synchronisations_and_those_shadowed_for_others(ranks):
    found = ranks(2)(_accumulated_and_joined)
    assert_equal(found)
    assert found[0][0] == 5
