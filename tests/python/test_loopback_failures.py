"""No wait without an end: disagreement, silence and bad numbers are typed errors on every rank."""

from __future__ import annotations

import time

import numpy as np
import pytest
from conformance.codec_cases import CASES
from hypothesis import given
from hypothesis import strategies as st
from loopback_ranks import Ranks, assert_same_bits

import cccl
from cccl import _core

BLOCK8 = _core.make_codec("block_float8", {})
BLOCK4 = _core.make_codec("block_float4", {})
BLOCK8_OF_64 = _core.make_codec("block_float8", {"block_size": 64})


def _arrays(world: int, count: int = 1000) -> list[np.ndarray]:
    return [np.full(count, r + 1.0, np.float32) for r in range(world)]


def _errors(works) -> list[Exception]:
    found = []
    for work in works:
        with pytest.raises(cccl.Error) as caught:
            work.wait(30.0)
        found.append(caught.value)
    return found


def _submit_with(ranks, arrays, odd_rank, **odd):
    """The same all_reduce on every rank, but for what `odd` changes on one of them."""
    works = []
    for rank, array in enumerate(arrays):
        settings = {"codec": BLOCK8, "chunk_bytes": 4096, "window": 2, "algorithm": "one_shot"}
        settings |= odd if rank == odd_rank else {}
        codec = settings.pop("codec")
        works.append(ranks.submit(rank, "all_reduce", array, array, "float32", codec, **settings))
    return works


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(
    ("odd", "field"),
    [
        pytest.param({"codec": BLOCK4}, "codecs", id="codec"),
        pytest.param({"codec": BLOCK8_OF_64}, "codecs", id="block_size"),
        pytest.param({"result": BLOCK4}, "codecs", id="result"),
        ({"average": False}, "op"),
        ({"chunk_bytes": 8192}, "plan"),
        ({"window": 5}, "plan"),
        ({"algorithm": "two_shot"}, "plan"),
        ({"checksum": False}, "checks"),
    ],
    ids=str,
)
def test_another_configuration_on_one_rank_is_a_mismatch_on_all(world, odd, field):
    """F062: the error names the field and the ranks; the group can be used again."""
    with Ranks(world, deadline=5.0) as ranks:
        arrays = _arrays(world, 1000)
        errors = _errors(_submit_with(ranks, arrays, world - 1, **odd))
        assert {type(e) for e in errors} == {cccl.MismatchError}
        assert len({str(e) for e in errors}) == 1
        assert f"{field}: rank 0 has" in str(errors[0])
        assert f"rank {world - 1} has" in str(errors[0])
        assert all(np.isnan(a).all() for a in arrays), "never stale numbers"
        assert_same_bits(ranks.all_reduce(_arrays(world), "float32", BLOCK8))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_another_count_dtype_or_collective_on_one_rank_is_a_mismatch_on_all(world):
    """F062"""
    with Ranks(world, deadline=5.0) as ranks:
        for attempt in ("count", "dtype", "collective"):
            arrays = _arrays(world)
            works = []
            for rank, array in enumerate(arrays):
                collective, dtype = "all_reduce", "float32"
                if rank == 1 and attempt == "count":
                    array = arrays[1] = array[:-1].copy()
                if rank == 1 and attempt == "dtype":
                    array, dtype = array.astype(np.float64), "float64"
                    arrays[1] = array
                if rank == 1 and attempt == "collective":
                    collective = "broadcast"
                works.append(ranks.submit(rank, collective, array, array, dtype, BLOCK8))
            errors = _errors(works)
            assert {type(e) for e in errors} == {cccl.MismatchError}, attempt
            assert f"{attempt}: rank 0 has" in str(errors[0])
            assert all(np.isnan(a).all() for a in arrays)
        assert_same_bits(ranks.all_reduce(_arrays(world), "float32", BLOCK8))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_rank_that_never_calls_is_named_when_the_deadline_passes(world):
    begun = time.monotonic()
    with Ranks(world, deadline=0.5) as ranks:
        arrays = _arrays(world)[1:]
        works = [
            ranks.submit(r + 1, "all_reduce", a, a, "float32", BLOCK8) for r, a in enumerate(arrays)
        ]
        errors = _errors(works)
        assert all(isinstance(e, cccl.DeadlineError | cccl.PeerAbortedError) for e in errors)
        assert any(isinstance(e, cccl.DeadlineError) for e in errors)
        assert all("rank 0" in str(e) for e in errors)
        assert all(np.isnan(a).all() for a in arrays)
        (late, *_) = _arrays(1)
        before = late.copy()
        with pytest.raises(cccl.ClosedError, match="takes no more work"):
            ranks.submit(1, "all_reduce", late, late, "float32", BLOCK8)
        assert np.array_equal(late, before)
    assert time.monotonic() - begun < 5


