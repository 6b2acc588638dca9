"""Processes without torch, each a rank of the communicators that a test makes."""

from __future__ import annotations

import pytest
from ranks import Pools, Ranks


@pytest.fixture(scope="session")
def _plain_pools():
    pools = Pools(None)
    yield pools
    pools.discard()


@pytest.fixture
def ranks(request, _plain_pools):
    """`ranks(world)` are processes, shared by the tests that behave."""
    yield _plain_pools
    if getattr(request.node, "failed", False):
        _plain_pools.discard()


@pytest.fixture
def own_ranks():
    """`own_ranks(world)` are processes of this test alone, which it may kill."""
    made: list[Ranks] = []

    def make(world: int) -> Ranks:
        made.append(Ranks(world, backend=None))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
