"""compression_type auto: from measured times to one choice on all ranks, without any device."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cccl import _policy
from cccl._policy import GAIN, SIZES, Between, Choice, Policy, Table, calibrate
from cccl._rules import PLAIN

CODEC = "block_float8"
MIB = 1 << 20
seconds = st.floats(1e-6, 10.0)


class Network:
    """Ranks as threads over a simulated link; a rank's clock runs as it measures and waits."""

    def __init__(self, world: int, rate: float, latency: float = 1e-4, noise: float = 0.0):
        self.rate, self.latency, self.noise = rate, latency, noise
        self.probes = [Rank(self, rank) for rank in range(world)]
        self.barrier = threading.Barrier(world)
        self.shown: dict[int, list[float]] = {}

    def run(self, job):
        """`job(probe)` on each rank."""
        with ThreadPoolExecutor(len(self.probes)) as pool:
            return list(pool.map(job, self.probes))

    def cost(self, name: str, nbytes: int) -> float:
        """A codec sends a quarter, and encodes and decodes 2 GB/s."""
        if name == PLAIN:
            return self.latency + nbytes / self.rate
        return 1.2 * self.latency + nbytes / 4 / self.rate + nbytes / 2e9


class Rank:
    def __init__(self, network: Network, rank: int):
        self.network, self.rank, self.clock = network, rank, 1000.0 * rank
        self.random = random.Random(rank)

    def measure(self, name: str, nbytes: int) -> float:
        time = self.network.cost(name, nbytes)
        time *= 1 + self.network.noise * self.random.random() * (1 + self.rank)
        self.clock += time
        return time

    def slowest(self, values: list[float]) -> list[float]:
        self.network.shown[self.rank] = values
        self.network.barrier.wait()
        found = [max(column) for column in zip(*self.network.shown.values(), strict=True)]
        self.network.barrier.wait()
        return found


@pytest.fixture
def simulated(monkeypatch):
    """The policy's time is that of the rank whose thread it runs on."""
    here = threading.local()
    monkeypatch.setattr(_policy.time, "perf_counter", lambda: here.rank.clock)

    def on(network, job):
        def with_clock(probe):
            here.rank = probe
            return job(probe)

        return network.run(with_clock)

    return on


@st.composite
def tables(draw):
    count = draw(st.integers(3, len(SIZES)))
    rows = [[draw(seconds) for _ in range(6)] for _ in range(count)]
    return Table.of((PLAIN, CODEC, "block_float4"), rows)


@given(tables(), st.integers(1, 1 << 31))
def test_nothing_is_chosen_that_is_predicted_slower(table, nbytes):
    """F101: for every size there is a choice."""
    choice = table.choose(nbytes)
    assert choice.predicted == table.predict(table.medians[choice.codec], nbytes)
    assert choice.undisturbed == table.predict(table.quartiles[choice.codec], nbytes)
    if choice.codec != PLAIN:
        assert choice.predicted <= GAIN * choice.alternative
        assert choice.alternative == table.predict(table.medians[PLAIN], nbytes)
        assert choice.undisturbed <= table.predict(table.quartiles[PLAIN], nbytes)


@given(tables(), st.integers(1, 1 << 31), st.integers(1, 1 << 31))
def test_predictions_do_not_fall_as_sizes_grow(table, one, other):
    """F101"""
    for curve in (*table.medians.values(), *table.quartiles.values()):
        small, large = (table.predict(curve, nbytes) for nbytes in sorted((one, other)))
        assert 0 < small <= large * (1 + 1e-12)


def test_predictions_are_lines_through_what_was_measured():
    table = Table((1000, 2000), {}, {})
    found = [table.predict((1.0, 3.0), nbytes) for nbytes in (1, 1000, 1500, 2000, 4000)]
    assert found == [1.0, 1.0, 2.0, 3.0, 7.0]
    whole = Table(SIZES, {}, {})
    assert whole.predict((1.0, 1.0, 1.0, 1.0, 1.0, 3.0), 4 * SIZES[-1]) == 12.0