def test_an_abort_reaches_every_rank_with_its_reason():
    with Ranks(3, deadline=20.0) as ranks:
        arrays = _arrays(3)
        works = [ranks.submit(r, "all_reduce", arrays[r], arrays[r], "float32", BLOCK8)
                 for r in (0, 1)]  # fmt: skip
        ranks.communicators[2].abort("out of coffee")
        for error in _errors(works):
            assert isinstance(error, cccl.PeerAbortedError)
            assert "rank 2" in str(error)
            assert "out of coffee" in str(error)


@given(
    world=st.sampled_from([2, 3, 4, 5]),
    bad_rank=st.integers(0, 4),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
    case=st.sampled_from(CASES),
    count=st.sampled_from([1300, 20000]),
    algorithm=st.sampled_from(["one_shot", "two_shot"]),
)
def test_a_non_finite_gradient_surfaces_on_every_rank(world, bad_rank, bad, case, count, algorithm):
    """F010: 'propagate' gives no number at its place anywhere; 'raise' names rank and label."""
    bad_rank %= world
    for raises in (False, True):
        arrays = [np.linspace(-1, 1, count, dtype=np.float32) for _ in range(world)]
        arrays[bad_rank][-3] = bad
        with Ranks(world) as ranks:
            works = [
                ranks.submit(r, "all_reduce", a, a, "float32", case.core, algorithm=algorithm,
                             raise_non_finite=raises, label="bucket 7")
                for r, a in enumerate(arrays)
            ]  # fmt: skip
            if raises:
                for error in _errors(works):
                    assert isinstance(error, cccl.NonFiniteError)
                    assert "bucket 7" in str(error)
                    assert f"rank {bad_rank}" in str(error)
            else:
                assert all(work.wait(30.0) for work in works)
        assert_same_bits(arrays)
        assert not np.isfinite(arrays[0][-3])
        assert np.isfinite(arrays[0][:128]).all()


def test_reduce_scatter_raises_for_a_sum_that_overflows():
    """F010: the inputs are finite, the fp16 sum is not: no optimizer may take it unasked."""
    with Ranks(4) as ranks:
        arrays = [np.full(4000, 30000, np.float16) for _ in range(4)]
        outs = [np.empty(1000, np.float16) for _ in range(4)]
        works = [
            ranks.submit(r, "reduce_scatter", arrays[r], outs[r], "float16", BLOCK8,
                         counts=[1000] * 4, average=False, raise_non_finite=True)
            for r in range(4)
        ]  # fmt: skip
        assert {type(e) for e in _errors(works)} == {cccl.NonFiniteError}


def test_arguments_that_cannot_be_right_are_refused_before_anything_is_sent():
    with Ranks(2) as ranks:
        array, other = np.zeros(10, np.float32), np.zeros(9, np.float32)
        integers = np.zeros(10, np.int32)
        identity = _core.make_codec("identity", {})
        with pytest.raises(cccl.ConfigError, match="output 9"):
            ranks.submit(0, "all_reduce", array, other, "float32", BLOCK8)
        with pytest.raises(cccl.UnsupportedError, match="int32"):
            ranks.submit(0, "all_reduce", integers, integers, "int32", BLOCK8)
        with pytest.raises(cccl.UnsupportedError, match="int32"):
            ranks.submit(0, "all_reduce", integers, integers, "int32", identity)
        with pytest.raises(cccl.ConfigError, match="counts"):
            ranks.submit(0, "all_gather", array, array, "float32", BLOCK8, counts=[10])
        with pytest.raises(cccl.ConfigError, match="all_to_all"):
            ranks.submit(0, "all_to_all", array, array, "float32", BLOCK8)
    for deadline in (0.0, -1.0, float("nan")):
        with pytest.raises(cccl.ConfigError, match="deadline"):
            _core.Communicator(_core.loopback(1)[0], deadline)


def test_a_root_out_of_range_is_refused():
    with Ranks(2) as ranks:
        arrays = _arrays(2)
        works = [ranks.submit(r, "broadcast", a, a, "float32", BLOCK8, root=7)
                 for r, a in enumerate(arrays)]  # fmt: skip
        for error in _errors(works):
            assert "root = 7" in str(error)


def test_closing_finishes_what_was_submitted():
    ranks = Ranks(2)
    arrays = _arrays(2, 100_000)
    works = [ranks.submit(r, "all_reduce", a, a, "float32", BLOCK8) for r, a in enumerate(arrays)]
    for communicator in ranks.communicators:
        communicator.close()
    assert all(work.done() and work.error() is None for work in works)
    assert_same_bits(arrays)


def test_a_wait_may_time_out_without_ending_the_collective():
    with Ranks(2) as ranks:
        arrays = _arrays(2)
        first = ranks.submit(0, "all_reduce", arrays[0], arrays[0], "float32", BLOCK8)
        assert first.wait(0.05) is False
        assert not first.done()
        second = ranks.submit(1, "all_reduce", arrays[1], arrays[1], "float32", BLOCK8)
        assert first.wait(20.0) and second.wait(20.0)
    assert_same_bits(arrays)
