"""Which ranks share a host, and what each does in a collective: no ranks and no torch needed."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cccl
from cccl import _hierarchy as h
from cccl._legs import Chain, Lines


@st.composite
def groupings(draw):
    """Hosts of up to 7 ranks, in any order."""
    size = draw(st.integers(1, 7))
    host_of = draw(st.lists(st.integers(0, size - 1), min_size=size, max_size=size))
    return [[r for r in range(size) if host_of[r] == n] for n in sorted(set(host_of))]


COLLECTIVES = {
    "all_reduce": lambda inputs, counts: [sum(inputs)] * len(inputs),
    "reduce_scatter": lambda inputs, counts: np.split(sum(inputs), np.cumsum(counts)[:-1]),
    "all_gather": lambda inputs, counts: [np.concatenate(inputs)] * len(inputs),
}


def run(hosts, collective, inputs, root=0):
    """What all ranks end up with, by their plans; None if those go flat."""
    size = len(inputs)
    views = [h.Hosts(hosts, rank) for rank in range(size)]
    plans = [view.plan(collective, len(inputs[0]), root) for view in views]
    assert len({plan is None for plan in plans}) == 1, "all ranks go one way"
    if plans[0] is None:
        return None
    counts = {"all_gather": len(inputs[0]) * size, "reduce_scatter": len(inputs[0]) // size}
    in_place = collective in ("all_reduce", "broadcast")
    memory = []
    for plan, values in zip(plans, inputs, strict=True):
        out = values.copy() if in_place else np.full(counts[collective], -1)
        memory.append({h.IN: out if in_place else values, h.OUT: out}
                      | {name: np.full(n, -1) for name, n in plan.buffers.items()})  # fmt: skip
        if plan.sort_input:
            parts = np.split(values, size)
            memory[-1][h.SORTED][:] = np.concatenate([parts[i] for i in plan.sort_input])
    for stage in h.STAGES:
        legs = {r: leg for r in range(size) for leg in plans[r].legs if leg.stage == stage}
        members = {r: views[r].between if stage == h.ACROSS else views[r].inside for r in legs}
        for ranks in set(members.values()):
            assert all(members.get(r) == ranks for r in ranks), "a leg that not all its ranks have"
            sources = [memory[r][s.buffer][s.begin : s.end]
                       for r in ranks for s in [legs[r].source]]  # fmt: skip
            first = legs[ranks[0]]
            if first.collective == "broadcast":
                results = [sources[first.root]] * len(ranks)
            else:
                results = COLLECTIVES[first.collective](sources, first.counts)
            for r, result in zip(ranks, [one.copy() for one in results], strict=True):
                assert (legs[r].counts, legs[r].root) == (first.counts, first.root)
                target = legs[r].target
                memory[r][target.buffer][target.begin : target.end] = result
    for plan, held in zip(plans, memory, strict=True):
        if plan.sort_output:
            parts = np.split(held[h.SORTED], size)
            held[h.OUT][:] = np.concatenate([parts[i] for i in plan.sort_output])
    return [held[h.OUT] for held in memory]


@given(groupings(), st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast"]),
       st.sampled_from([0, 1, 3, 2047, 2048, 2049, 9000]), st.data())  # fmt: skip
def test_legs_make_the_whole_collective_whatever_the_hosts(hosts, collective, count, data):
    size = sum(map(len, hosts))
    root = data.draw(st.integers(0, size - 1))
    if collective == "reduce_scatter":
        count *= size
    inputs = [np.arange(count) * (rank + 1) + 100_000 * rank for rank in range(size)]
    found = run(hosts, collective, inputs, root)
    if found is None:
        even = len({len(host) for host in hosts}) == 1
        assert len(hosts) == size or collective != "all_reduce"
        assert len(hosts) == size or not even
        return
    if collective == "broadcast":
        expected = [inputs[root]] * size
    else:
        expected = COLLECTIVES[collective](inputs, [count // size] * size)
    for mine, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, right)


@given(groupings(), st.integers(0, 100_000))
def test_hosts_send_each_value_once_between_them(hosts, count):
    """Shards of the ranks of a host cover the tensor, and are a lane's share of it."""
    for host in hosts:
        plans = [h.Hosts(hosts, rank).plan("all_reduce", count) for rank in host]
        if plans[0] is None or len(hosts) == 1:
            continue
        across = [leg.source for plan in plans for leg in plan.legs if leg.stage == h.ACROSS]
        assert sum(span.end - span.begin for span in across) == count
        lanes = min(map(len, hosts))
        assert all(span.end - span.begin <= count / lanes + 2048 for span in across)


def test_the_mean_of_hosts_means_is_weighted_by_their_ranks():
    assert h.Hosts([[0, 1, 2], [3]], 0).weight == 1.5
    assert h.Hosts([[0, 1, 2], [3]], 3).weight == 0.5
    assert h.Hosts([[0, 2], [1, 3]], 3).weight == 1


