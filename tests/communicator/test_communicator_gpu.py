"""CuPy arrays over NCCL: the bits of NumPy arrays, in the order of streams, without torch."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from meet import assert_equal, communicator, digest, settings, values
from ranks import Died, die

import cccl
from cccl import _core

cupy = pytest.importorskip("cupy", reason="its arrays")
pytestmark = pytest.mark.skipif(not _core.cuda_device_count(), reason="no CUDA device")

CODECS = ("identity", "cast_bf16", "block_float8", "block_float4")
each_codec = pytest.mark.parametrize("codec", CODECS)


def on_gpu(folder, **options):
    """A communicator of ranks that may share a GPU: they are hosts apart to NCCL."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    count = cupy.cuda.runtime.getDeviceCount()
    if count < world:
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
    cupy.cuda.Device(rank % count).use()
    return communicator(folder, **options)


def _like_numpy(folder, codec):
    found = []
    with on_gpu(folder, config=settings(codec)) as comm:
        rank, world = comm.rank, comm.world_size
        for dtype in ("float32", "float16", "float64", "complex64"):
            for count in (0, 1, 129, 2305, 1_000_003):
                cpu, whole = values(rank, count, dtype), values(rank, count * world, dtype)
                gpu, gpu_whole = cupy.asarray(cpu), cupy.asarray(whole)
                kept = digest(cpu)
                results = [
                    (comm.all_reduce(cpu), comm.all_reduce(gpu)),
                    (comm.reduce_scatter(whole, op="avg"),
                     comm.reduce_scatter(gpu_whole, op="avg")),
                    (comm.all_gather(cpu), comm.all_gather(gpu)),
                ]  # fmt: skip
                assert digest(gpu.get()) == kept, "the input was changed"
                results.append((comm.broadcast(cpu, 1), comm.broadcast(gpu, 1)))
                for one, other in results:
                    assert one.shape == other.shape
                    assert digest(one) == digest(other.get()), (dtype, count)
                found += [digest(one) for one, _ in (results[0], results[2], results[3])]
                assert comm.all_reduce(gpu, gpu) is gpu
                found.append(digest(gpu.get()))
    return found


@each_codec
@pytest.mark.parametrize("world", (2, 3))
def test_cupy_arrays_get_the_bits_of_numpy_arrays(ranks, tmp_path, codec, world):
    assert_equal(ranks(world)(_like_numpy, tmp_path / "meeting", codec, seconds=180))


def _integers(folder):
    with on_gpu(folder) as comm:
        mine = cupy.arange(100, dtype=cupy.int64) * (comm.rank + 1)
        total = comm.all_reduce(mine)
        assert (total == cupy.arange(100) * 3).all()
        assert (comm.reduce_scatter(mine) == total[comm.rank * 50 :][:50]).all()
        assert comm.all_gather(mine > 3).dtype == bool


def test_integers_are_summed_exactly(ranks, tmp_path):
    ranks(2)(_integers, tmp_path / "meeting")


def _ring(folder, codec):
    with on_gpu(folder, config=settings(codec)) as comm:
        rank, world = comm.rank, comm.world_size
        left, right = (rank - 1) % world, (rank + 1) % world
        for count in (1, 1000, 3_000_001):
            mine = cupy.asarray(values(rank, count))
            kept, out = mine.copy(), cupy.empty(count, cupy.float32)
            comm.exchange({right: mine}, {left: out})
            assert (mine == kept).all(), "the sender's array was changed"
            sent = values(left, count)
            if codec == "identity":
                assert digest(out.get()) == digest(sent)
            else:
                decoded = cccl.codec(codec)
                assert digest(out.get()) == digest(decoded.decode(decoded.encode(sent)))
        for turn in range(20):  # one way, many times, between collectives of all
            row = cupy.full(100, float(turn))
            if rank == 0:
                comm.send(row, 1)
            elif rank == 1:
                assert (comm.recv(cupy.empty(100), 0) == turn).all()
            assert comm.all_reduce(cupy.ones(1))[0] == world


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("codec", ("identity", "block_float8", "lossless"))
def test_what_is_sent_comes(ranks, tmp_path, world, codec):
    ranks(world)(_ring, tmp_path / "meeting", codec)


SLOW = """
extern "C" __global__ void spin(long long cycles) {
  const long long begun = clock64();
  while (clock64() - begun < cycles) {}
}
"""


def _ordered(folder):
    """The input is written just before by a slow stream, the result read just after by another."""
    spin = cupy.RawKernel(SLOW, "spin")
    with on_gpu(folder, config=settings(chunk_size="256KiB")) as comm:
        exact = cupy.asarray(values(0, 1 << 20))
        want = comm.all_reduce(exact)
        writes, moves, reads = (cupy.cuda.Stream(non_blocking=True) for _ in range(3))
        cupy.cuda.Device().synchronize()
        for turn in range(8):
            array = cupy.full_like(exact, cupy.nan)
            cupy.cuda.Device().synchronize()
            with writes:
                spin((1,), (1,), (np.int64(5_000_000),))
                array[...] = exact
                written = writes.record()
            with moves:
                moves.wait_event(written)
                comm.all_reduce(array, array)
                moved = moves.record()
            with reads:
                reads.wait_event(moved)
                found = array.copy()
            reads.synchronize()
            assert (found == want).all(), turn
        # On the legacy default stream too, without any event.
        spin((1,), (1,), (np.int64(5_000_000),))
        array[...] = exact
        comm.all_reduce(array, array)
        assert (array == want).all()


