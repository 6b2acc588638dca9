"""Hierarchical collectives: which ranks share a host, and which legs that makes. Knows no
framework."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .errors import ConfigError

if TYPE_CHECKING:
    from ._channel import StoreChannel
    from ._config import Config

STAGES = GATHER, ACROSS, SPREAD = 0, 1, 2  # inside a host, between hosts, inside a host again
LEGS = "inside", "between", "inside"  # as the statistics name them
IN, OUT = "in", "out"  # the caller's tensors
LANE = "lane"  # a buffer: what goes between hosts
SORTED = "sorted"  # a buffer: all ranks' parts, lane after lane
_ALIGNED = 2048  # values; shards begin at multiples of all codecs' blocks

Setting = str | int | tuple[tuple[int, ...], ...]


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


def meet(
    setting: Setting, rank: int, members: Sequence[int], whole: bool, channel: StoreChannel,
    seconds: float,
) -> Hosts:  # fmt: skip
    """The hosts of a group, once all its ranks said where they are. `rank`: in the group; `members`
    and `whole`: as `place_of` and `hosts_of` say."""
    mine = packed_place(*place_of(setting, members[rank], members))
    return hosts_of(channel.exchange(mine, 0, seconds), rank, whole)


def fields_of(config: Config, plain: dict[str, str]) -> dict[str, str]:
    """What ranks compare of a collective in legs; `plain`: what they compare if it goes plain."""
    return plain | {
        "plan": f"hierarchy {description(config.hierarchy)}, chunk {config.chunk_size}, window "
        f"{config.window}, {config.algorithm}",
        "codecs": " -> ".join(dict.fromkeys(codec.spec for codec in config.codecs or ())),
        "checks": f"checksum {config.checksum}, non-finite {config.non_finite}, feedback "
        f"{config.error_feedback} {config.residual_type} {config.residual_decay}",
    }
