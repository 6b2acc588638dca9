"""Fixtures that give a test its processes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="these tests run processes over torch's gloo")

from ranks import Pools, Ranks


@pytest.fixture(scope="session")
def _pools():
    pools = Pools()
    yield pools
    pools.discard()


@pytest.fixture(scope="session")
def _gpu_pools():
    pools = Pools("cpu:gloo,cuda:nccl")
    yield pools
    pools.discard()


@pytest.fixture(scope="session")
def _near_pools():
    pools = Pools("cpu:gloo,cuda:nccl", near=True)
    yield pools
    pools.discard()


@pytest.fixture
def ranks(request, _pools):
    """`ranks(world)` are processes of one gloo group, shared by the tests that behave."""
    yield _pools
    if getattr(request.node, "failed", False):
        _pools.discard()


@pytest.fixture
def gpu_ranks(request, _gpu_pools):
    """The same with a GPU each, or their share of one, and NCCL beside gloo."""
    yield _gpu_pools
    if getattr(request.node, "failed", False):
        _gpu_pools.discard()


@pytest.fixture
def near_ranks(request, _near_pools):
    """The same, that CCCL takes for ranks of one host."""
    yield _near_pools
    if getattr(request.node, "failed", False):
        _near_pools.discard()


@pytest.fixture
def own_ranks():
    """`own_ranks(world)` are processes of this test alone, which it may kill."""
    made: list[Ranks] = []

    def make(world: int, **options) -> Ranks:
        made.append(Ranks(world, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