def test_a_pause_at_one_size_reaches_no_other():
    rows = [[9.0, 1.0] * 2, [2.0, 3.0] * 2, [4.0, 9.0] * 2, [8.0, 10.0] * 2]
    table = Table.of((PLAIN, CODEC), rows)
    assert table.medians == {PLAIN: (2.0, 2.0, 4.0, 8.0), CODEC: (1.0, 3.0, 9.0, 10.0)}
    assert table.quartiles == table.medians


@pytest.mark.parametrize(("rate", "codec"), [(12.5e6, CODEC), (125e6, CODEC), (5e9, PLAIN)])
def test_slow_links_choose_the_codec_and_memory_plain(simulated, rate, codec):
    """F099"""
    found = simulated(Network(2, rate, 1e-3), lambda probe: calibrate((CODEC,), probe))
    assert found[0].choose(64 * MIB).codec == codec
    assert found[0].choose(100).codec == PLAIN, "a codec takes longer to begin"


@pytest.mark.parametrize("noise", [0.0, 3.0])
@pytest.mark.parametrize("rate", [12.5e6, 1.25e9, 1e11])
def test_all_ranks_hold_one_table_though_their_clocks_and_loads_differ(simulated, rate, noise):
    network = Network(3, rate, noise=noise)
    found = simulated(network, lambda probe: calibrate((CODEC, "block_float4"), probe))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("rate", "latency"), [(12.5e6, 1e-4), (12.5e6, 0.05), (1e10, 1e-4)])
def test_measuring_takes_less_than_a_second(simulated, rate, latency):
    """On 100 Mbit/s too, and with 50 ms of latency."""

    def job(probe):
        begun = probe.clock
        calibrate((CODEC,), probe)
        return probe.clock - begun

    assert max(simulated(Network(2, rate, latency), job)) < 1.0


def test_a_choice_changes_at_the_same_call_on_every_rank(simulated):
    """F110: the link gets slow; ranks see it in the times of their calls, each in its own."""
    network = Network(3, 1e11)

    def job(probe):
        policy, chosen = Policy((CODEC,), probe), []
        for call in range(1000):
            if call == 50:
                network.barrier.wait()
                network.rate = 12.5e6
                network.barrier.wait()
            if policy.due:
                policy.review(probe)
            choice = policy.choose(4 * MIB)
            policy.observe(choice, probe.measure(choice.codec, 4 * MIB))
            chosen.append(choice.codec)
        return chosen

    found = simulated(network, job)
    assert found[0] == found[1] == found[2]
    assert found[0][:50] == [PLAIN] * 50 and found[0][-1] == CODEC


def test_what_went_as_predicted_is_not_measured_again(simulated):
    def job(probe):
        policy = Policy((CODEC,), probe)
        table = policy.table
        for _ in range(500):
            if policy.due:
                policy.review(probe)
            choice = policy.choose(MIB)
            policy.observe(choice, probe.measure(choice.codec, MIB))
        return policy.table is table

    assert all(simulated(Network(2, 125e6), job))


def test_measuring_stays_within_its_share_however_times_drift(simulated):
    def job(probe):
        begun, measured = probe.clock, 0
        policy = Policy((CODEC,), probe)
        table = policy.table
        for _ in range(5000):
            if policy.due:
                policy.review(probe)
            measured += policy.table is not table
            table = policy.table
            choice = policy.choose(MIB)
            probe.clock += 0.1
            policy.observe(choice, 0.1)
        return measured, policy._spent, probe.clock - begun

    measured, spent, total = simulated(Network(2, 125e6), job)[0]
    assert measured > 1
    assert spent <= _policy.AT_START + _policy.SHARE * total


class OnDevice:
    """A call of which a device, once it is done, knows how long it took."""

    def __init__(self, seconds: float | None, ended: bool = True):
        self.seconds, self.ended = seconds, ended

    def done(self) -> bool:
        return self.ended