def places(monkeypatch, ranks, setting="auto"):
    """Of all ranks, each with its variables."""
    packed = b""
    for rank, variables in enumerate(ranks):
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        packed += h.packed_place(*h.place_of(setting, rank, range(len(ranks))))
    return packed


def local(rank, size, **more):
    return {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, **more}


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [
        ([local(0, 2), local(1, 2), local(0, 2), local(1, 2)], ((0, 1), (2, 3))),
        ([local(0, 1), local(0, 3), local(1, 3), local(2, 3)], ((0,), (1, 2, 3))),
        ([local(r // 2, 2, GROUP_RANK=r % 2) for r in range(4)], ((0, 2), (1, 3))),
        ([{}, {}], ((0, 1),)),  # both by this machine's name
    ],
)
def test_auto_goes_by_the_launchers_variables_then_by_host_names(monkeypatch, ranks, hosts):
    assert h.hosts_of(places(monkeypatch, ranks), 0, True).hosts == hosts


def test_ranks_that_do_not_follow_each_other_on_a_host_are_seen(monkeypatch):
    """Without GROUP_RANK only the first rank of a host can name it."""
    packed = places(monkeypatch, [local(r // 2, 2) for r in range(4)])
    with pytest.raises(cccl.ConfigError, match="LOCAL_WORLD_SIZE"):
        h.hosts_of(packed, 0, True)


def test_what_auto_goes_by_is_part_of_what_ranks_compare(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    by_name = h.description("auto")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert len({by_name, h.description("auto"), h.description(2), h.description(((0,), (1,)))}) == 4


def test_hosts_that_are_named_must_have_all_ranks():
    assert h.place_of(((0, 1), (2, 3)), 2, [2, 3])[0] == "1"
    with pytest.raises(cccl.ConfigError, match="rank 4"):
        h.place_of(((0, 1), (2, 3)), 0, [0, 1, 4])


@pytest.mark.parametrize(
    ("text", "value"),
    [("auto", "auto"), ("off", "off"), ("4", 4), ("[[0, 1], [2]]", ((0, 1), (2,)))],
)
def test_the_setting_comes_from_code_and_environment_alike(monkeypatch, text, value):
    monkeypatch.setenv("CCCL_HIERARCHY", text)
    assert cccl.Config.load(None).hierarchy == value
    monkeypatch.delenv("CCCL_HIERARCHY")
    assert cccl.Config.load(None).hierarchy == "off"
    assert cccl.Config.load({"hierarchy": value}).hierarchy == value


@pytest.mark.parametrize("text", ["on", "0", "True", "[]", "[[0], [0]]", "[[0, 1]"])
def test_what_is_no_hierarchy_is_refused_in_the_environment_too(monkeypatch, text):
    monkeypatch.setenv("CCCL_HIERARCHY", text)
    with pytest.raises(cccl.ConfigError, match="ranks per host"):
        cccl.Config.load(None)


def test_auto_compression_measures_flat_collectives_only():
    with pytest.raises(cccl.ConfigError, match="codec named"):
        cccl.Config(compression_type="auto", hierarchy=2)
    config = cccl.Config(hierarchy=2, weights_type="auto")
    assert config.of("broadcast").hierarchy == "off"
    assert config.of("all_reduce").hierarchy == 2


def _leg(log, stage, name, pause):
    def begin(on_done):
        log[stage].append(name)
        threading.Thread(target=lambda: (time.sleep(pause), on_done(None))).start()

    return begin


def test_every_stage_takes_collectives_in_the_order_of_their_calls():
    """Whatever ends first, and whichever stages a collective has: ranks would else disagree."""
    generator, log, lines = random.Random(0), {0: [], 1: [], 2: []}, Lines()
    chains, ended = [], []
    for name in range(60):
        legs = [
            _leg(log, stage, name, generator.uniform(0, 4e-3)) if generator.random() < 0.7 else None
            for stage in range(3)
        ]
        chains.append(Chain(lines, legs, lambda error, name=name: ended.append(name)))
        lines.add(chains[-1])
    assert all(chain.wait(20) for chain in chains)
    assert all(order == sorted(order) for order in log.values())
    assert sorted(ended) == list(range(60))


def test_a_leg_that_fails_ends_its_collective_and_no_other_stage_waits_for_it():
    lines, seen = Lines(), []

    def refused(on_done):
        raise cccl.ClosedError("closed")

    def failing(on_done):
        threading.Thread(target=lambda: on_done(cccl.TransportError("lost"))).start()

    def keep(error):
        seen.append(type(error))
        return error

    log = {0: [], 1: [], 2: []}
    chains = [
        Chain(lines, legs, keep)
        for legs in ([failing, None, None], [None, refused, None], [None, None, _leg(log, 2, 2, 0)])
    ]
    for chain in chains:
        lines.add(chain)
    with pytest.raises(cccl.TransportError, match="lost"):
        chains[0].wait(10)
    with pytest.raises(cccl.ClosedError):
        chains[1].wait(10)
    assert chains[2].wait(10) and chains[2].done() and chains[2].error() is None
    assert sorted(kind.__name__ for kind in seen) == ["ClosedError", "NoneType", "TransportError"]
