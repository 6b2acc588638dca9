"""How long a training step takes, plain and compressed: an alpha-beta model of a cluster.

docs/plan.md has the formulas and how far they are from measurements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from ._sources import nearest
from .errors import ConfigError

GIGABIT, GIGABYTE, MICRO = 1e9 / 8, 1e9, 1e-6
CHUNKS = 12  # that the pipeline cuts a large tensor into, at most
# Power of the share of communication that is work, by which it slows computation: of 0 to 1.25 in
# steps of 1/4 the one with the least errors in two runs of benchmarks/plan_lab.py.
CONTENTION = 0.75
LEAST_MESSAGE = {"gloo": 64 * 1024, "nccl": 1024 * 1024}  # bytes, as the core's tuning has them

_LEAST_GBIT, _MOST_GBIT = 1e-3, 1e5  # link rates among which there may be a break-even


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of a codec on one rank that has a core, in GB/s of uncompressed values, others at work."""

    bits: float
    """Per value of the gradients' dtype, on the wire."""
    encode: float
    accumulate: float
    decode: float


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What the model has to know of the machines. `tune` measures it; `plan` reads it."""

    link_gbit: float = 1.0
    """Line rate of a host, each way, in Gbit/s."""
    latency_us: float = 50.0
    """From one rank's send to the other's receive, of an empty message."""
    efficiency: float = 0.95
    """Share of the line rate that is left for payloads, behind the headers of TCP and IP."""
    backend: str = "gloo"
    """"gloo" (plain all-reduce is a ring) or "nccl" (ring or tree)."""
    ranks_per_host: int = 1
    intra_gbyte: float = 100.0
    """Between the ranks of one host, each way and rank, in GB/s."""
    start_us: float = 0.0
    """From a compressed all-reduce's call until all ranks send, beside its latency."""
    message_us: float = 40.0
    """What a message costs a rank at either end."""
    stack_gbyte: float = math.inf
    """Bytes that a rank can send while it receives as many, in GB/s: what sockets cost a core."""
    ranks_per_core: float = 1.0
    """That share a core, if all are at work, by which a rank's own work takes longer."""
    interference: float = 0.0
    """By how much of the work for hidden communication (encoding, sums, sockets) a step becomes
    longer where communication is nothing but work, and by less the more of it is waiting: 0 where
    work has cores of its own, 1 where computation waits for it, more where it waits too."""
    codecs: Mapping[str, Rates] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "backend":
                good, allowed = value in LEAST_MESSAGE, " or ".join(LEAST_MESSAGE)
            elif field.name == "codecs":
                good, allowed = isinstance(value, Mapping), "a table of codecs"
            elif isinstance(value, bool) or not isinstance(value, int | float):
                good, allowed = False, "a number"
            elif field.name == "efficiency":
                good, allowed = 0 < value <= 1, "a number above 0, up to 1"
            elif field.name == "interference":
                good, allowed = 0 <= value < math.inf, "a number from 0"
            elif field.name == "ranks_per_core":
                good, allowed = 1 <= value < math.inf, "a number from 1"
            elif field.name == "ranks_per_host":
                good, allowed = isinstance(value, int) and value > 0, "an integer from 1"
            elif field.name.endswith("_us"):
                good, allowed = 0 <= value < math.inf, "microseconds from 0"
            else:
                good, allowed = value > 0, "more than 0"
            if not good:
                raise ConfigError(f"cluster: {field.name} = {value!r}; allowed: {allowed}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Cluster:
        """From the table `[cluster]` of a profile."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"cluster: unknown key {key!r}{nearest(key, known)}")
        codecs, fields = {}, [field.name for field in dataclasses.fields(Rates)]
        for name, rates in dict(values.get("codecs", {})).items():
            given = list(rates) if isinstance(rates, Mapping) else []
            if set(given) != set(fields):
                raise ConfigError(
                    f"cluster.codecs.{name} has {', '.join(given) or 'no keys'}; it takes "
                    f"{', '.join(fields)}. A profile of another version? Run `python -m cccl tune` "
                    "again."
                )
            codecs[name] = Rates(**rates)
        return cls(**{**values, "codecs": codecs})

    @property
    def link(self) -> float:
        """Bytes of payload per second and host."""
        return self.link_gbit * GIGABIT * self.efficiency


@dataclasses.dataclass(frozen=True)
class Job:
    """A training step of one rank."""

    gradient_bytes: float
    value_bytes: int = 4
    compute_seconds: float = 0.0
    """Of a step that sends nothing."""
    overlap: float = 0.5
    """Share of it behind which communication can hide: the backward pass after its first bucket."""
    bucket_bytes: float = 25 * 2**20

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("gradient_bytes", self.gradient_bytes > 0, "more than 0"),
            ("value_bytes", self.value_bytes in (1, 2, 4, 8), "1, 2, 4 or 8"),
            ("compute_seconds", 0 <= self.compute_seconds < math.inf, "seconds from 0"),
            ("overlap", 0 <= self.overlap <= 1, "a number from 0 to 1"),
            ("bucket_bytes", self.bucket_bytes > 0, "more than 0"),
        ):
            if not good:
                raise ConfigError(f"{name} = {getattr(self, name)!r}; allowed: {allowed}")

    @property
    def buckets(self) -> int:
        """That the gradients are sent in, one after another."""
        return max(1, round(self.gradient_bytes / self.bucket_bytes))


@dataclasses.dataclass(frozen=True)
class Transfer:
    """An all-reduce: its seconds, and those in which the rank itself works for it."""

    seconds: float
    work: float

    def times(self, count: int) -> Transfer:
        """As many, one after another."""
        return Transfer(count * self.seconds, count * self.work)

    def exposed(self, job: Job) -> float:
        """Seconds that a step waits for it: it hides behind a part of the computation, but for the
        last bucket."""
        return max(self.seconds - job.overlap * job.compute_seconds, self.seconds / job.buckets)

    def contended(self, job: Job) -> float:
        """Work while it is hidden, in seconds, by how often computation meets it: less where
        communication mostly waits."""
        if not self.seconds:
            return 0.0
        hidden = 1 - self.exposed(job) / self.seconds
        return self.work * hidden * math.pow(min(1.0, self.work / self.seconds), CONTENTION)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step's seconds, and what they are made of."""

    seconds: float
    communication: float
    exposed: float
    interference: float

    @property
    def share(self) -> float:
        """Communication, hidden or not, of the step."""
        return self.communication / self.seconds if self.seconds else 0.0


Way = Callable[[Cluster, float, int], Transfer]  # cluster, bytes, ranks


def plain(cluster: Cluster, nbytes: float, ranks: int) -> Transfer:
    """Torch's own all-reduce: a ring through all hosts; with NCCL a double tree if that is less."""
    if ranks < 2:
        return Transfer(0.0, 0.0)
    alpha = cluster.latency_us * MICRO
    sent = 2 * (ranks - 1) / ranks * nbytes
    work = cluster.ranks_per_core * sent / (cluster.stack_gbyte * GIGABYTE)
    moved = max(sent / _rate(cluster, ranks), work)
    hops = 2 * (ranks - 1)
    if cluster.backend == "nccl":
        hops = min(hops, 2 * math.ceil(math.log2(ranks)))
    return Transfer(hops * alpha + moved, work)


def flat(rates: Rates, value_bytes: int) -> Way:
    """CCCL's all-reduce: every rank sends each other one its shard, and gets the means."""

    def way(cluster: Cluster, nbytes: float, ranks: int) -> Transfer:
        if ranks < 2:
            return Transfer(0.0, 0.0)
        small = rates.bits / (8 * value_bytes)
        local = min(cluster.ranks_per_host, ranks)
        away = ranks - local  # ranks on other hosts, to each of which every rank of a host sends
        if away:
            wire = local * 2 * away / ranks * nbytes * small / cluster.link
        else:
            wire = 2 * (ranks - 1) / ranks * nbytes * small / (cluster.intra_gbyte * GIGABYTE)
        return _pipelined(cluster, rates, nbytes, small, ranks, wire)

    return way


def hierarchical(rates: Rates, value_bytes: int) -> Way:
    """Plain sums inside each host, and flat ones of every rank's part between the hosts."""

    def way(cluster: Cluster, nbytes: float, ranks: int) -> Transfer:
        local = cluster.ranks_per_host
        hosts = math.ceil(ranks / local)
        if local == 1 or hosts < 2:
            return flat(rates, value_bytes)(cluster, nbytes, ranks)
        small = rates.bits / (8 * value_bytes)
        inside = 2 * (local - 1) / local * nbytes / (cluster.intra_gbyte * GIGABYTE)
        wire = 2 * (hosts - 1) / hosts * nbytes * small / cluster.link
        between = _pipelined(cluster, rates, nbytes / local, small, hosts, wire)
        return Transfer(between.seconds + inside, between.work)

    return way


def step(cluster: Cluster, job: Job, way: Way, ranks: int) -> Step:
    """With communication as far as it is not hidden, and what hidden communication costs."""
    count = job.buckets
    whole = way(cluster, job.gradient_bytes / count, ranks).times(count)
    exposed, slowed = whole.exposed(job), cluster.interference * whole.contended(job)
    seconds = job.compute_seconds + exposed + slowed
    return Step(seconds, whole.seconds, exposed, slowed)


def break_even_gbit(cluster: Cluster, job: Job, way: Way, ranks: int) -> float:
    """The line rate in Gbit/s from which plain is as fast; 0 if it is at any, inf if at none."""

    def gains(gbit: float) -> bool:
        at = dataclasses.replace(cluster, link_gbit=gbit)
        return step(at, job, way, ranks).seconds < step(at, job, plain, ranks).seconds

    if not gains(_LEAST_GBIT):
        return 0.0
    # The first one: beyond it a gain may come back, where a faster link has computation wait more.
    low, high = _LEAST_GBIT, 2 * _LEAST_GBIT
    while gains(high):
        if high > _MOST_GBIT:
            return math.inf
        low, high = high, high * 2
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return low


def _rate(cluster: Cluster, ranks: int) -> float:
    """Bytes per second on the slowest edge of a ring."""
    inside = cluster.intra_gbyte * GIGABYTE
    if ranks <= cluster.ranks_per_host:
        return inside
    return min(inside, cluster.link) if cluster.ranks_per_host > 1 else cluster.link


def _pipelined(
    cluster: Cluster, rates: Rates, nbytes: float, small: float, peers: int, wire: float
) -> Transfer:
    """A two-shot of `peers` ranks that puts `wire` seconds on the link: whichever is longer, that
    or the rank's own work, and one chunk's work to fill and drain the pipeline."""
    payload = nbytes * small / peers
    chunks = min(CHUNKS, max(1, int(payload / LEAST_MESSAGE[cluster.backend])))
    per_byte = 1 / rates.encode + 1 / rates.accumulate + 1 / rates.decode + 1 / rates.encode / peers
    codec = cluster.ranks_per_core * nbytes * per_byte / GIGABYTE
    sent = 2 * (peers - 1) * payload
    sockets = sent / (cluster.stack_gbyte * GIGABYTE)
    messages = 2 * (peers - 1) * chunks * cluster.message_us * MICRO
    work = codec + cluster.ranks_per_core * (sockets + messages)
    begin = (cluster.start_us + 2 * cluster.latency_us) * MICRO
    return Transfer(begin + max(wire, work) + codec / chunks, work)
