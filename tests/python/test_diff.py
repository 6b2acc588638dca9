"""The codec diff over loopback: the last mean as a prediction that all ranks share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conformance import reference
from conformance.codec_cases import DTYPES, FLOATS, ISAS, Case, narrow, widen
from feedback_ranks import Remembering, residual_of
from hypothesis import given
from hypothesis import strategies as st
from loopback_ranks import Ranks, all_reduce, assert_same_bits

import cccl
from cccl import _core

DIFF = Case("diff", {"inner": "block_float4"})
INNER = Case("block_float4", {})
INNERS = ("block_float8", "block_float4", "block_float2", "cast_bf16")
COUNTS = (1, 129, 2048, 5000, 9973)


def gradients(world: int, count: int, step: int, dtype: str = "float32") -> list[np.ndarray]:
    """A direction that all ranks see, at every step, and noise of their own."""
    shared = np.random.default_rng(1).standard_t(3, count).clip(-50, 50)
    rng = np.random.default_rng(100 + step)
    return [
        narrow((1 + step / 10) * shared + 0.3 * rng.standard_normal(count), dtype)
        for _ in range(world)
    ]


def nmse(found: np.ndarray, arrays: list[np.ndarray]) -> float:
    mean = np.mean([a.astype(np.float64) for a in arrays], axis=0)
    return float(((found - mean) ** 2).mean() / (mean**2).mean())


class Model:
    """What ranks must do: FORMAT.md of diff and docs/feedback.md in NumPy."""

    def __init__(self, first: Case, second: Case, dtype: str, count: int):
        self.legs = [reference.model(c.name, c.options, dtype) for c in (first, second)]
        self.dtype, self.count = dtype, count
        self.known: Any = None

    def reduce(self, arrays: list[np.ndarray]) -> np.ndarray:
        first, second = self.legs
        for leg in self.legs:
            leg.prediction = self.known
        number, count = DTYPES[self.dtype][0], self.count
        payloads = [reference.payload(first, reference.load(a, self.dtype), number) for a in arrays]
        mean = reference.mean(first, payloads, len(arrays), self.dtype, count)
        values = second.values(second.body(mean, 0, 0), count)
        if self.dtype == "float16":
            values = np.where(np.isfinite(values), values.clip(-65504, 65504), values)
        out = reference.store(values, self.dtype)
        known = reference.load(out, self.dtype)
        self.known = np.where(np.isfinite(known), known, 0).astype(known.dtype)
        return out


def without_feedback(world: int, codec: Any, result: Any = None) -> Remembering:
    ranks = Remembering(world, codec, result)
    ranks.feedback = _core.FeedbackSettings(False, False, "float32", 1.0)
    return ranks


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("inner", INNERS)
@given(
    second=st.sampled_from([DIFF, INNER, Case("diff", {})]),
    world=st.sampled_from([2, 3, 5]),
    count=st.sampled_from(COUNTS),
    algorithm=st.sampled_from(["auto", "two_shot", "one_shot"]),
    chunk=st.sampled_from([0, 8192]),
    bad=st.booleans(),
)
def test_diff_equals_its_model_on_every_rank(
    dtype, inner, second, world, count, algorithm, chunk, bad
):
    """Bit by bit, a step with a NaN included."""
    first = Case("diff", {"inner": inner})
    model = Model(first, second, dtype, count)
    with without_feedback(world, first.core, second.core) as ranks:
        for step in range(4):
            arrays = gradients(world, count, step, dtype)
            if bad and step == 2:
                arrays[1][count // 2] = narrow(np.array(np.nan), dtype)
            found = ranks.reduce(arrays, dtype, algorithm=algorithm, chunk_bytes=chunk)
            expected = model.reduce(arrays)
            np.testing.assert_array_equal(widen(found, dtype), widen(expected, dtype))


def test_what_ranks_share_is_sent_with_a_tenth_of_the_error():
    with without_feedback(3, DIFF.core) as ranks, Ranks(3) as plain:
        for step in range(5):
            arrays = gradients(3, 20000, step)
            alone = plain.all_reduce(arrays, "float32", INNER.core)[0]
            error = nmse(ranks.reduce(arrays), arrays)
            assert error < 0.1 * nmse(alone, arrays) or step == 0


def test_without_a_prediction_it_is_its_inner_codec():
    """The first step, tensors without a name, and every cell that the prediction does not fit."""
    arrays = gradients(3, 20000, 0)
    wanted = all_reduce(3, arrays, "float32", INNER.core)[0]
    assert all_reduce(3, arrays, "float32", DIFF.core)[0].tobytes() == wanted.tobytes()
    with without_feedback(3, DIFF.core) as ranks:
        assert ranks.reduce(arrays).tobytes() == wanted.tobytes()
        ranks.reduce(arrays)
        noise = [
            np.random.default_rng(r).standard_normal(20000).astype(np.float32) for r in (7, 8, 9)
        ]
        half = [np.concatenate([a[:8192], n[8192:]]) for a, n in zip(arrays, noise, strict=True)]
        alone = all_reduce(3, half, "float32", INNER.core)[0]
        found = ranks.reduce(half)
    parts = slice(0, 8192), slice(8192, None)
    errors = [[nmse(x[p], [h[p] for h in half]) for p in parts] for x in (found, alone)]
    assert errors[0][0] < 0.1 * errors[1][0]
    assert errors[0][1] < 1.05 * errors[1][1]


def test_a_nan_stays_in_its_block_and_the_next_step_is_sound():
    with without_feedback(2, DIFF.core) as ranks:
        for step in range(8):
            arrays = gradients(2, 20000, step)
            if step == 5:
                arrays[0][3000] = np.inf
            found = ranks.reduce(arrays)
            assert np.isnan(found).sum() == (128 if step == 5 else 0)
            if step not in (0, 5):
                assert nmse(found, arrays) < 0.004


def test_it_begins_anew_with_other_buckets_ranks_or_connections():
    """A rebuilt bucket, a resume and a recovery: no rank goes by what another may not have."""
    arrays = gradients(2, 5000, 3)
    fresh = all_reduce(2, arrays, "float32", INNER.core)[0].tobytes()
    with without_feedback(2, DIFF.core) as ranks:
        ranks.reduce(gradients(2, 5000, 2))
        assert ranks.reduce(arrays, layout=[("w", 3000), ("v", 2000)]).tobytes() == fresh
        stores = ranks.stores
    with without_feedback(2, DIFF.core) as ranks:
        ranks.stores = stores  # what outlives a group that failed
        assert ranks.reduce(arrays).tobytes() == fresh
        assert ranks.reduce(arrays).tobytes() != fresh
        for store in stores:
            store.reset()
        assert ranks.reduce(arrays).tobytes() == fresh


def test_a_rank_that_goes_by_another_mean_is_found_out():
    """Reset on one rank alone: an error on both, and never a wrong value."""
    with without_feedback(2, DIFF.core) as ranks:
        ranks.reduce(gradients(2, 9000, 0))
        ranks.reduce(gradients(2, 9000, 1))
        ranks.stores[1].reset()
        arrays = gradients(2, 9000, 2)
        works = ranks.submit_in_step(arrays, "float32", [("w", 9000)], algorithm="two_shot")
        with pytest.raises(
            cccl.CorruptPayloadError, match=r"prediction number 2 .* here is number 0"
        ):
            works[1].wait(20)
        with pytest.raises((cccl.CorruptPayloadError, cccl.PeerAbortedError)):
            works[0].wait(20)
    assert_same_bits([np.isnan(a) for a in arrays])
    assert np.isnan(arrays[0]).all()


def test_feedback_around_diff_loses_nothing():
    put = got = 0.0
    with Remembering(3, DIFF.core) as ranks:
        for step in range(6):
            arrays = gradients(3, 5000, step)
            put = put + np.mean([a.astype(np.float64) for a in arrays], axis=0)
            got = got + ranks.reduce(arrays, algorithm="one_shot").astype(np.float64)
        lost = ranks.senders().mean(axis=0, dtype=np.float64)
        lost += residual_of(ranks.stores[0].save()[0]["owner"])
    assert np.abs(put - got - lost).max() < 1e-4


def test_it_keeps_one_tensor_more_and_says_so():
    before = cccl.stats()["total"]["state_bytes"]
    with without_feedback(2, DIFF.core) as ranks:
        for step in range(5):
            ranks.reduce(gradients(2, 10000, step))
            assert [store.bytes for store in ranks.stores] == [40000, 40000]
        assert cccl.stats()["total"]["state_bytes"] - before == 80000


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_predicts_the_same(isa):
    outputs = []
    for forced in ("baseline", isa):
        _core.force_isa(forced)
        with without_feedback(2, DIFF.core) as ranks:
            outputs.append([ranks.reduce(gradients(2, 5001, s)).tobytes() for s in range(3)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"compression_type": "diff(diff)"}, "inner = 'diff'; allowed: a codec that holds every"),
        ({"compression_type": "diff(sparse)"}, "inner = 'sparse'; allowed: a codec that holds"),
        ({"compression_type": "diff(identity)"}, "inner = 'identity'; allowed: .* with a loss"),
        ({"compression_type": "sparse(diff)"}, "inner = 'diff'; allowed: a codec that holds"),
        ({"compression_type": "diff", "rotation": "hadamard"}, "rotation = 'hadamard'"),
        ({"compression_type": "auto", "auto_codecs": ["diff"]}, "none that predicts"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_when_it_is_set(settings, match):
    with pytest.raises(cccl.ConfigError, match=match):
        cccl.configure(settings)
