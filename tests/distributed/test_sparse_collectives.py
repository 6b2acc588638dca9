"""Payloads without a fixed size travel as long as they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import EVERYTHING, assert_equal, digest, gradient, rows_of, sparse

import cccl
import cccl.torch


def _exact(zeros):
    """Each rank has another density; the sum is denser than any."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = cccl.Config(compression_type="sparse", collective_filter=EVERYTHING, strict=True)
    found = []
    for count in (1, 2047, 100_000, 1_000_001):
        parts = [sparse(r, count, zeros[r]) for r in range(world)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part  # in rank order, as the owner does
        mine = parts[rank].clone()
        cccl.torch.all_reduce(mine, "sum", config=config)
        assert torch.equal(mine, total)

        whole = torch.cat(parts)
        gathered = torch.empty(world * count)
        cccl.torch.all_gather(gathered, parts[rank], config=config)
        assert torch.equal(gathered, whole)
        part = torch.empty(count)
        cccl.torch.reduce_scatter(part, whole, "sum", config=config)
        assert torch.equal(part, parts[rank] * world)
        sent = parts[rank].clone()
        cccl.torch.broadcast(sent, world - 1, config=config)
        assert torch.equal(sent, parts[-1])
        found.append(digest(mine) + digest(gathered) + digest(sent))
    return found


@pytest.mark.parametrize(
    "zeros", [(0.9, 0.9), (0.0, 1.0, 0.5), (1.0, 1.0), (0.99, 0.6, 0.95, 0.0)], ids=str
)
def test_exact_sparse_collectives_lose_nothing(ranks, zeros):
    assert_equal(ranks(len(zeros))(_exact, zeros))


def _bytes():
    count = 1 << 20
    config = cccl.Config(compression_type="sparse", strict=True)
    cccl.reset_stats()
    mine = sparse(dist.get_rank(), count, 0.9)
    cccl.torch.all_reduce(mine, config=config)
    (row,) = rows_of("all_reduce", torch.float32)
    return row["bytes_sent"], row["bytes_received"], row["plain_bytes"]


def test_the_bytes_on_the_wire_follow_the_zeros(ranks):
    """The first leg holds a tenth of the values, the second, a sum of two, a fifth."""
    found = ranks(2)(_bytes)
    for rank, (sent, received, plain) in enumerate(found):
        assert 0.14 * plain < sent < 0.2 * plain
        assert received == found[1 - rank][0]


def _unequal():
    """Another share of zeros on every rank and in every round, none and all among them."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(7)
    shares = torch.tensor([0.0, 0.5, 0.9, 0.99, 1.0])
    config = cccl.Config(compression_type="sparse", strict=True)
    for round in range(300):
        count = int(torch.randint(1, 5000, (1,), generator=generator))
        order = torch.randint(0, 5, (dist.get_world_size(),), generator=generator)
        parts = [
            gradient(r, count, torch.float32, seed=round)
            * (torch.rand(count, generator=generator) >= shares[order[r]])
            for r in range(dist.get_world_size())
        ]
        mine, total = parts[rank].clone(), parts[0].clone()
        for part in parts[1:]:
            total += part  # in rank order, as the owner does
        cccl.torch.all_reduce(mine, "sum", config=config)
        assert torch.equal(mine, total), round


def test_sizes_that_differ_between_ranks_stall_nothing(ranks):
    """F074"""
    ranks(3)(_unequal)