def test_results_are_ordered_with_the_callers_streams(ranks, tmp_path):
    ranks(2)(_ordered, tmp_path / "meeting")


def _three_streams(folder):
    """torch writes on its stream, CuPy's current stream carries the collective, torch reads on a
    third."""
    import torch

    with on_gpu(folder, config=settings(chunk_size="256KiB")) as comm:
        torch.cuda.set_device(cupy.cuda.Device().id)
        exact = torch.from_numpy(values(0, 1 << 20)).cuda()
        want = comm.all_reduce(cupy.from_dlpack(exact)).get()
        writes, reads = torch.cuda.Stream(), torch.cuda.Stream()
        moves = cupy.cuda.Stream(non_blocking=True)
        torch.cuda.synchronize()
        for turn in range(8):
            tensor = torch.full_like(exact, float("nan"))
            torch.cuda.synchronize()
            with torch.cuda.stream(writes):
                torch.cuda._sleep(5_000_000)
                tensor.copy_(exact)
            theirs = torch.cuda.ExternalStream(moves.ptr)
            theirs.wait_stream(writes)
            with moves:
                array = cupy.from_dlpack(tensor)  # the same memory
                assert array.data.ptr == tensor.data_ptr()
                comm.all_reduce(array, array)
            reads.wait_stream(theirs)
            with torch.cuda.stream(reads):
                found = tensor.clone()
            reads.synchronize()
            assert (found.cpu().numpy() == want).all(), turn


def test_three_streams_of_torch_and_cupy_hand_over(ranks, tmp_path):
    pytest.importorskip("torch", reason="its streams")
    ranks(2)(_three_streams, tmp_path / "meeting")


def _beside_nccl(folder):
    """CuPy's own communicator, as cupyx.distributed uses it, in turn with ours."""
    from cupy.cuda import nccl

    with on_gpu(folder) as comm:
        found = nccl.get_unique_id()  # bytes, or a tuple of numbers in older releases
        name = np.array([byte % 256 for byte in found], np.uint8)
        comm.broadcast(name)
        given = bytes(name) if isinstance(found, bytes) else tuple(name.view(np.int8).tolist())
        theirs = nccl.NcclCommunicator(comm.world_size, given, comm.rank)
        array = cupy.ones(100_000, cupy.float32)
        stream = cupy.cuda.get_current_stream()
        for _ in range(5):
            comm.all_reduce(array, array, "avg")
            theirs.allReduce(array.data.ptr, array.data.ptr, array.size, nccl.NCCL_FLOAT32,
                             nccl.NCCL_SUM, stream.ptr)  # fmt: skip
        assert (array == comm.world_size**5).all()
        theirs.destroy()


def test_it_works_beside_cupys_own_nccl(ranks, tmp_path):
    nccl = pytest.importorskip("cupy.cuda.nccl", reason="this CuPy has no NCCL")
    if not nccl.available:
        pytest.skip("this CuPy has no NCCL")
    ranks(2)(_beside_nccl, tmp_path / "meeting")


def _pools(folder):
    """Arrays of each of CuPy's allocators, freed while the stream still uses them."""
    with on_gpu(folder) as comm:
        for allocator in (cupy.cuda.MemoryPool().malloc, cupy.cuda.MemoryAsyncPool().malloc):
            with cupy.cuda.using_allocator(allocator):
                for _ in range(20):
                    comm.all_reduce(cupy.ones(1 << 18, cupy.float32))
                others = [cupy.full(1 << 18, 7.0) for _ in range(4)]
                assert all((other == 7).all() for other in others)
                del others
            cupy.cuda.Device().synchronize()
        rows = {row["label"]: row for row in cccl.stats()["rows"]}
        comm.all_reduce(cupy.ones(4), config={"non_finite": "raise"})  # the host waits: all counted
        assert rows.get("all_reduce", {"failures": 0})["failures"] == 0
        return cccl.stats()["total"]["pool_bytes"] > 0


def test_arrays_of_any_allocator(ranks, tmp_path):
    assert ranks(2)(_pools, tmp_path / "meeting") == [True, True]


def _captured(folder):
    with on_gpu(folder) as comm:
        inputs = [cupy.asarray(values(comm.rank, 200_000, seed=seed)) for seed in range(3)]
        want = [comm.all_reduce(array) for array in inputs]
        static, out = inputs[0].copy(), cupy.empty_like(inputs[0])
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            comm.all_reduce(static, out)
            graph = stream.end_capture()
            for array, expected in zip(inputs, want, strict=True):
                static[...] = array
                graph.launch(stream)
                assert (out == expected).all()
            stream.synchronize()
        del graph


