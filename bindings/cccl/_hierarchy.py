"""Hierarchical collectives: which ranks share a host, and a collective's legs in their order. Knows
no framework."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .errors import ConfigError, Error, NonFiniteError

STAGES = GATHER, ACROSS, SPREAD = 0, 1, 2  # inside a host, between hosts, inside a host again
LEGS = "inside", "between", "inside"  # as the statistics name them
IN, OUT = "in", "out"  # the caller's tensors
LANE = "lane"  # a buffer: what goes between hosts
SORTED = "sorted"  # a buffer: all ranks' parts, lane after lane
_ALIGNED = 2048  # values; shards begin at multiples of all codecs' blocks

Setting = str | int | tuple[tuple[int, ...], ...]
Leg = Callable[..., Any]  # submits it, with the core's `on_done` among others


class Span(NamedTuple):
    """Values of a tensor."""

    buffer: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class LegPlan:
    """A collective among the ranks of one leg. `kept`: which of the caller's values the source is,
    where it is reduced between hosts."""

    stage: int
    collective: str
    source: Span
    target: Span
    counts: list[int] = dataclasses.field(default_factory=list)
    root: int = 0
    kept: list[tuple[int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Plan:
    """What one rank does: its legs, at most one of each stage; and orders of ranks' parts: of the
    input's in SORTED before the legs, of SORTED's in the output after them. Empty: as they are."""

    legs: list[LegPlan]
    sort_input: list[int] = dataclasses.field(default_factory=list)
    sort_output: list[int] = dataclasses.field(default_factory=list)

    @property
    def buffers(self) -> dict[str, int]:
        """Values of each buffer that it needs."""
        spans = [span for leg in self.legs for span in (leg.source, leg.target)]
        return {span.buffer: span.end for span in spans if span.buffer in (LANE, SORTED)}


class Hosts:
    """The ranks of a group by host, as one of them sees it. All numbers are ranks in the group."""

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int):
        self.hosts = tuple(tuple(sorted(host)) for host in sorted(hosts, key=min))
        self.size = sum(map(len, self.hosts))
        self.host = next(n for n, host in enumerate(self.hosts) if rank in host)
        self.inside = self.hosts[self.host]
        self.index = self.inside.index(rank)
        self.lanes = min(map(len, self.hosts))
        """Shards of a tensor: ranks of equal index carry one of them between hosts."""
        self.even = all(len(host) == self.lanes for host in self.hosts)
        lane = self.index < self.lanes
        self.between = tuple(host[self.index] for host in self.hosts) if lane else (rank,)

    @property
    def weight(self) -> float:
        """What makes the mean of hosts' means, times it, the mean of ranks."""
        return len(self.inside) * len(self.hosts) / self.size

    def plan(self, collective: str, count: int, root: int = 0) -> Plan | None:
        """This rank's legs of a collective of `count` values (of the input); None: it goes flat."""
        if len(self.hosts) == self.size:  # nobody shares a host
            return None
        if collective == "all_reduce":
            return self._all_reduce(count)
        if collective == "broadcast":
            return self._broadcast(count, root)
        if not self.even:
            return None
        plan = self._reduce_scatter if collective == "reduce_scatter" else self._all_gather
        return plan(count)

    def _all_reduce(self, count: int) -> Plan:
        step = -(-count // self.lanes // _ALIGNED) * _ALIGNED
        shards = [min(step, max(0, count - lane * step)) for lane in range(self.lanes)]
        shards += [0] * (len(self.inside) - self.lanes)
        begin = sum(shards[: self.index])
        whole, shard = Span(OUT, 0, count), Span(OUT, begin, begin + shards[self.index])
        return self._pruned(
            LegPlan(GATHER, "reduce_scatter", whole, shard, shards),
            LegPlan(ACROSS, "all_reduce", shard, shard, kept=[shard[1:]]),
            LegPlan(SPREAD, "all_gather", shard, whole, shards),
        )

    def _reduce_scatter(self, count: int) -> Plan:
        part, order = count // self.size, self._by_lane
        lane = Span(LANE if len(self.hosts) > 1 else OUT, 0, part * len(self.hosts))
        straight = order == sorted(order)
        kept = [(rank * part, (rank + 1) * part) for rank in self.between]
        plan = self._pruned(
            LegPlan(GATHER, "reduce_scatter", Span(IN if straight else SORTED, 0, count), lane,
                    [lane.end] * self.lanes),
            LegPlan(ACROSS, "reduce_scatter", lane, Span(OUT, 0, part), [part] * len(self.hosts),
                    kept=kept),
        )  # fmt: skip
        plan.sort_input = order if plan.legs and not straight else []
        return plan

    def _all_gather(self, part: int) -> Plan:
        order, everything = self._by_lane, part * self.size
        lane = Span(LANE if len(self.hosts) > 1 else IN, 0, part * len(self.hosts))
        straight = order == sorted(order)
        plan = self._pruned(
            LegPlan(ACROSS, "all_gather", Span(IN, 0, part), lane, [part] * len(self.hosts)),
            LegPlan(SPREAD, "all_gather", lane, Span(OUT if straight else SORTED, 0, everything),
                    [lane.end] * self.lanes),
        )  # fmt: skip
        if plan.legs and not straight:
            plan.sort_output = sorted(order, key=order.__getitem__)
        return plan

    def _broadcast(self, count: int, root: int) -> Plan | None:
        host, index = next((n, h.index(root)) for n, h in enumerate(self.hosts) if root in h)
        if index >= self.lanes:
            return None
        whole = Span(OUT, 0, count)
        return self._pruned(
            *[LegPlan(ACROSS, "broadcast", whole, whole, root=host)] * (self.index == index),
            LegPlan(SPREAD, "broadcast", whole, whole, root=index),
        )

    @property
    def _by_lane(self) -> list[int]:
        return [host[lane] for lane in range(self.lanes) for host in self.hosts]

    def _pruned(self, *legs: LegPlan) -> Plan:
        """Without legs of one rank, and of nothing."""

        def moves(leg: LegPlan) -> bool:
            members = self.between if leg.stage == ACROSS else self.inside
            return len(members) > 1 and (leg.source.end > leg.source.begin or sum(leg.counts) > 0)

        return Plan([leg for leg in legs if moves(leg)])


def description(setting: Setting) -> str:
    """What must be the same on all ranks: the setting, and what "auto" goes by."""
    if isinstance(setting, tuple):
        return str([list(host) for host in setting])
    if isinstance(setting, int):
        return f"{setting} ranks per host"
    if _number("LOCAL_RANK") is None or _number("LOCAL_WORLD_SIZE") is None:
        return "auto, by host name"
    return "auto, by " + ("GROUP_RANK" if "GROUP_RANK" in os.environ else "LOCAL_RANK")


def place_of(setting: Setting, rank: int, members: Sequence[int]) -> tuple[str, int]:
    """The host of a global rank, and how many ranks its launcher says are there (0: none did).
    `members`: all global ranks of the group."""
    if isinstance(setting, int):
        return str(rank // setting), 0
    if isinstance(setting, tuple):
        host_of = {member: n for n, host in enumerate(setting) for member in host}
        if missing := [member for member in members if member not in host_of]:
            raise ConfigError(f"hierarchy = {setting!r}; no host there has rank {missing[0]}")
        return str(host_of[rank]), 0
    local, size = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE")
    if local is None or size is None:
        return socket.gethostname(), 0
    return os.environ.get("GROUP_RANK", str(rank - local)), size


def packed_place(name: str, size: int) -> bytes:
    """What ranks exchange: 32 bytes and 4."""
    return hashlib.sha256(name.encode()).digest() + size.to_bytes(4, "little")


def hosts_of(exchanged: bytes, rank: int, whole: bool) -> Hosts:
    """From the places of all ranks in order. `whole`: they are all there are."""
    hosts: dict[bytes, list[int]] = {}
    sizes: dict[bytes, set[int]] = {}
    for number in range(len(exchanged) // 36):
        place = exchanged[36 * number : 36 * number + 36]
        hosts.setdefault(place[:32], []).append(number)
        sizes.setdefault(place[:32], set()).add(int.from_bytes(place[32:], "little"))
    for name, ranks in hosts.items():
        if whole and sizes[name] not in ({0}, {len(ranks)}):
            said = ", ".join(map(str, sorted(sizes[name])))
            raise ConfigError(
                f"hierarchy = 'auto': ranks {ranks} seem to share a host, and LOCAL_WORLD_SIZE is "
                f"{said} there. Name the hosts: hierarchy = [[0, 1], [2, 3]], or ranks per host"
            )
    return Hosts(list(hosts.values()), rank)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


_within = threading.local()  # .lines: those whose callback this thread runs


class Lines:
    """The stages of a group's collectives. Each takes them in the order of their calls, so that all
    ranks give a stage's communicator the same ones in the same order, whatever ends first."""

    def __init__(self) -> None:
        self._waiting: list[deque[Chain]] = [deque() for _ in STAGES]
        self._lock = threading.Lock()

    def add(self, chain: Chain) -> None:
        """Behind all that were added before."""
        with self._lock:
            for line in self._waiting:
                line.append(chain)
        self.advance()

    def advance(self) -> None:
        """Lets everyone in whose turn it is."""
        ended = []
        with self._lock:
            for stage, line in enumerate(self._waiting):
                while line and line[0].stage >= stage:
                    chain = line.popleft()
                    if chain.stage > stage or chain.begin(stage):
                        continue
                    chain.stage = stage + 1 if chain.failure is None else len(STAGES)
                    if chain.stage == len(STAGES):
                        ended.append(chain)
        for chain in ended:  # without the lock: what follows a collective may call the next one
            chain.end()


class Chain:
    """A collective under way on CPUs, leg by leg: what the core's work is to a flat one."""

    def __init__(
        self,
        lines: Lines,
        legs: Sequence[Leg | None],
        on_end: Callable[[Exception | None], Exception | None],
    ):
        """`on_end` is given the first error, and returns what the collective ends with."""
        self.stage = 0  # the next that it may enter
        self.failure: Exception | None = None
        self._lines, self._legs, self._on_end = lines, legs, on_end
        self._ended = threading.Event()
        self._finding: Exception | None = None

    def begin(self, stage: int) -> bool:
        """Submits the leg of a stage; False if there is none, or if it was refused."""
        leg = self._legs[stage]
        if leg is None:
            return False
        try:
            leg(on_done=lambda error: self._left(stage, error))
        except Exception as error:  # nobody else would end this one
            self.failure = error
            return False
        return True

    def _left(self, stage: int, error: Exception | None) -> None:
        _within.lines = self._lines
        try:
            self._go_on(stage, error)
        finally:
            _within.lines = None

    def _go_on(self, stage: int, error: Exception | None) -> None:
        if isinstance(error, NonFiniteError):  # the other ranks go on to the next leg
            self._finding, error = of_no_rank(error), None
        self.failure = error
        self.stage = stage + 1 if error is None else len(STAGES)
        if self.stage == len(STAGES):
            self.end()
        self._lines.advance()

    def end(self) -> None:
        """Its last leg is done, or one has failed."""
        on_end, self._on_end = self._on_end, lambda error: error
        self._legs = ()  # and the tensors that they hold
        try:
            self.failure = on_end(self.failure or self._finding)
        finally:
            self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it ended in time; raises what it failed with."""
        if getattr(_within, "lines", None) is self._lines and not self._ended.is_set():
            raise Error(
                "a callback of a collective waits for a collective of the same group, which would "
                "never end: wait outside of callbacks"
            )
        if not self._ended.wait(timeout):
            return False
        if self.failure is not None:
            raise self.failure
        return True

    def done(self) -> bool:
        return self._ended.is_set()

    def error(self) -> Exception | None:
        return self.failure if self._ended.is_set() else None


def of_no_rank(error: NonFiniteError) -> NonFiniteError:
    """Without the rank that it came from, as a leg numbers them."""
    return NonFiniteError(str(error).partition(", first from")[0])


class Flow:
    """A collective's legs on a GPU, all submitted: what the core's work is to a flat one."""

    def __init__(self, works: list[Any], stream: int):
        self._works, self.stream = works, stream

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            try:
                if not work.wait(None if until is None else max(0.0, until - time.monotonic())):
                    return False
            except NonFiniteError as error:
                raise of_no_rank(error) from None
        return True

    def done(self) -> bool:
        return all(work.done() for work in self._works)

    def error(self) -> Exception | None:
        found = next(filter(None, (work.error() for work in self._works)), None)
        return of_no_rank(found) if isinstance(found, NonFiniteError) else found

    def precede(self, device: int, stream: int) -> None:
        for work in self._works:
            work.precede(device, stream)
