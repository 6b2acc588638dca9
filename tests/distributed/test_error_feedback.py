"""Error feedback under DDP, FSDP and on labelled tensors."""

from __future__ import annotations

import io
import logging
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from expect import assert_equal, digest, gradient, parameters_digest
from test_ddp import plain, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cccl
import cccl.torch

TOP_K = {"compression_type": "sparse", "top_k": 0.05, "error_feedback": "both"}


def deep() -> nn.Module:
    """Of several buckets, which DDP rebuilds after the first step."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 200), nn.ReLU(), nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 7)
    )


def kept(store) -> dict[str, torch.Tensor]:
    """Of each parameter, what this rank keeps of it in float32."""
    found = {}
    for tensor in store.state_dict()["tensors"]:
        values = tensor["sender"]["bytes"].view(torch.float32)
        pieces = values.split([count for _, count in tensor["layout"]])
        found |= {
            name: piece.clone() for (name, _), piece in zip(tensor["layout"], pieces, strict=True)
        }
    return found


def mean_over_ranks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in tensors.values():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return tensors


def _from_the_first_step():
    ddp = plain(deep, bucket_cap_mb=0.1)
    state = cccl.torch.compress(ddp, TOP_K)
    train(ddp, 10)
    rows = [row for row in cccl.stats()["rows"] if not row["plain"]]
    assert all(row["feedback_calls"] == row["calls"] for row in rows)
    assert cccl.torch.state_of(ddp) is state.store
    assert state.store.moves > 0
    assert cccl.stats()["total"]["state_bytes"] == state.store.nbytes
    size = state.store.nbytes
    train(ddp, 3)
    assert state.store.nbytes == size
    return parameters_digest(ddp)


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_stay_equal_from_the_first_step_on(ranks, world):
    """F047: through the rebuilding of buckets; memory is reported and does not grow."""
    assert_equal(ranks(world)(_from_the_first_step))


def _through_the_rebuild(register):
    """The first step fills residuals, the second has a gradient of zero and other buckets."""
    ddp = plain(deep, bucket_cap_mb=0.1)
    settings = {**TOP_K, "error_feedback": "sender", "result_type": "identity",
                "residual_type": "float32"}  # fmt: skip
    if register == "compress":
        state = cccl.torch.compress(ddp, settings)
        names = [name for name, _ in ddp.module.named_parameters()]
    else:
        state = cccl.torch.CompressionState(config=settings)
        ddp.register_comm_hook(state, cccl.torch.compression_hook)
    train(ddp, 1)
    before = mean_over_ranks(kept(state.store))
    ddp.zero_grad()
    (ddp(gradient(dist.get_rank(), (8, 24), torch.float32)).sum() * 0).backward()
    if register != "compress":  # in order of appearance
        names = [state.names.of(parameter) for parameter in ddp.parameters()]
    after = mean_over_ranks(kept(state.store))
    for name, parameter in zip(names, ddp.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad.flatten() + after[name], before[name], rtol=0, atol=1e-7
        )
    assert any(values.any() for values in before.values())
    assert any(parameter.grad.any() for parameter in ddp.parameters())
    assert state.store.moves > 0
    return parameters_digest(ddp)


@pytest.mark.parametrize("register", ["compress", "hook"])
def test_residuals_follow_their_parameters_through_ddps_rebuild(ranks, register):
    """F047, F049: what the first step lost arrives later, whatever bucket it is in then."""
    assert_equal(ranks(2)(_through_the_rebuild, register))


class Sometimes(nn.Module):
    """With a layer that every other step leaves out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(24, 300), nn.Linear(300, 300)
        self.last, self.uses = nn.Linear(300, 7), True

    def forward(self, x):
        x = self.always(x).relu()
        return self.last(self.sometimes(x) if self.uses else x)


def _accumulating():
    ddp = plain(Sometimes, find_unused_parameters=True)
    state = cccl.torch.compress(ddp, TOP_K)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    synchronised = 0
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        before = state.store.state_dict()["tensors"]
        for micro in range(4):
            ddp.module.uses = (step + micro) % 2 == 0
            batch = gradient(dist.get_rank(), (8, 24), torch.float32, seed=10 * step + micro)
            with ddp.no_sync() if micro < 3 else nullcontext():
                (ddp(batch).square().mean() / 4).backward()
            if micro < 3:
                same = state.store.state_dict()["tensors"]
                assert [_bytes(t) for t in same] == [_bytes(t) for t in before]
        synchronised += 1
        optimizer.step()
    rows = [row for row in cccl.stats()["rows"] if row["label"] == "bucket 0"]
    assert sum(row["feedback_calls"] for row in rows) == synchronised
    assert any(_bytes(t) for t in state.store.state_dict()["tensors"])
    return parameters_digest(ddp)


