"""The transport under the frontend, without the core."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from ranks import Died

import cccl
from cccl.torch._gloo import GlooTransport

_KEPT: list[GlooTransport] = []  # or its connections would close with it


def _give_up_beside_a_dead_peer():
    """Rank 2 dies, rank 1 notices and gives up, rank 0 waits for rank 1 alone."""
    rank = dist.get_rank()
    transport = GlooTransport(dist.group.WORLD, 0, 30.0)
    _KEPT.append(transport)
    memory = torch.zeros(8, dtype=torch.uint8)
    peer = {0: 1, 1: 2, 2: 1}[rank]
    (request,) = transport.post([(False, memory.data_ptr(), 8, peer, 7)])
    begun = time.monotonic()
    if rank == 2:
        time.sleep(0.5)
        os._exit(1)
    try:
        transport.wait([request], 30.0)
    except cccl.TransportError as error:
        if rank == 1:
            transport.abort(str(error))
        return str(error), time.monotonic() - begun


def test_giving_up_reaches_the_others_even_if_the_next_rank_is_dead(own_ranks):
    found = own_ranks(3).outcomes(_give_up_beside_a_dead_peer, seconds=60)
    assert isinstance(found[2], Died)
    assert "rank 2" in found[1][0]
    text, seconds = found[0]
    assert "rank 1 gave up" in text and "rank 2" in text
    assert seconds < 15


def _intervals():
    """Python's switch interval before, during and after transfers, and after one that failed."""
    rank, usual = dist.get_rank(), sys.getswitchinterval()
    transport = GlooTransport(dist.group.WORLD, 0, 30.0)
    _KEPT.append(transport)
    memory = torch.zeros(2, 8, dtype=torch.uint8)
    transfers = [(sends, memory[int(sends)].data_ptr(), 8, 1 - rank, 7) for sends in (True, False)]
    requests = transport.post(transfers)
    during = sys.getswitchinterval()
    transport.wait(requests, 30.0)
    after = sys.getswitchinterval()
    transport.post(transfers[1:])
    transport.abort("enough")
    return usual, during, after, sys.getswitchinterval()


def test_the_gil_changes_hands_fast_only_while_transfers_are_under_way(own_ranks):
    """Training code that is busy in Python must not keep messages waiting."""
    for usual, during, after, failed in own_ranks(2)(_intervals, seconds=60):
        assert during < usual / 10
        assert after == failed == usual