def _follow(probe, device, host, ended=lambda call: True):
    """Policy after 50 calls that a device does in `device` of the predicted time, and that the host
    submits in `host` of it; and how often it measured."""
    policy, tables = Policy((CODEC,), probe), []
    for call in range(50):
        if policy.due:
            policy.review(probe)
        if policy.table not in tables:
            tables.append(policy.table)
            probe.network.rate *= 1.001  # so that tables differ
        choice = policy.choose(4 * MIB)
        if policy.watches:
            seconds = None if device is None else device * choice.undisturbed
            policy.follow(choice, OnDevice(seconds, ended(call)), host * choice.undisturbed)
    return policy, len(tables)


@pytest.mark.parametrize(
    ("device", "host", "drifted"),
    [
        (1.0, 0.1, False),
        (0.1, 0.9, False),  # the host was ahead, so that the device did not wait for it
        (5.0, 0.1, True),
        (0.1, 0.1, True),
        (None, 9.0, False),  # it failed, say
    ],
)
def test_times_on_a_device_are_observed_though_nobody_waits_for_them(
    simulated, device, host, drifted
):
    """Measured anew once: a second time would be over the budget."""
    network = Network(2, 125e6)
    found = simulated(network, lambda probe: _follow(probe, device, host)[1])
    assert found == [1 + drifted] * 2


def test_a_call_under_way_is_observed_at_a_later_review(simulated):
    """And there are never more than a few."""

    def job(probe):
        policy, measured = _follow(probe, 9.0, 0.1, ended=lambda call: False)
        followed = [call for _, call, _ in policy._followed]
        for call in followed:
            call.ended = True
        policy.review(probe)
        return measured, len(followed), policy.watches

    assert simulated(Network(2, 125e6), job) == [(1, _policy._MOST_FOLLOWED, True)] * 2


class Event:
    """A device comes to it at that second."""

    def __init__(self, at):
        self.at = at

    def query(self):
        return True

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


class Future:
    """Of a work that ends when a test says so."""

    def get_future(self):
        return self

    def then(self, callback):
        self.end = lambda: callback(self)


def _between(begin, end, latest=None, work=None):
    events = iter([Event(begin), Event(end)])
    call = Between(lambda: next(events), latest)
    call.end(work)
    return call


def test_calls_between_events_count_from_the_end_of_the_one_before():
    """As they queue for one link; one that began after that end counts whole."""
    first = _between(10.0, 12.0)
    queued = _between(10.5, 15.0, first)
    after = _between(20.0, 21.0, queued)
    beside = _between(20.0, 20.5, after)  # ended before the one before it
    found = [call.seconds for call in (first, queued, after, beside)]
    assert found == pytest.approx([2.0, 3.0, 1.0, 0.5])


def test_a_call_between_events_ends_when_its_work_does():
    work = Future()
    call = _between(10.0, 12.0, None, work)
    assert not call.done()
    work.end()
    assert call.done() and call.seconds == pytest.approx(2.0)


def test_an_earlier_choice_stands_until_a_review(simulated):
    def job(probe):
        policy = Policy((CODEC,), probe)
        choice, table = policy.choose(MIB), policy.table
        stood = 0
        while policy.again(choice, table):
            stood += 1
        assert policy.due
        policy.review(probe)
        return stood, policy.again(choice, Table((), {}, {})), policy.again(choice, table)

    assert simulated(Network(2, 125e6), job) == [(15, False, True)] * 2


def test_a_codec_must_win_with_pauses_and_without():
    medians = {PLAIN: (1.0, 2.0), CODEC: (2.0, 1.5), "block_float4": (1.5, 1.0)}
    table = Table((1000, 2000), medians, medians)
    assert table.choose(1000) == Choice(PLAIN, 1.0, 1.0, 1.5)
    assert table.choose(2000) == Choice("block_float4", 1.0, 1.0, 2.0)
    quick = {PLAIN: (1.0, 1.2), CODEC: (1.0, 1.1), "block_float4": (1.0, 1.3)}
    assert Table((1000, 2000), medians, quick).choose(2000) == Choice(CODEC, 1.5, 1.1, 2.0)