def _bytes(tensor) -> bytes:
    return b"".join(tensor[leg]["bytes"].numpy().tobytes() for leg in ("sender", "owner"))


def test_residuals_change_once_per_synchronisation_and_zero_grad_leaves_them(ranks):
    """F049, F059"""
    assert_equal(ranks(2)(_accumulating))


def _nan_step(skips):
    ddp = plain(deep, bucket_cap_mb=0.1)
    state = cccl.torch.compress(ddp, TOP_K)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(10):
        if step == 5 and skips:
            continue
        optimizer.zero_grad()
        batch = gradient(dist.get_rank(), (8, 24), torch.float32, seed=step)
        loss = ddp(batch).square().mean()
        if step == 5 and dist.get_rank() == 0:  # of one bucket alone
            hook = ddp.module[4].bias.register_hook(lambda g: torch.full_like(g, float("nan")))
            loss.backward()
            hook.remove()
        else:
            loss.backward()
        finite = all(p.grad.isfinite().all() for p in ddp.parameters())
        assert finite == (step != 5)
        if finite:  # what a GradScaler does
            optimizer.step()
    assert state.store.nbytes
    return parameters_digest(ddp)


def test_a_step_with_a_nan_equals_one_that_was_skipped(ranks):
    """F009: in all buckets of it, on all ranks."""
    found = ranks(2)(_nan_step, False)
    assert_equal(found)
    assert found == ranks(2)(_nan_step, True)


def _saved():
    ddp = plain(deep)
    state = cccl.torch.compress(ddp, {**TOP_K, "residual_type": "float32"})
    train(ddp, 3)
    file = io.BytesIO()
    torch.save(state.store.state_dict(), file)
    return file.getvalue()


def _loaded(saved):
    """Of one's own state; the mean of residuals if the world is another; nothing else."""
    ddp = plain(deep)
    state = cccl.torch.compress(ddp, {**TOP_K, "residual_type": "float32"})
    states = [torch.load(io.BytesIO(one), weights_only=True) for one in saved]
    state.store.load_state_dict(states)
    exact = [kept_of(one) for one in states]
    found = kept(state.store)
    same = len(states) == dist.get_world_size()
    for name, values in found.items():
        wanted = torch.stack([one[name] for one in exact])
        wanted = wanted[dist.get_rank()] if same else wanted.mean(0)
        torch.testing.assert_close(values, wanted, rtol=0, atol=1e-7)
    assert len(found) == 6
    train(ddp, 2)
    if not same:
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger("cccl").addHandler(handler)
        state.store.load_state_dict(states[0])
        logging.getLogger("cccl").removeHandler(handler)
        assert state.store.nbytes == 0
        assert "dropped" in records[0].getMessage()
    return parameters_digest(ddp)


def kept_of(state) -> dict[str, torch.Tensor]:
    class Held:
        @staticmethod
        def state_dict():
            return state

    return kept(Held)


@pytest.mark.parametrize("world", [4, 2, 3])
def test_a_saved_state_is_loaded_folded_or_dropped_with_a_warning(ranks, world):
    """F051: at the same world each rank has its own, at another the mean; never a shape error."""
    assert_equal(ranks(world)(_loaded, ranks(4)(_saved)))


def _refusals():
    store = cccl.torch.state_of()
    for wrong in ({}, {"version": 9}, [7]):
        with pytest.raises(cccl.ConfigError, match="version 1"):
            store.load_state_dict(wrong)
    damaged = {"version": 1, "rank": dist.get_rank(), "world": 2, "tensors": [{"key": "w"}]}
    with pytest.raises(cccl.ConfigError, match="damaged"):
        store.load_state_dict(damaged)
    with pytest.raises(cccl.ConfigError, match="is not compressed"):
        cccl.torch.state_of(deep())


def test_what_is_no_saved_state_is_refused(ranks):
    ranks(2)(_refusals)


