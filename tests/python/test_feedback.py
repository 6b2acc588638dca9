"""Error feedback over loopback: residuals, and what becomes of them."""

from __future__ import annotations

import numpy as np
import pytest
from conformance.codec_cases import FLOATS, ISAS, LOSSY, Case, narrow, widen
from feedback_ranks import TYPES, Model, Remembering, residual_of
from hypothesis import given
from hypothesis import strategies as st
from loopback_ranks import Ranks, assert_same_bits

import cccl
from cccl import _core

# Those whose bytes depend on no seed, which the model knows, and on no prediction.
SEEDLESS = [
    case
    for case in LOSSY
    if case.device == "cpu"
    and case.name != "diff"
    and case.options.get("rounding") != "stochastic"
    and "rotation" not in case.options
]
TOP_K = Case("sparse", {"top_k": 0.1})
BITS2 = Case("block_float2", {})
COUNTS = (1, 127, 129, 2048, 5000, 9973)
each_type = pytest.mark.parametrize("type", TYPES)


def gradients(world: int, count: int, seed: int, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [narrow(rng.standard_t(3, count).clip(-50, 50), dtype) for _ in range(world)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", SEEDLESS, ids=str)
@given(
    second=st.sampled_from([*SEEDLESS, Case("identity", {})]),
    type=st.sampled_from(TYPES),
    legs=st.sampled_from(["sender", "both"]),
    world=st.sampled_from([2, 3, 5]),
    count=st.sampled_from(COUNTS),
    decay=st.sampled_from([1.0, 0.9, 0.5]),
    algorithm=st.sampled_from(["auto", "two_shot", "one_shot"]),
    chunk=st.sampled_from([0, 4096]),
)
def test_feedback_equals_its_model_on_every_rank(
    case, dtype, second, type, legs, world, count, decay, algorithm, chunk
):
    """F110: bit by bit, whatever the algorithm and chunk size."""
    model = Model(case, second, dtype, world, count, legs=legs, type=type, decay=decay)
    with Remembering(world, case.core, second.core, legs=legs, type=type, decay=decay) as ranks:
        for step in range(4):
            arrays = gradients(world, count, step, dtype)
            found = ranks.reduce(arrays, dtype, algorithm=algorithm, chunk_bytes=chunk)
            assert found.tobytes() == model.reduce(arrays).tobytes(), f"step {step}"


@pytest.mark.parametrize("dtype", FLOATS)
@each_type
@given(
    case=st.sampled_from([*(case for case in LOSSY if case.device == "cpu"), TOP_K]),
    world=st.sampled_from([2, 3, 7]),
    count=st.sampled_from(COUNTS),
    steps=st.integers(1, 12),
)
def test_inputs_are_what_was_delivered_and_what_is_kept(type, dtype, case, world, count, steps):
    """Nothing is lost for good, stochastic rounding and rotation included: sums telescope, but for
    what rounding to the residual's own type takes."""
    put = np.zeros(count)
    got = np.zeros(count)
    with Remembering(world, case.core, type=type) as ranks:
        largest = 1.0
        for step in range(steps):
            arrays = gradients(world, count, step, dtype)
            put += np.mean([widen(a, dtype) for a in arrays], axis=0)
            got += widen(ranks.reduce(arrays, dtype, algorithm="one_shot", seed=3), dtype)
            largest = max(largest, np.abs(ranks.senders()).max())
        kept = ranks.senders().mean(axis=0, dtype=np.float64)
        owner = residual_of(ranks.stores[0].save()[0]["owner"])  # in one-shot all have all of it
    rounding = {"float32": 2.0**-21, "bfloat16": 2.0**-8, "block_float8": 2.0**-7}[type]
    bound = steps * (largest + np.abs(put).max()) * 2 * rounding
    assert np.abs(put - got - kept - owner).max() <= bound


@each_type
def test_without_feedback_a_small_constant_gradient_never_arrives_and_with_it_does(type):
    """What 2 bits round to nothing in every step."""
    arrays = [np.full(256, 0.01, np.float32) for _ in range(2)]
    for array in arrays:
        array[::128] = 1.0
    with Ranks(2) as ranks:
        assert not ranks.all_reduce(arrays, "float32", BITS2.core)[0][1:128].any()
    with Remembering(2, BITS2.core, type=type) as ranks:
        total = sum(ranks.reduce(arrays).astype(np.float64) for _ in range(200))
    assert np.abs(total / 200 - arrays[0]).max() < 0.01


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@each_type
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_step_that_is_not_finite_leaves_residuals_as_they_were(type, algorithm, bad):
    """F009: the steps after it equal those of a run that skipped it, on all ranks."""
    outputs = []
    for skips in (False, True):
        with Remembering(3, TOP_K.core, type=type) as ranks:
            for step in range(1, 11):
                arrays = gradients(3, 9000, step)
                if step == 5:
                    if skips:
                        continue
                    arrays[1][7777] = bad
                found = ranks.reduce(arrays, algorithm=algorithm)
                assert np.isfinite(found).all() == (step != 5)
                if step > 5:
                    outputs.append(found.tobytes())
            assert np.isfinite(ranks.senders()).all()
    assert len(outputs) == 10 and outputs[:5] == outputs[5:]


def test_a_step_is_skipped_as_a_whole():
    """Two tensors, one of them with a NaN: an optimizer takes neither, so both keep theirs."""
    outputs = []
    for skips in (False, True):
        with Remembering(2, BITS2.core) as ranks:
            for step in range(1, 7):
                ranks.step = step
                if step == 3 and skips:
                    continue
                first, second = gradients(2, 1000, step), gradients(2, 2000, 100 + step)
                if step == 3:
                    second[0][5] = np.nan
                works = ranks.submit_in_step(first, "float32", [("a", 1000)])
                works += ranks.submit_in_step(second, "float32", [("b", 2000)])
                assert all(work.wait(20) for work in works)
                if step > 3:
                    outputs.append((first[0].tobytes(), second[0].tobytes()))
    assert outputs[:3] == outputs[3:]


def test_a_senders_own_nan_spoils_no_residual_of_reduce_scatter():
    """The rank that sent it knows, whoever's part it is in."""
    store = [_core.StateStore() for _ in range(2)]
    feedback = _core.FeedbackSettings(True, True, "float32", 1.0)
    with Ranks(2) as ranks:
        for bad in (0.0, np.nan):
            arrays = gradients(2, 4000, 1)
            arrays[0][3999] += bad  # of rank 1's part
            outs = [np.empty(2000, np.float32) for _ in range(2)]
            works = [
                ranks.submit(
                    r, "reduce_scatter", arrays[r], outs[r], "float32", BITS2.core,
                    counts=[2000, 2000], store=store[r], layout=_core.Layout([("w", 4000)]),
                    feedback=feedback,
                )
                for r in range(2)
            ]  # fmt: skip
            assert all(work.wait(20) for work in works)
    kept = residual_of(store[0].save()[0]["sender"])
    assert kept.any() and np.isfinite(kept).all()


@each_type
@pytest.mark.parametrize("sizes", [[2000, 2000], [0, 129, 1871]])
def test_reduce_scatter_remembers_what_it_sent(type, sizes):
    """Its mean is not encoded again: no owner has a residual. Parts may begin anywhere."""
    world, count = len(sizes), sum(sizes)
    stores = [_core.StateStore() for _ in range(world)]
    feedback = _core.FeedbackSettings(True, True, type, 1.0)
    put = np.zeros(count)
    got = np.zeros(count)
    with Ranks(world) as ranks:
        for step in range(50):
            arrays = [np.full(count, 0.1 * (r + 1), np.float32) for r in range(world)]
            for array in arrays:
                array[step % 50 :: 50] = 3.0
            put += np.mean(arrays, axis=0)
            outs = [np.empty(n, np.float32) for n in sizes]
            works = [
                ranks.submit(
                    r, "reduce_scatter", arrays[r], outs[r], "float32", BITS2.core, counts=sizes,
                    store=stores[r], layout=_core.Layout([("w", count)]), feedback=feedback,
                )
                for r in range(world)
            ]  # fmt: skip
            assert all(work.wait(20) for work in works)
            got += np.concatenate(outs)
    assert np.abs(put - got).max() < 6  # without feedback: 100
    assert stores[0].save()[0]["owner"]["bytes"] == b""


def test_rows_that_are_zero_stay_zero():
    """F003: in the output and in the residual, exactly."""
    with Remembering(3, TOP_K.core) as ranks:
        for step in range(50):
            arrays = gradients(3, 4096, step)
            for array in arrays:
                array.reshape(-1, 64)[::2] = 0
            assert not ranks.reduce(arrays).reshape(-1, 64)[::2].any()
        assert not ranks.senders().reshape(3, -1, 64)[:, ::2].any()
        assert ranks.senders().any()


@each_type
def test_chunks_window_and_algorithm_change_no_bit(type):
    found = set()
    for algorithm in ("two_shot", "one_shot"):
        for chunk, window in ((0, 2), (4096, 1), (12288, 3)):
            with Remembering(3, BITS2.core, type=type) as ranks:
                outputs = [
                    ranks.reduce(
                        gradients(3, 20011, step), algorithm=algorithm, chunk_bytes=chunk,
                        window=window,
                    ).tobytes()
                    for step in range(3)
                ]  # fmt: skip
            found.add(tuple(outputs))
    assert len(found) == 1


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_keeps_the_same_bits(isa):
    outputs = []
    for forced in ("baseline", isa):
        _core.force_isa(forced)
        with Remembering(2, BITS2.core, type="bfloat16", decay=0.9) as ranks:
            outputs.append([ranks.reduce(gradients(2, 3001, s)).tobytes() for s in range(3)])
    assert outputs[0] == outputs[1]


def test_memory_is_two_of_each_value_flat_over_steps_and_reported():
    """F055: beside the pool. The owner's part shrinks as the world grows."""
    count, before = 1 << 16, cccl.stats()["total"]["state_bytes"]
    for type, size in (("float32", 4), ("bfloat16", 2), ("block_float8", 1 + 2 / 128)):
        for world in (2, 4):
            with Remembering(world, BITS2.core, type=type) as ranks:
                held = set()
                for step in range(20):
                    ranks.reduce(gradients(world, count, step), algorithm="two_shot")
                    held.add(ranks.stores[0].bytes)
                assert held == {int(2 * size * (count + count / world))}
                total = cccl.stats()["total"]["state_bytes"]
                assert total - before == sum(store.bytes for store in ranks.stores)
            del ranks
    assert cccl.stats()["total"]["state_bytes"] == before


def test_statistics_count_calls_with_feedback():
    with Remembering(2, BITS2.core) as ranks:
        ranks.reduce(gradients(2, 1000, 0), label="with")
        ranks.all_reduce(gradients(2, 1000, 0), "float32", BITS2.core, label="without")
    rows = {row["label"]: row["feedback_calls"] for row in cccl.stats()["rows"]}
    assert rows == {"with": 2, "without": 0}
    cccl.configure({"error_feedback": "both", "attach_ddp": False})
    assert "error_feedback: 2 collectives had none, as they have no label" in cccl.report()


def test_a_layout_that_does_not_fit_is_refused_before_anything_is_sent():
    refused = pytest.raises(cccl.ConfigError, match="7 values, the tensor 1000")
    with Remembering(2, BITS2.core) as ranks, refused:
        ranks.reduce(gradients(2, 1000, 0), layout=[("w", 7)])


def test_ranks_whose_feedback_differs_find_out():
    with Remembering(2, BITS2.core) as ranks:
        arrays = gradients(2, 1000, 0)
        works = [
            ranks.submit(
                r, "all_reduce", arrays[r], arrays[r], "float32", BITS2.core,
                store=ranks.stores[r], layout=_core.Layout([("w", 1000)]),
                feedback=_core.FeedbackSettings(True, r == 0, "float32", 1.0),
            )
            for r in range(2)
        ]  # fmt: skip
        for work in works:
            with pytest.raises(cccl.MismatchError, match=r"error feedback sender owner float32"):
                work.wait(20)
    assert_same_bits([np.isnan(a) for a in arrays])
