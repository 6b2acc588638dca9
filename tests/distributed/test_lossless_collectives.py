"""Weights through broadcast and all_gather without losing a bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expect import EVERYTHING, KINDS, assert_equal, bits, digest, rows_of, weights

import cccl
import cccl.torch
from cccl import _policy

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)


def _every_bit(config):
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for dtype in DTYPES:
        for kind in KINDS:
            parts = [weights(r, kind, dtype) for r in range(world)]
            sent = parts[rank].clone()
            cccl.torch.broadcast(sent, world - 1, config=config)
            assert torch.equal(bits(sent), bits(parts[-1]))
            gathered = torch.empty(world * parts[0].numel(), dtype=dtype)
            cccl.torch.all_gather(gathered, parts[rank], config=config)
            assert torch.equal(bits(gathered), bits(torch.cat(parts)))
            found.append(digest(sent) + digest(gathered))
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"compression_type": "none", "weights_type": "lossless", "strict": True},
        {"compression_type": "none", "weights_type": "lossless", "chunk_size": 4096, "window": 3},
        {"compression_type": "lossless", "collective_filter": EVERYTHING, "level": "best"},
    ],
    ids=str,
)
def test_every_bit_arrives(ranks, world, settings):
    """F041: -0.0, NaN payloads and denormals too."""
    assert_equal(ranks(world)(_every_bit, settings))


def _sums():
    rank, world = dist.get_rank(), dist.get_world_size()
    config = cccl.Config(compression_type="lossless", strict=True)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        parts = [weights(r, "weights", dtype) for r in range(world)]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part.to(wide)
        mine = parts[rank].clone()
        cccl.torch.all_reduce(mine, "sum", config=config)
        assert torch.equal(mine, total.to(dtype))


def test_a_sum_is_that_of_plain_values_in_rank_order(ranks):
    ranks(3)(_sums)


def _bytes():
    config = {"compression_type": "none", "weights_type": "lossless"}
    tensor = (torch.randn(1 << 20) * 0.02).bfloat16()
    gathered = torch.empty(2 << 20, dtype=torch.bfloat16)
    cccl.reset_stats()
    cccl.torch.broadcast(tensor.clone(), 0, config=config)
    cccl.torch.all_gather(gathered, tensor, config=config)
    cccl.torch.all_reduce(tensor, config=config)
    rows = [rows_of(name, torch.bfloat16)[0] for name in ("broadcast", "all_gather", "all_reduce")]
    return [(row["bytes_sent"], row["plain_bytes"], bool(row["plain"])) for row in rows]


def test_two_thirds_of_the_bytes_are_sent_and_gradients_stay_plain(ranks):
    """All-reduce is not touched: the setting is that of weights alone."""
    (broadcast, gathered, reduced), (_, gathered_too, _) = ranks(2)(_bytes)
    for sent, plain, is_plain in (broadcast, gathered, gathered_too):
        assert 0.66 * plain < sent < 0.69 * plain and not is_plain
    assert reduced[2]


def _auto(lossless, plain):
    sizes = (1 << 10, 1 << 20, 1 << 24)
    link = {"none": plain, "lossless": lossless}
    _policy.calibrate = lambda *_: _policy.Table(sizes, link, link)
    _policy.Policy.observe = lambda *_: None
    config = {"compression_type": "auto", "strict": True}
    tensor = weights(dist.get_rank(), "weights", torch.bfloat16)
    expected = weights(0, "weights", torch.bfloat16)
    cccl.torch.broadcast(tensor, 0, config=config)
    assert torch.equal(bits(tensor), bits(expected))
    (row,) = rows_of("broadcast", torch.bfloat16)
    return bool(row["plain"])


@pytest.mark.parametrize("wins", [True, False])
def test_auto_sends_weights_lossless_where_that_was_measured_to_be_faster(own_ranks, wins):
    slow, fast = (1e-3, 1.0, 10.0), (1e-3, 0.1, 1.0)
    times = (fast, slow) if wins else (slow, fast)
    assert own_ranks(2)(_auto, *times) == [not wins] * 2


def _measured():
    cccl.configure({"compression_type": "auto", "attach_ddp": False})
    tensor = weights(dist.get_rank(), "weights", torch.bfloat16)
    whole = torch.empty(2 * tensor.numel(), dtype=tensor.dtype)
    cccl.torch.all_gather(whole, tensor)
    parts = [weights(rank, "weights", torch.bfloat16) for rank in range(2)]
    assert torch.equal(bits(whole), bits(torch.cat(parts)))
    measured = [row for row in cccl.stats()["rows"] if row["label"] == "auto: measuring"]
    return [row["codec"].startswith("lossless") for row in measured if not row["plain"]]


def test_auto_measures_lossless_on_the_weights_themselves(own_ranks):
    for codecs in own_ranks(2)(_measured):
        assert codecs and all(codecs)
