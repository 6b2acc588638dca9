"""`cccl.torch.tune.tune` on ranks that differ."""

from __future__ import annotations

import os

import pytest

import cccl


def tune_on_uneven_hosts():
    import torch.distributed as dist

    from cccl.torch.tune import tune

    os.environ["LOCAL_WORLD_SIZE"] = str(1 + dist.get_rank())
    try:
        return tune(seconds=0.3)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_ranks_of_uneven_hosts_find_the_same(ranks):
    first, second = ranks(2)(tune_on_uneven_hosts)
    assert first == second
    assert first["cluster"]["ranks_per_host"] == 2


@pytest.mark.parametrize("seconds", [0.0, float("inf"), float("nan")])
def test_seconds_that_cannot_be_spent_are_refused(seconds):
    tuning = pytest.importorskip("cccl.torch.tune", reason="tune needs torch")
    with pytest.raises(cccl.ConfigError, match="more than 0 seconds"):
        tuning.tune(seconds=seconds)
