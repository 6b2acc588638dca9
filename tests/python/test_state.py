"""What ranks keep between steps, when tensors are cut otherwise, saved and loaded."""

from __future__ import annotations

import numpy as np
import pytest
from conformance.codec_cases import Case
from feedback_ranks import TYPES, Remembering
from test_feedback import gradients

import cccl

TOP_K = Case("sparse", {"top_k": 0.1})
BITS2 = Case("block_float2", {})
each_type = pytest.mark.parametrize("type", TYPES)


@each_type
def test_a_run_that_was_saved_goes_on_as_if_it_had_not_stopped(type):
    """F051: bit by bit, in every type."""
    with Remembering(3, TOP_K.core, type=type) as ranks:
        for step in range(4):
            ranks.reduce(gradients(3, 9973, step))
        saved = [store.save() for store in ranks.stores]
        wanted = [ranks.reduce(gradients(3, 9973, step)).tobytes() for step in range(4, 8)]
    with Remembering(3, TOP_K.core, type=type) as ranks:
        for store, state in zip(ranks.stores, saved, strict=True):
            store.load([state])
        found = [ranks.reduce(gradients(3, 9973, step)).tobytes() for step in range(4, 8)]
        assert all(store.resets == 0 for store in ranks.stores)
    assert found == wanted


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@each_type
def test_residuals_folded_into_another_world_keep_their_mean(type, world):
    """F051: what the next mean gets is what it would have got."""
    with Remembering(4, BITS2.core, type=type) as ranks:
        for step in range(3):
            ranks.reduce(gradients(4, 5000, step))
        saved = [store.save() for store in ranks.stores]
        mean = ranks.senders().mean(axis=0, dtype=np.float64)
    with Remembering(world, BITS2.core, type=type) as ranks:
        for store in ranks.stores:
            store.load(saved)
        kept = ranks.senders()
        if world > 1:
            ranks.reduce(gradients(world, 5000, 9))
            assert ranks.stores[0].resets == 0
    rounding = {"float32": 2.0**-22, "bfloat16": 2.0**-8, "block_float8": 2.0**-7}[type]
    assert np.abs(kept - mean).max() <= rounding * np.abs(mean).max()
    assert np.abs(mean).max() > 0.1


def test_states_of_different_steps_or_broken_ones_are_refused():
    with Remembering(2, BITS2.core) as ranks:
        ranks.reduce(gradients(2, 5000, 0))
        whole = ranks.stores[0].save()
        ranks.reduce(gradients(2, 300, 0), layout=[("other", 300)])
        more, before = ranks.stores[1].save(), ranks.stores[0].bytes
        with pytest.raises(cccl.ConfigError, match="ranks differ at 'other"):
            ranks.stores[0].load([more, whole])
        whole[0]["sender"]["bytes"] = whole[0]["sender"]["bytes"][:-1]
        with pytest.raises(cccl.ConfigError, match="5000 values has 19999 bytes"):
            ranks.stores[0].load([whole])
        assert ranks.stores[0].bytes == before, "what there was stays"


@each_type
def test_a_residual_follows_its_parameters_into_other_tensors(type):
    """As DDP rebuilds buckets: cut otherwise, in another order, merged and split."""
    names = {"a": 1000, "b": 300, "c": 5000, "d": 1, "e": 2049}
    before = [["a", "b", "c"], ["d", "e"]]
    after = [["e"], ["c", "a"], ["d", "b"]]

    def step(ranks, number, buckets, scale):
        ranks.step = number
        for bucket in buckets:
            count = sum(names[n] for n in bucket)
            arrays = [scale * a for a in gradients(2, count, number)]
            layout = [(n, names[n]) for n in bucket]
            assert all(w.wait(20) for w in ranks.submit_in_step(arrays, "float32", layout))

    with Remembering(2, TOP_K.core, type=type) as ranks:
        for number in (1, 2):
            step(ranks, number, before, 1)
        kept = {name: ranks.senders(name) for name in names}
        step(ranks, 3, after, np.float32(np.nan))  # which changes nothing but where it lies
        assert [store.moves for store in ranks.stores] == [3, 3]
        for name, values in kept.items():
            rounding = 2.0**-7 if type == "block_float8" else 0  # which rounds in other blocks
            moved = ranks.senders(name)
            assert np.abs(moved - values).max() <= rounding * np.abs(values).max() * 50
            assert values.size < 100 or values.any()
        size = ranks.stores[0].bytes
        step(ranks, 4, after, 1)
        step(ranks, 5, after, 1)
        assert ranks.stores[0].bytes == size, "what is left of the old buckets is given back"
        assert [store.moves for store in ranks.stores] == [3, 3]


def test_a_parameter_of_another_shape_begins_anew_and_is_counted():
    with Remembering(2, TOP_K.core) as ranks:
        ranks.reduce(gradients(2, 3000, 0))
        kept = ranks.senders()
        ranks.reduce([np.zeros(4000, np.float32)] * 2)
        assert kept.any() and not ranks.senders().any()
        assert [store.resets > 0 for store in ranks.stores] == [True, True]


def test_an_owner_whose_shard_moved_begins_anew_and_is_counted():
    with Remembering(2, BITS2.core) as ranks:
        ranks.reduce(gradients(2, 100000, 0), algorithm="two_shot", chunk_bytes=65536)
        assert ranks.stores[0].resets == 0
        ranks.reduce(gradients(2, 100000, 0), algorithm="two_shot", chunk_bytes=131072)
        assert ranks.stores[0].resets == 1
        assert ranks.senders().any()


def test_reset_forgets_everything():
    """F059"""
    with Remembering(2, TOP_K.core) as ranks:
        first = ranks.reduce(gradients(2, 3000, 0)).tobytes()
        assert ranks.reduce(gradients(2, 3000, 0)).tobytes() != first
        for store in ranks.stores:
            store.reset()
            assert store.bytes == 0
        assert ranks.reduce(gradients(2, 3000, 0)).tobytes() == first