def _labelled(collective):
    """A gradient too small for 2 bits arrives, in the end, if the tensor has a name."""
    config = {"compression_type": "block_float2", "error_feedback": "both"}
    total = {"w": 0.0, None: 0.0}
    for label in total:
        for _ in range(60):
            tensor = torch.full((4096,), 0.02)
            tensor[::128] = 1.0
            if collective == "all_reduce":
                cccl.torch.all_reduce(tensor, config=config, label=label)
            else:
                output = torch.empty(2048)
                cccl.torch.reduce_scatter(output, tensor, config=config, label=label)
                tensor = output
            total[label] += tensor.double()
    assert not total[None][1:128].any()
    assert (total["w"][1:128] / 60 - 0.02).abs().max() < 0.01
    assert cccl.torch.state_of().nbytes > 0
    rows = {row["label"]: row for row in cccl.stats()["rows"]}
    assert rows["w"]["feedback_calls"] == 60 and rows[collective]["feedback_calls"] == 0
    cccl.torch.state_of().reset()
    return digest(total["w"]) if collective == "all_reduce" else ""


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_tensors_with_a_label_have_feedback_and_others_have_none(ranks, collective):
    """Nothing else would tell one tensor from another of its size."""
    assert_equal(ranks(2)(_labelled, collective))


def _dtypes():
    digests = []
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        for step in range(3):
            tensor = gradient(dist.get_rank(), (37, 83), dtype, seed=step)
            cccl.torch.all_reduce(tensor, config=TOP_K, label=str(dtype))
            digests.append(digest(tensor))
    assert sum(row["feedback_calls"] for row in cccl.stats()["rows"]) == 12
    cccl.torch.state_of().reset()
    return digests


def test_every_dtype_has_feedback(ranks):
    assert_equal(ranks(3)(_dtypes))


def _mlp_losses():
    losses = {}
    for name, config in (
        ("plain", None),
        ("4 bits", {"compression_type": "block_float4"}),
        ("4 bits, feedback", {"compression_type": "block_float4", "error_feedback": "both"}),
    ):
        ddp = plain(deep)
        if config:
            cccl.torch.compress(ddp, config)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        target = gradient(9, (24, 7), torch.float32)
        for step in range(300):
            optimizer.zero_grad()
            batch = gradient(dist.get_rank(), (16, 24), torch.float32, seed=step)
            loss = (ddp(batch) - (batch @ target).tanh()).square().mean()
            loss.backward()
            optimizer.step()
        held_out = gradient(7, (512, 24), torch.float32, seed=10**6)
        with torch.no_grad():
            wanted = (held_out @ target).tanh()
            losses[name] = float((ddp.module(held_out) - wanted).square().mean())
    return losses


def test_training_at_four_bits_ends_where_plain_training_does(ranks):
    """F011: 300 steps on 4 ranks, within 10 % of its loss, with feedback and without."""
    found = ranks(4)(_mlp_losses)
    assert_equal(found)
    for name, loss in found[0].items():
        assert loss == pytest.approx(found[0]["plain"], rel=0.1), name


def _diff(config):
    ddp = plain(deep, bucket_cap_mb=0.1)
    state = cccl.torch.compress(ddp, config)
    train(ddp, 6)
    assert state.store.nbytes
    return parameters_digest(ddp)


@pytest.mark.parametrize("feedback", ["none", "both"])
@pytest.mark.parametrize("world", [2, 3])
def test_replicas_stay_equal_with_a_prediction(ranks, world, feedback):
    """Through the rebuilding of buckets, feedback around it or not."""
    config = {"compression_type": "diff(block_float4)", "error_feedback": feedback}
    assert_equal(ranks(world)(_diff, config))


def _sharded():
    model = deep()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    cccl.torch.compress_fsdp(model, {"compression_type": "block_float2", "error_feedback": "both"})
    for step in range(4):
        batch = gradient(dist.get_rank(), (8, 24), torch.float32, seed=step)
        model(batch).square().mean().backward()
    rows = [row for row in cccl.stats()["rows"] if row["collective"] == "reduce_scatter"]
    assert {row["feedback_calls"] for row in rows} == {4}
    count = sum(p.numel() for p in model.parameters())
    assert cccl.torch.state_of(model).nbytes >= 4 * count  # of whole gradients, not of shards


def test_sharded_models_have_feedback_of_what_they_send(ranks):
    ranks(2)(_sharded)