def test_a_cuda_graph_replays_a_collective(ranks, tmp_path):
    ranks(2)(_captured, tmp_path / "meeting")


def _refused(folder):
    with on_gpu(folder) as comm:
        ones = cupy.ones((4, 6), cupy.float32)
        for error, call, said in (
            (cccl.UnsupportedError, lambda: comm.all_reduce(ones.T), "cupy.ascontiguousarray"),
            (cccl.UnsupportedError, lambda: comm.all_reduce(ones, ones.get()), "same device"),
            (cccl.UnsupportedError, lambda: comm.all_reduce(ones, ones.astype("f8")), "the same"),
        ):  # fmt: skip
            with pytest.raises(error, match=said):
                call()
        count = 1000 + comm.rank
        with pytest.raises(cccl.MismatchError, match="rank 0 has 1000, rank 1 has 1001"):
            comm.all_reduce(cupy.ones(count))
        way = {1 - comm.rank: cupy.ones(count)}
        with pytest.raises(cccl.MismatchError, match="from rank"):
            comm.exchange(way, {1 - comm.rank: cupy.ones(count)})
        if cupy.cuda.runtime.getDeviceCount() > 1:
            with cupy.cuda.Device(comm.rank ^ 1):
                other = cupy.ones(3)
            with pytest.raises(cccl.UnsupportedError, match="one GPU"):
                comm.all_reduce(other)
        bad = cupy.asarray(values(comm.rank, 4096))
        if comm.rank == 1:
            bad[200] = cupy.inf
        with pytest.raises(cccl.NonFiniteError, match="first from rank 1"):
            comm.all_reduce(bad, config={"non_finite": "raise"})
        return comm.all_reduce(cupy.ones(3)).tolist()


def test_what_cannot_be_sent_right_is_refused_and_the_group_goes_on(ranks, tmp_path):
    assert ranks(2)(_refused, tmp_path / "meeting") == [[2.0] * 3] * 2


def _two_kinds(folder):
    comm = on_gpu(folder)
    array = np.ones(10) if comm.rank else cupy.ones(10)
    with pytest.raises(cccl.MismatchError, match="rank 0 has CuPy's, rank 1 has NumPy's"):
        comm.all_reduce(array)
    comm.close()


def test_ranks_with_arrays_of_different_libraries_are_told(ranks, tmp_path):
    ranks(2)(_two_kinds, tmp_path / "meeting")


def _chosen(folder):
    with on_gpu(folder, config=settings("auto")) as comm:
        array = cupy.asarray(values(comm.rank, 1 << 20))
        return [digest(comm.all_reduce(array).get()) for _ in range(20)]


def test_auto_chooses_alike_on_all_ranks(ranks, tmp_path):
    assert_equal(ranks(2)(_chosen, tmp_path / "meeting"))


def _killed(folder):
    comm = on_gpu(folder, deadline=5.0)
    comm.all_reduce(cupy.ones(10))
    cupy.cuda.Device().synchronize()
    if comm.rank == 1:
        die()
    begun, array = time.monotonic(), cupy.ones(1 << 20, cupy.float32)
    with pytest.raises(cccl.Error) as caught:
        for _ in range(1000):
            comm.all_reduce(array, array)
            cupy.cuda.get_current_stream().synchronize()  # comes back, as the kernels run out
    assert isinstance(caught.value, cccl.TransportError)
    assert bool(cupy.isnan(array).all())
    with pytest.raises(cccl.ClosedError):
        comm.all_reduce(array)
    comm.close()
    return time.monotonic() - begun


def test_the_survivor_of_a_killed_rank_gets_a_typed_error(own_ranks, tmp_path):
    outcomes = own_ranks(2).outcomes(_killed, tmp_path / "meeting", seconds=90)
    assert isinstance(outcomes[1], Died)
    assert not isinstance(outcomes[0], BaseException), outcomes[0]
    assert outcomes[0] < 60


def _given_up(folder, how):
    comm = on_gpu(folder, deadline=4.0)
    comm.all_reduce(cupy.ones(10))
    cupy.cuda.Device().synchronize()
    begun = time.monotonic()
    if comm.rank == 1 and how == "abort":
        comm.abort("the disk is full")
    elif comm.rank == 1:
        time.sleep(12)
    with pytest.raises(cccl.TransportError):
        for _ in range(1000):
            comm.all_reduce(cupy.ones(10))
            cupy.cuda.get_current_stream().synchronize()
    comm.close()
    return time.monotonic() - begun


@pytest.mark.parametrize("how", ("abort", "deadline"))
def test_a_rank_that_gives_up_or_is_late_is_told_to_all(own_ranks, tmp_path, how):
    found = own_ranks(2)(_given_up, tmp_path / "meeting", how, seconds=90)
    assert max(found) < 60
