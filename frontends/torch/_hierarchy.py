"""Hierarchical collectives: legs inside a host, plain, and between hosts, compressed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import _core
from .._calls import Ended
from .._hierarchy import (
    ACROSS,
    GATHER,
    IN,
    LEGS,
    OUT,
    SORTED,
    STAGES,
    LegPlan,
    Plan,
    fields_of,
    meet,
)
from .._legs import Chain, Flow, Hierarchy, Leg, check_on_gpu, ending
from ..errors import ConfigError, Error, MismatchError, NonFiniteError, UnsupportedError
from ._groups import GroupCommunicator, store_channel
from ._streams import current_stream
from ._tensors import real
from ._work import is_capturing

if TYPE_CHECKING:
    from ._call import Call

_PLAIN = (_core.make_codec("identity", {}),) * 2


def _hierarchy_of(found: GroupCommunicator, call: Call) -> Hierarchy:
    group, setting, number = call.group, call.config.hierarchy, len(found.hierarchies)
    assert group is not None
    members = dist.get_process_group_ranks(group)
    channel = store_channel(group, found.generation, name=f"hierarchy {number}")
    whole = len(members) == dist.get_world_size()
    hosts = meet(setting, group.rank(), members, whole, channel, found.deadline)

    def connect(name: str, members: Sequence[int]) -> Any:
        return found.core_of(group, call.config, members, f"hierarchy {number}/{name}")

    sides = found.new_streams() if found.device.type == "cuda" else []
    return Hierarchy(hosts, connect, sides)


def route(
    call: Call, found: GroupCommunicator, sent: torch.Tensor, received: torch.Tensor, more: Any
) -> Any:
    """Sends a collective in legs; returns what stands for the core's work, None if it goes flat."""
    try:
        _compare(call, found)
        setting = call.config.hierarchy
        if setting not in found.hierarchies:
            found.hierarchies[setting] = _hierarchy_of(found, call)
        hierarchy = found.hierarchies[setting]
        plan = hierarchy.hosts.plan(call.collective, real(sent).numel(), call.root)
        if plan is None:
            return None
        legs = _Legs(call, hierarchy, plan, sent, received)
    except (ConfigError, UnsupportedError):  # the same on all ranks, and nothing was sent
        raise
    except Error as error:
        if not isinstance(error, MismatchError):
            found.give_up(error)
        _fill_nan(received)
        if received.is_cuda:
            raise
        if "on_done" in more:
            more["on_done"](error)
        return Ended(error)
    return _on_streams(legs, found, more) if received.is_cuda else _on_host(legs, found, more)


def _compare(call: Call, found: GroupCommunicator) -> None:
    """At a kind's first use, with all ranks of the group: a mismatch in one leg would be seen by
    the ranks of that leg alone."""
    fields = fields_of(call.config, call.plain_fields())
    kind = tuple(fields.values())
    if call.input.is_cuda:
        kept = call.memory is not None
        check_on_gpu(call.config, kept, found.has_agreed(kind), is_capturing(call.input))
    found.agree_once(kind, lambda: fields)


class _Legs:
    """What one rank does in a collective. Tensors are flat, and complex ones pairs of real."""

    def __init__(
        self, call: Call, hierarchy: Hierarchy, plan: Plan, sent: torch.Tensor, result: torch.Tensor
    ):
        self.hierarchy, self.result = hierarchy, real(result).view(-1)
        buffers = {IN: real(sent).view(-1), OUT: self.result}
        for name, count in plan.buffers.items():
            buffers[name] = self.result.new_empty(count)
        self.tensors = list(buffers.values())
        if plan.sort_input:
            _sort(buffers[IN], plan.sort_input, buffers[SORTED])
        self._sorted, self._order = buffers.get(SORTED), plan.sort_output
        self.begins: list[Leg | None] = [None] * len(STAGES)
        for leg in plan.legs:
            source, target = (
                buffers[span.buffer][span.begin : span.end] for span in (leg.source, leg.target)
            )
            self.begins[leg.stage] = self._begin(call, leg, source, target)

    def _begin(self, call: Call, leg: LegPlan, source: torch.Tensor, target: torch.Tensor) -> Leg:
        config, across = call.config, leg.stage == ACROSS
        kept = call.remembered(source.numel(), leg.kept) if leg.kept else {}
        begin = functools.partial(
            call.post, self.hierarchy.cores[leg.stage], leg.collective, source, target,
            codecs=config.codecs if across else _PLAIN, counts=leg.counts, root=leg.root,
            leg=LEGS[leg.stage],
            # All ranks must hear of it: those of other lanes do where shards meet.
            raise_non_finite=config.non_finite == "raise" and leg.stage != GATHER, **kept,
        )  # fmt: skip
        weight = self.hierarchy.hosts.weight
        averages = call.op == dist.ReduceOp.AVG and leg.collective == "all_reduce"
        if not averages or weight == 1.0:
            return begin

        def weighted(**more: Any) -> Any:
            with torch.inference_mode(source.is_inference()):
                source.mul_(weight)  # of a mean of hosts with unequal numbers of ranks
            return begin(**more)

        return weighted

    def end(self) -> None:
        """Once all legs are done."""
        if self._order and self._sorted is not None:
            _sort(self._sorted, self._order, self.result)


def _sort(parts: torch.Tensor, order: list[int], target: torch.Tensor) -> None:
    pieces = parts.view(len(order), -1).unbind()
    with torch.inference_mode(target.is_inference()):
        torch.cat([pieces[place] for place in order], out=target)


def _fill_nan(tensor: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        real(tensor).fill_(float("nan"))


def _on_host(legs: _Legs, found: GroupCommunicator, more: Any) -> Chain:
    spoil = functools.partial(_fill_nan, legs.result)
    end = ending(legs.end, spoil, found.give_up, more.pop("on_done", None))
    chain = Chain(legs.hierarchy.lines, legs.begins, end)
    legs.hierarchy.lines.add(chain)
    return chain


def _on_streams(legs: _Legs, found: GroupCommunicator, more: Any) -> Flow:
    """Submits all legs at once: a stream orders them, and the host waits for none."""
    device, capturing = legs.result.device, is_capturing(legs.result)
    current = current_stream(device)
    side = current if capturing else found.streams[legs.hierarchy.next_side()]
    if not capturing:
        side.wait_stream(current)
        for tensor in legs.tensors:
            for stream in found.streams.values():
                tensor.record_stream(stream)
    give_up = found.give_up

    def on_done(error: Exception | None) -> None:
        if error is not None and not isinstance(error, NonFiniteError):
            give_up(error)

    works: list[Any] = []
    with torch.cuda.stream(side):
        try:
            for leg in filter(None, legs.begins):
                works.append(leg(**more | {"stream": side.cuda_stream, "on_done": on_done}))
                works[-1].precede(device.index, side.cuda_stream)
        except Error as error:
            if not capturing:
                give_up(error)
            _fill_nan(legs.result)
            current.wait_stream(side)
            raise
        legs.end()
    return Flow(works, side.cuda_stream)
