"""How NCCL's ranks reach each other beside it: needs a store, and no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

import cccl
from cccl import _core
from cccl.torch._groups import store_channel


def _exchange(generation):
    rank, world = dist.get_rank(), dist.get_world_size()
    channel = store_channel(dist.group.WORLD, generation)
    for number in (0, 1, 5, 2**64 - 1):
        mine = bytes([rank]) * (700 + number % 3) + bytes(range(256))
        found = channel.exchange(mine, number, 20.0)
        assert len(found) == world * len(mine)
        assert all(found[r * len(mine)] == r for r in range(world))
        assert found[rank * len(mine) :][: len(mine)] == mine
    # What all have read is gone; no key is left but those of the last two exchanges.
    assert not channel._store.check([f"1/{rank}"])
    assert channel._store.check([f"{2**64 - 1}/{rank}"])
    return found


@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_exchange_bytes(ranks, world):
    """F096: every value of a byte."""
    found = ranks(world)(_exchange, f"exchange-{world}")
    assert all(one == found[0] for one in found)


def _late(generation):
    channel = store_channel(dist.group.WORLD, generation)
    if dist.get_rank() == 1:
        return 0.0
    begun = time.monotonic()
    with pytest.raises(cccl.DeadlineError, match="for rank 1 of its group"):
        channel.exchange(b"here", 3, 0.5)
    return time.monotonic() - begun


def test_a_rank_that_does_not_come_is_named(ranks):
    assert max(ranks(3)(_late, "late")) < 5


def _told(generation):
    channel = store_channel(dist.group.WORLD, generation)
    if dist.get_rank() == 1:
        channel.tell("no more memory")
        assert channel.heard(False) == ""  # its own
        return
    assert "rank 1 gave up: no more memory" in channel.heard(True)
    with pytest.raises(cccl.PeerAbortedError, match="no more memory"):
        channel.exchange(b"here", 4, 0.5)


def test_a_rank_that_gives_up_is_heard(ranks):
    ranks(2)(_told, "told")


@pytest.mark.skipif(not _core.cuda_built(), reason="a build without CUDA")
def test_a_library_that_is_not_there_is_named():
    """F090: importing needs none, and the error says what was tried and what to do."""
    program = """
import cccl._core as core, cccl
try:
    core.nccl_version()
except cccl.UnsupportedError as error:
    print(error)
"""
    environment = {**os.environ, "CCCL_NCCL_PATH": "/nowhere/libnccl.so.2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "/nowhere/libnccl.so.2" in done.stdout
    assert "CCCL_NCCL_PATH" in done.stdout
    assert done.returncode == 0, done.stderr
