"""Collectives of NumPy arrays between real processes: exact or within the codec's error, and the
same bits on every rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meet import assert_equal, communicator, digest, settings, values

import cccl

DTYPES = ("float32", "float16", "float64", "complex64", "complex128")
CODECS = (
    "identity", "cast_fp16", "cast_bf16", "block_float8", "block_float4", "block_float3",
    "sparse", "sparse(block_float8)", "lossless",
)  # fmt: skip

each_world = pytest.mark.parametrize("world", (1, 2, 3, 5))
each_codec = pytest.mark.parametrize("codec", CODECS)


def _tolerance(codec: str, world: int, dtype: str) -> float:
    """Of a sum of normal values, in the codec's and the dtype's steps of the largest."""
    step = {"block_float8": 1 / 254, "block_float4": 1 / 14, "block_float3": 1 / 6,
            "sparse(block_float8)": 1 / 254, "cast_bf16": 2**-8, "cast_fp16": 2**-11}  # fmt: skip
    return 8 * world * (step.get(codec, 0) + (2**-10 if dtype == "float16" else 2**-22))


def _everything(folder, codec, dtype):
    found = []
    with communicator(folder, config=settings(codec)) as comm:
        rank, world = comm.rank, comm.world_size
        for shape in ((0,), (1,), (129,), (7, 11), (3, 100_003)):
            inputs = [values(r, shape, dtype) for r in range(world)]
            mine, exact = inputs[rank].copy(), np.sum(inputs, axis=0)
            near = {"atol": _tolerance(codec, world, dtype), "rtol": 0}

            total = comm.all_reduce(mine)
            np.testing.assert_allclose(total, exact, **near)
            assert digest(mine) == digest(inputs[rank]), "the input was changed"
            assert comm.all_reduce(mine, mine, "avg") is mine
            np.testing.assert_allclose(mine, exact / world, **near)

            whole = comm.all_gather(inputs[rank])
            assert whole.shape == (world * shape[0], *shape[1:])
            np.testing.assert_allclose(whole, np.concatenate(inputs), **near)

            part = comm.reduce_scatter(np.concatenate([inputs[rank]] * world))
            assert part.shape == shape
            np.testing.assert_allclose(part, exact, **near)
            out = np.empty(part.size, dtype)
            same = comm.reduce_scatter(np.concatenate([inputs[rank]] * world), out, "avg")
            assert same is out
            np.testing.assert_allclose(out, exact.reshape(-1) / world, **near)

            sent = inputs[rank].copy()
            comm.broadcast(sent, world - 1)
            np.testing.assert_allclose(sent, inputs[-1], **near)
            found += [digest(array) for array in (total, mine, whole, sent)]
    return found


@each_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_collective_of_two_ranks(ranks, tmp_path, codec, dtype):
    assert_equal(ranks(2)(_everything, tmp_path / "meeting", codec, dtype))


@each_world
@pytest.mark.parametrize("codec", ("identity", "block_float8"))
def test_every_collective_of_any_number_of_ranks(ranks, tmp_path, world, codec):
    assert_equal(ranks(world)(_everything, tmp_path / "meeting", codec, "float32"))


def _sums_exactly(folder, dtype):
    with communicator(folder, config=settings()) as comm:
        rank, world = comm.rank, comm.world_size
        mine = (np.arange(60).reshape(6, 10) * (rank + 1)).astype(dtype)
        everyone = sum((np.arange(60) * (r + 1)).astype(dtype) for r in range(world))
        exact = everyone.astype(dtype).reshape(6, 10)  # which wraps as NumPy's sums do
        total = comm.all_reduce(mine)
        assert total.dtype == exact.dtype
        assert (total == exact).all()
        part = comm.reduce_scatter(mine)
        assert (part == exact[rank * 6 // world : (rank + 1) * 6 // world]).all()
        assert (comm.all_reduce(mine, mine) == exact).all()
        for refused in (lambda: comm.all_reduce(mine, op="avg"),
                        lambda: comm.all_reduce(mine > 3)):  # fmt: skip
            with pytest.raises(cccl.UnsupportedError, match=r"rounded|bools have no sum"):
                refused()
        flags = comm.all_gather(mine > 3)
        assert flags.dtype == bool and flags.shape == (6 * world, 10)


@pytest.mark.parametrize("dtype", ("int64", "int32", "uint8", "int16", "uint64"))
def test_integers_are_summed_exactly(ranks, tmp_path, dtype):
    ranks(3)(_sums_exactly, tmp_path / "meeting", dtype)


def _one(folder, collective, shape, dtype, codec, options, seed):
    with communicator(folder, config=settings(codec, **options)) as comm:
        array = values(comm.rank, shape, dtype, seed)
        found = getattr(comm, collective)(array)
        assert found.dtype == array.dtype
        if collective == "all_reduce" and codec == "identity":
            exact = np.sum([values(r, shape, "float64", seed) for r in range(2)], axis=0)
            if dtype == "float64":
                assert (found == exact).all()
        return found.shape, digest(found)


@given(data=st.data())
def test_any_shape_dtype_and_setting_gives_all_ranks_the_same(tmp_path_factory, _plain_pools, data):
    shape = data.draw(st.lists(st.integers(0, 40), min_size=0, max_size=4).map(tuple))
    options = {
        "chunk_size": data.draw(st.sampled_from(("auto", "4KiB", "64KiB"))),
        "window": data.draw(st.sampled_from(("auto", 1, 3))),
        "algorithm": data.draw(st.sampled_from(("auto", "two_shot", "one_shot"))),
        "rounding": data.draw(st.sampled_from(("nearest", "stochastic"))),
        "checksum": data.draw(st.booleans()),
    }
    collective = data.draw(st.sampled_from(("all_reduce", "all_gather", "broadcast")))
    dtype, codec = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(CODECS))
    folder, seed = tmp_path_factory.mktemp("any") / "meeting", data.draw(st.integers(0, 99))
    assert_equal(_plain_pools(2)(_one, folder, collective, shape, dtype, codec, options, seed))


def _chosen(folder):
    with communicator(folder, config=settings("auto", auto_codecs=("block_float4",))) as comm:
        array = values(comm.rank, 50_000)
        kept = [digest(comm.all_reduce(array)) for _ in range(40)]
        kept.append(digest(comm.all_gather(array)))
        other, out = 1 - comm.rank, np.empty_like(array)
        comm.exchange({other: array}, {other: out})
        np.testing.assert_allclose(out, values(other, 50_000), atol=0.5)
        small = comm.all_reduce(np.ones(1, np.float32))
        assert small[0] == comm.world_size
        rows = [row for row in cccl.stats()["rows"] if row["label"] == "all_reduce"]
        assert all(row["predicted_seconds"] > 0 for row in rows)
        return kept, sorted({row["codec"] for row in rows})


def test_auto_chooses_alike_on_all_ranks(ranks, tmp_path):
    assert_equal(ranks(2)(_chosen, tmp_path / "meeting"))


def _counted(folder):
    with communicator(folder) as comm:
        array = values(comm.rank, 1 << 18)
        comm.all_reduce(array, label="compressed")
        comm.all_gather(array, label="not in collective_filter")
        comm.all_reduce(array, config={"compression_type": "none"}, label="none")
        rows = {row["label"]: row for row in cccl.stats()["rows"]}
        assert rows["compressed"]["codec"].startswith("block_float8")
        assert 3.8 < rows["compressed"]["ratio"] < 4
        assert 1e-4 < rows["compressed"]["relative_error"] < 1e-2
        for label in ("not in collective_filter", "none"):
            assert rows[label]["codec"] == "identity"
            assert 0.99 < rows[label]["ratio"] < 1.01
        return cccl.stats()["total"]["pool_bytes"] > 0


def test_statistics_say_what_was_sent(ranks, tmp_path):
    assert ranks(2)(_counted, tmp_path / "meeting") == [True, True]


def _weights(folder, kind):
    """What all_gather and broadcast lose nothing of, the filter leaving them out."""
    config = cccl.Config(compression_type="block_float4", weights_type=kind)
    with communicator(folder, config=config) as comm:
        weights = values(0, 100_000)
        mine = weights.copy() if comm.rank == 0 else np.zeros_like(weights)
        assert (comm.broadcast(mine) == weights).all()
        assert (comm.all_gather(weights) == np.tile(weights, comm.world_size)).all()
        return sorted({row["codec"].partition("(")[0] for row in cccl.stats()["rows"]})


@pytest.mark.parametrize("kind", ("none", "lossless", "auto"))
def test_weights_go_without_losing_a_bit(ranks, tmp_path, kind):
    found = ranks(2)(_weights, tmp_path / "meeting", kind)
    codecs = {"none": ["identity"], "lossless": ["lossless"], "auto": ["identity", "lossless"]}
    assert found == [codecs[kind]] * 2


def _non_finite(folder):
    with communicator(folder) as comm:
        array = values(comm.rank, 4096)
        if comm.rank == 1:
            array[200] = np.inf
        quiet = comm.all_reduce(array)
        assert np.isnan(quiet[128:256]).all() and np.isfinite(quiet[:128]).all()
        with pytest.raises(cccl.NonFiniteError, match="first from rank 1"):
            comm.all_reduce(array, config={"non_finite": "raise"})


def test_a_non_finite_value_surfaces(ranks, tmp_path):
    ranks(2)(_non_finite, tmp_path / "meeting")


def _refused(folder):
    with communicator(folder) as comm:
        ones, world = np.ones((4, 6), np.float32), comm.world_size
        frozen = np.ones(4, np.float32)
        frozen.flags.writeable = False
        shared = np.ones(12, np.float32)
        for error, call, said in (
            (cccl.UnsupportedError, lambda: comm.all_reduce(ones.T), "not contiguous"),
            (cccl.UnsupportedError, lambda: comm.all_reduce(ones[:, ::2]), "ascontiguousarray"),
            (cccl.UnsupportedError, lambda: comm.all_reduce([1.0, 2.0]), "builtins.list"),
            (cccl.UnsupportedError, lambda: comm.all_reduce(np.array(["a"])), "dtype <U1"),
            (cccl.UnsupportedError, lambda: comm.all_reduce(np.ones(3, ">f4")), "dtype >f4"),
            (cccl.UnsupportedError, lambda: comm.broadcast(frozen), "read-only"),
            (cccl.UnsupportedError, lambda: comm.all_reduce(ones, np.ones((4, 6))), "the same"),
            (cccl.UnsupportedError, lambda: comm.all_reduce(shared[:8], shared[4:]), "share"),
            (cccl.ConfigError, lambda: comm.all_reduce(ones, np.ones(3, np.float32)), "24 values"),
            (cccl.ConfigError, lambda: comm.all_reduce(ones, op="max"), "'sum' or 'avg'"),
            (cccl.ConfigError, lambda: comm.reduce_scatter(np.ones(2 * world + 1)), "equal parts"),
            (cccl.ConfigError, lambda: comm.all_gather(ones, np.ones(5, np.float32)), "must have"),
            (cccl.ConfigError, lambda: comm.broadcast(ones, world), "root"),
            (cccl.ConfigError, lambda: comm.send(ones, comm.rank), "rank itself"),
            (cccl.ConfigError, lambda: comm.recv(ones, -1), "peer = -1"),
            (cccl.ConfigError, lambda: comm.all_reduce(ones, config={"nothing": 1}), "unknown key"),
        ):  # fmt: skip
            with pytest.raises(error, match=said):
                call()
        assert comm.all_reduce(np.ones(5).sum()) == 15  # a NumPy scalar
        shared[:] = 1
        assert comm.all_reduce(shared, shared[:]) is not shared and (shared == 3).all()
        assert comm.broadcast(shared, np.int64(1)) is shared
        own = np.arange(6, dtype=np.float32)
        comm.all_gather(own[2 * comm.rank : 2 * comm.rank + 2], own)  # in place: its own part
        return comm.all_reduce(np.ones(3)).tolist()


def test_what_cannot_be_sent_right_is_refused_and_the_group_goes_on(ranks, tmp_path):
    assert ranks(3)(_refused, tmp_path / "meeting") == [[3.0, 3.0, 3.0]] * 3


def _ruled(folder):
    rules = [{"collective": "broadcast", "compression_type": "block_float8"}]
    config = cccl.Config.load({"compression_type": "block_float4", "rules": rules})
    with communicator(folder, config=config) as comm:
        for call in (comm.broadcast, comm.all_gather, comm.all_reduce):
            call(values(0, 100_000))
    return {r["collective"]: r["codec"].partition("(")[0] for r in cccl.stats()["rows"]}


def test_a_rule_gives_a_collective_its_own_codec(ranks, tmp_path):
    expected = {"broadcast": "block_float8", "all_gather": "identity", "all_reduce": "block_float4"}
    assert ranks(2)(_ruled, tmp_path / "meeting") == [expected] * 2
