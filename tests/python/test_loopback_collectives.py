"""Collectives of ranks in one process, against the model of the formats."""

from __future__ import annotations

import numpy as np
import pytest
from conformance import reference
from conformance.codec_cases import CASES, FLOATS, Case, bound_of, narrow, storage, widen
from hypothesis import given
from hypothesis import strategies as st
from loopback_ranks import WORLDS, Ranks, all_reduce, assert_same_bits

import cccl

COUNTS = (0, 1, 2, 3, 7, 127, 128, 129, 1000, 2305, 9973)
ALGORITHMS = ("auto", "two_shot", "one_shot")
each_codec = pytest.mark.parametrize("case", CASES, ids=str)
# Those whose bytes depend on no seed.
SEEDLESS = [
    case
    for case in CASES
    if case.options.get("rounding") != "stochastic" and "rotation" not in case.options
]

worlds = st.sampled_from([*WORLDS, 8])
counts = st.sampled_from(COUNTS) | st.integers(0, 3000)


def gradients(world: int, count: int, dtype: str, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [narrow(rng.standard_t(2, count).clip(-99, 99), dtype) for _ in range(world)]


def expected(first: Case, second: Case, arrays: list[np.ndarray], dtype: str, average: bool):
    """decode -> fp32 sum in rank order -> divide once -> encode -> decode -> round."""
    one, two = (reference.model(c.name, c.options, dtype) for c in (first, second))
    count, number = arrays[0].size, 1
    payloads = [reference.payload(one, reference.load(a, dtype), number) for a in arrays]
    mean = reference.mean(one, payloads, len(arrays) if average else 1, dtype, count)
    values = two.values(two.body(mean, 0, 0), count)
    if dtype == "float16":
        values = np.where(np.isfinite(values), values.clip(-65504, 65504), values)
    return reference.store(values, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", SEEDLESS, ids=str)
@given(
    world=worlds.filter(lambda w: w > 1),
    count=counts,
    average=st.booleans(),
    algorithm=st.sampled_from(ALGORITHMS),
    chunk=st.sampled_from([0, 4096, 8192]),
    window=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 99),
)
def test_all_reduce_equals_the_model_on_every_rank(
    case, dtype, world, count, average, algorithm, chunk, window, seed
):
    """F006, F024, F025, F030, F108: whatever the algorithm, chunk size and window."""
    arrays = gradients(world, count, dtype, seed)
    found = all_reduce(
        world, arrays, dtype, case.core, average=average, algorithm=algorithm,
        chunk_bytes=chunk, window=window,
    )  # fmt: skip
    assert_same_bits(found)
    assert found[0].tobytes() == expected(case, case, arrays, dtype, average).tobytes()


@given(
    first=st.sampled_from(SEEDLESS),
    second=st.sampled_from(SEEDLESS),
    world=st.sampled_from([2, 3, 5]),
    count=counts,
    dtype=st.sampled_from(FLOATS),
)
def test_each_leg_may_have_its_own_codec(first, second, world, count, dtype):
    arrays = gradients(world, count, dtype, count)
    found = all_reduce(world, arrays, dtype, first.core, second.core)
    assert_same_bits(found)
    assert found[0].tobytes() == expected(first, second, arrays, dtype, True).tobytes()


@each_codec
def test_chunks_window_and_algorithm_change_no_bit(case):
    """F018: stochastic rounding included."""
    arrays = gradients(3, 20011, "float32", 1)
    results = {
        all_reduce(
            3, arrays, "float32", case.core, seed=5, chunk_bytes=chunk, window=window,
            algorithm=algorithm,
        )[0].tobytes()
        for chunk in (0, 4096, 12288)
        for window in (1, 2, 8)
        for algorithm in ("two_shot", "one_shot")
    }  # fmt: skip
    assert len(results) == 1


@pytest.mark.parametrize("world", [2, 3, 5, 7])
@each_codec
def test_reduce_scatter_gives_each_rank_its_part_of_the_mean(case, world):
    """F024: parts of unequal, odd and zero size too."""
    sizes = [0, 1, 129, 1000, 77, 128, 2305][:world]
    arrays = gradients(world, sum(sizes), "float32", 2)
    outs = [np.empty(n, np.float32) for n in sizes]
    with Ranks(world) as ranks:
        ranks.run("reduce_scatter", arrays, outs, "float32", case.core, counts=sizes)
    # Every part is encoded by itself: blocks begin where it begins.
    first = 0
    for out, n in zip(outs, sizes, strict=True):
        parts = [a[first : first + n] for a in arrays]
        exact = np.mean([p.astype(np.float64) for p in parts], axis=0)
        bound = np.mean([case.core.error_bound(p.ctypes.data, n, 1) for p in parts], axis=0)
        assert (np.abs(out - exact) <= bound + 1e-5).all()
        first += n


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@each_codec
def test_all_gather_concatenates_and_every_rank_gets_the_same_bits(case, world):
    """F006, F030: the owner too holds the decoded values; one rank has none."""
    sizes = [129, 0, 1000, 7, 256][:world]
    arrays = [a[:n] for a, n in zip(gradients(world, 1000, "float32", 3), sizes, strict=True)]
    outs = [np.empty(sum(sizes), np.float32) for _ in range(world)]
    with Ranks(world) as ranks:
        ranks.run("all_gather", arrays, outs, "float32", case.core, counts=sizes)
    assert_same_bits(outs)
    exact = np.concatenate(arrays)
    bounds = [case.core.error_bound(a.ctypes.data, a.size, 1) for a in arrays if a.size]
    assert (np.abs(outs[0] - exact) <= np.concatenate(bounds)).all()


@pytest.mark.parametrize("world", [2, 3, 5])
@each_codec
def test_broadcast_gives_all_ranks_the_roots_decoded_values(case, world):
    """F006"""
    for root in range(world):
        arrays = gradients(world, 3001, "float32", root)
        exact = arrays[root].copy()
        with Ranks(world) as ranks:
            ranks.run("broadcast", arrays, arrays, "float32", case.core, root=root)
        assert_same_bits(arrays)
        bound = np.array(case.core.error_bound(exact.ctypes.data, exact.size, 1))
        assert (np.abs(arrays[0] - exact) <= bound).all()


@pytest.mark.parametrize("dtype", FLOATS)
@each_codec
def test_a_world_of_one_changes_no_bit(case, dtype):
    """F097"""
    bits = np.random.default_rng(4).integers(0, 256, 8 * 500, np.uint8)
    array = bits.view(storage(dtype)).copy()
    assert all_reduce(1, [array], dtype, case.core)[0].tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@each_codec
def test_the_mean_of_large_equal_values_is_finite_at_eight_ranks(case, algorithm, dtype):
    """F001: within the stated bound of both legs at every depth of the pipeline; the sum of fp16
    is Inf, on all ranks alike."""
    arrays = [narrow(np.full(5000, 20000.0), dtype)] * 8
    first = bound_of(case.core, arrays[0], dtype)
    both = first + bound_of(case.core, narrow(20000 + first, dtype), dtype)
    for window in (1, 4):
        found = all_reduce(
            8, arrays, dtype, case.core, algorithm=algorithm, window=window, chunk_bytes=4096
        )
        assert_same_bits(found)
        assert (np.abs(widen(found[0], dtype) - widen(arrays[0], dtype)) <= both).all()
    # A rotation has its error everywhere, and top-k drops most of them.
    if dtype == "float16" and not {"rotation", "top_k"} & {*case.options}:
        total = all_reduce(8, arrays, dtype, case.core, average=False, algorithm=algorithm)
        assert_same_bits(total)
        assert not np.isfinite(total[0]).any()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bfloat16_keeps_small_terms_at_any_world_size(world):
    """F014: the error does not grow with the world."""
    arrays = [narrow(np.full(300, 1.0 if r == 0 else 2.0**-9), "bfloat16") for r in range(world)]
    codec = cccl.codec("identity")._core
    found = all_reduce(world, arrays, "bfloat16", codec, average=False)
    exact = narrow(np.full(300, 1 + (world - 1) * 2.0**-9), "bfloat16")
    assert found[0].tobytes() == exact.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_codec_object_gives_equal_results_alone_and_in_a_collective(dtype):
    """F109: a world of two equal ranks is twice encoded, once decoded."""
    codec = cccl.codec("block_float8")
    array = gradients(1, 1000, dtype, 6)[0]
    case = Case("block_float8", {})
    found = all_reduce(2, [array, array], dtype, codec._core)
    assert found[0].tobytes() == expected(case, case, [array, array], dtype, True).tobytes()


@each_codec
def test_ten_collectives_in_flight_keep_their_order(case):
    """F068: submitted without waiting, on every rank in the same order."""
    with Ranks(3) as ranks:
        sets = [gradients(3, 100 * (i + 1), "float32", i) for i in range(10)]
        works = [
            ranks.submit(r, "all_reduce", arrays[r], arrays[r], "float32", case.core, seed=i)
            for i, arrays in enumerate(sets)
            for r in range(3)
        ]
        assert all(work.wait(60.0) for work in works)
    for arrays in sets:
        assert_same_bits(arrays)


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_arrays_may_begin_anywhere(offset):
    """F027"""
    plain = gradients(2, 1000, "float32", 7)
    moved = []
    for array in plain:
        held = np.empty(array.nbytes + 8, np.uint8)
        held[offset : offset + array.nbytes] = array.view(np.uint8)
        moved.append(held[offset : offset + array.nbytes])
    codec = cccl.codec("block_float4")._core
    wanted = all_reduce(2, plain, "float32", codec)[0].tobytes()
    with Ranks(2) as ranks:
        works = [
            ranks.communicators[r].submit(
                "all_reduce",
                moved[r].ctypes.data,
                1000,
                moved[r].ctypes.data,
                1000,
                1,
                codec,
                codec,
            )
            for r in range(2)
        ]
        assert all(work.wait(60.0) for work in works)
    assert moved[0].tobytes() == wanted
