"""check_replicas(): do all ranks train one model?"""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cccl
import cccl.torch


def _scaled(scales):
    """A step under loss scales, which each rank takes out of the averaged gradients again."""
    torch.manual_seed(0)
    rank, layer = dist.get_rank(), torch.nn.Linear(64, 64)
    model = DistributedDataParallel(layer)
    cccl.torch.compress(model, {"compression_type": "block_float8"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = scales[rank]
    data = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    (model(data).square().mean() * scale).backward()
    for parameter in model.parameters():
        parameter.grad /= scale
    optimizer.step()
    try:
        cccl.torch.check_replicas(model)
    except cccl.MismatchError as error:
        return str(error)
    return [parameter.detach().clone() for parameter in layer.parameters()]


def test_loss_scales_of_their_own_set_replicas_apart_and_that_is_found(ranks):
    """F007"""
    pool = ranks(3)
    found = pool(_scaled, (1.0, 2.0, 4.0))
    assert len(set(found)) == 1
    assert "weight (ranks [1, 2])" in found[0] and "bias (ranks [1, 2])" in found[0]
    assert "2 of 2 parameters" in found[0]
    reference, same = pool(_scaled, (1.0, 1.0, 1.0))[0], pool(_scaled, (4.0, 4.0, 4.0))[0]
    assert all(torch.equal(a, b) for a, b in zip(reference, same, strict=True))


def _one_bit(what):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    if dist.get_rank() == 1:
        if what == "name":
            model.append(torch.nn.Linear(1, 1))
        elif what == "shape":
            model[1].weight.data = torch.zeros(2, 8, dtype=torch.bfloat16)
        else:
            model[1].weight.data[2, 3] = -0.0  # equal as a number, not as bits
    with pytest.raises(cccl.MismatchError) as caught:
        cccl.torch.check_replicas(model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("bit", "1 of 4 parameters .* 1.weight"),
        ("shape", "1 of 4 parameters .* 1.weight"),
        ("name", "ranks \\[1\\] have"),
    ],
)
def test_one_bit_or_another_model_is_found_on_all_ranks(ranks, what, text):
    found = ranks(2)(_one_bit, what)
    assert len(set(found)) == 1 and re.search(text, found[0])


def _outside():
    group = dist.new_group([0])
    return cccl.torch.check_replicas(torch.nn.Linear(2, 2), group)


def test_a_rank_outside_the_group_has_nothing_to_do(ranks):
    assert ranks(2)(_outside) == [None, None]


def _equal(backend):
    """Parameters of any strides, in a group of our own backend too."""
    group = dist.new_group(backend=backend)
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1), model.bias.fill_(2)
    model.column = torch.nn.Parameter(torch.zeros(8, 2)[:, 0])
    return cccl.torch.check_replicas(model, group)


@pytest.mark.parametrize("backend", ["gloo", "cccl"])
def test_equal_replicas_pass(ranks, backend):
    assert ranks(2)(_equal, backend) == [None, None]
