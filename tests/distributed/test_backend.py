"""Backend "cccl" beside the plain one in the same run: equal where nothing is compressed."""

from __future__ import annotations

import c10d_calls
import pytest
import torch
import torch.distributed as dist
from expect import EVERYTHING, digest

import cccl
import cccl.torch

OFF = {
    "none": {"compression_type": "none"},
    "identity": {"compression_type": "identity", "collective_filter": EVERYTHING, "min_size": 0},
    "nothing in the filter": {"collective_filter": ()},
    "all below min_size": {"collective_filter": EVERYTHING, "min_size": "1MiB"},
}


def _same(name, settings):
    cccl.configure(cccl.Config(attach_ddp=False, **settings))
    calls = getattr(c10d_calls, name)
    plain, group = dist.new_group(backend="gloo"), dist.new_group(backend="cpu:cccl")
    expected = calls(plain)
    cccl.reset_stats()
    found = calls(group)
    assert [(t.dtype, t.shape) for t in found] == [(t.dtype, t.shape) for t in expected]
    assert [digest(t) for t in found] == [digest(t) for t in expected]
    assert all(row["plain"] for row in cccl.stats()["rows"])
    dist.destroy_process_group(plain)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("name", [calls.__name__ for calls in c10d_calls.EVERY])
@pytest.mark.parametrize("settings", OFF.values(), ids=OFF)
def test_what_is_not_compressed_equals_the_plain_backend_bitwise(ranks, settings, name):
    ranks(3)(_same, name, settings)
