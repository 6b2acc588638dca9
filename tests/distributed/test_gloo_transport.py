"""The transport under the frontend, without the core."""

from __future__ import annotations

import os
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
