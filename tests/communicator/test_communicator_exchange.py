"""Sends and receives between two ranks, and exchanges with several."""

from __future__ import annotations

import time

import numpy as np
import pytest
from meet import communicator, digest, settings, values

import cccl

CODECS = ("identity", "block_float8", "sparse")


def _chain(folder, codec):
    """From each rank to the next, of many sizes."""
    with communicator(folder, config=settings(codec)) as comm:
        rank, world = comm.rank, comm.world_size
        for dtype in ("float32", "float16", "complex64", "int32"):
            for shape in ((0,), (1,), (5, 77), (300_001,)):
                mine = values(rank, shape, dtype)
                kept = digest(mine)
                if rank + 1 < world:
                    comm.send(mine, rank + 1)
                assert digest(mine) == kept, "the sender's array was changed"
                if rank == 0:
                    continue
                out = np.empty(shape, dtype)
                assert comm.recv(out, rank - 1) is out
                sent = values(rank - 1, shape, dtype)
                if codec != "block_float8" or dtype == "int32":
                    assert digest(out) == digest(sent)
                elif out.size:
                    assert abs(out - sent).max() <= abs(sent).max() / 100


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_sent_comes(ranks, tmp_path, codec):
    ranks(3)(_chain, tmp_path / "meeting", codec)


def _same_as_the_codec(folder):
    with communicator(folder, config=settings(checksum=True)) as comm:
        sent = values(0, 5000)
        if comm.rank == 0:
            comm.send(sent, 1)
            return
        codec = cccl.codec("block_float8")
        out = comm.recv(np.empty_like(sent), 0)
        assert (out == codec.decode(codec.encode(sent))).all()
        assert (abs(out - sent) <= codec.error_bound(sent)).all()


def test_a_send_is_one_encoding(ranks, tmp_path):
    ranks(2)(_same_as_the_codec, tmp_path / "meeting")


def _halo(folder, turns):
    """Every rank swaps with both neighbours of a ring at once."""
    with communicator(folder) as comm:
        rank, world = comm.rank, comm.world_size
        left, right = (rank - 1) % world, (rank + 1) % world
        for turn in range(turns):
            row = np.full(1000, 10.0 * rank + turn)
            above, below = np.empty(1000), np.empty(1000)
            comm.exchange({left: row, right: row + 0.5}, {left: above, right: below})
            assert (above == 10 * left + turn + 0.5).all()
            assert (below == 10 * right + turn).all()
            comm.all_reduce(row)


@pytest.mark.parametrize("world", (3, 4))
def test_neighbours_swap_without_waiting_in_turn(ranks, tmp_path, world):
    ranks(world)(_halo, tmp_path / "meeting", 5)


def _swap(folder):
    with communicator(folder) as comm:
        big = np.full(3_000_000, float(comm.rank))  # more than sockets hold
        out = np.empty_like(big)
        comm.exchange({1 - comm.rank: big}, {1 - comm.rank: out})
        assert (out == 1 - comm.rank).all()
        rows = {row["collective"]: row for row in cccl.stats()["rows"]}
        assert rows["send"]["bytes_sent"] > big.nbytes
        assert rows["recv"]["bytes_received"] > big.nbytes
        assert rows["recv"]["bytes_sent"] == 0
        assert cccl.stats()["total"]["plain_bytes"] == big.nbytes


def test_two_ranks_swap_more_than_sockets_hold(ranks, tmp_path):
    ranks(2)(_swap, tmp_path / "meeting")


def _leaves_early(folder):
    """Who has sent all leaves, long before the others receive it."""
    with communicator(folder) as comm:
        array = np.full(1000, 5.0 if comm.rank == 0 else 0.0)
        for _ in range(2):
            if comm.rank == 1:
                time.sleep(0.5)
            comm.broadcast(array, 0)
        for _ in range(2):
            if comm.rank == 0:
                comm.send(array, 1)
                continue
            time.sleep(0.5)
            assert (comm.recv(np.empty(1000), 0) == 5).all()


def test_a_sender_may_leave_before_its_values_are_received(ranks, tmp_path):
    ranks(2)(_leaves_early, tmp_path / "meeting")


def _differ(folder):
    with communicator(folder) as comm:
        if comm.rank == 2:
            pass
        elif comm.rank == 0:
            with pytest.raises(cccl.MismatchError, match=r"from rank 0 .* to rank 1 .*count"):
                comm.send(np.ones(10), 1)
            with pytest.raises(cccl.MismatchError, match="dtype"):
                comm.send(np.ones(10), 1)
            comm.send(np.ones(10), 1)
        else:
            for wrong in (np.empty(11), np.empty(10, np.float32)):
                with pytest.raises(cccl.MismatchError, match=r"from rank 0 .* to rank 1"):
                    comm.recv(wrong, 0)
            assert (comm.recv(np.empty(10), 0) == 1).all()
        return comm.all_reduce(np.ones(1)).tolist()


def test_ends_that_differ_are_told_and_go_on(ranks, tmp_path):
    assert ranks(3)(_differ, tmp_path / "meeting") == [[3.0]] * 3
