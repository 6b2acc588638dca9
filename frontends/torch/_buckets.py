"""DDP buckets whose parameters go different ways: which, and sent in as few collectives."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from .. import _core
from .._by_parameter import unmatched
from .._config import Config
from .._pieces import Piece, cut
from .._ways import Ways, bits_per_value, precision
from ..errors import ConfigError
from ._call import DTYPES_OF_TORCH
from ._groups import communicator
from ._work import is_capturing

if TYPE_CHECKING:
    from ._ddp import CompressionState


class Names:
    """Of a model's parameters: the first for what ranks keep of them, all for rules."""

    def __init__(self) -> None:
        self.models: list[dict[tuple[str, ...], tuple[int, ...]]] = []
        self._all: Any = WeakIdKeyDictionary()
        self._numbered: Any = WeakIdKeyDictionary()
        self._checked: Ways | None = None

    def add(self, model: torch.nn.Module) -> None:
        """Knows its parameters from now on."""
        found: Any = WeakIdKeyDictionary()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            found[parameter] = (*found.get(parameter, ()), name)
        for parameter, names in found.items():
            self._all[parameter] = names
        self.models.append({names: tuple(p.shape) for p, names in found.items()})

    def all_of(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """Under which rules find it; none without a model."""
        names: tuple[str, ...] = self._all.get(parameter, ())
        return names

    def of(self, parameter: torch.Tensor) -> str:
        """One; without a model a number in order of appearance."""
        if names := self.all_of(parameter):
            return names[0]
        name: str = self._numbered.setdefault(parameter, f"parameter {len(self._numbered)}")
        return name

    def rule_of(self, parameter: torch.Tensor, ways: Ways) -> int | None:
        """Number of the rule that decides on it."""
        known = self.all_of(parameter)
        if not known and any(rule.name for _, rule in ways.rules):
            raise ConfigError(
                "rules with a name need the names of parameters: register the hook with "
                "cccl.torch.compress(ddp, config), or with "
                "cccl.torch.CompressionState(config=config, model=ddp)"
            )
        return ways.rule_of(known, tuple(parameter.shape))

    def check(self, ways: Ways) -> None:
        """Warns once of rules that decide nothing in any of the models."""
        if self._checked is ways:
            return
        self._checked = ways
        parameters = {names: shape for model in self.models for names, shape in model.items()}
        for text in unmatched(ways.rules, parameters) if parameters else ():
            warnings.warn(text, stacklevel=2)


class Decision(NamedTuple):
    """How a parameter goes: `rule` is its number in `rules`, None where none is of it."""

    name: str
    shape: tuple[int, ...]
    rule: int | None
    way: str
    bucket: int


class Part(NamedTuple):
    """What goes as one tensor."""

    config: Config
    label: str
    piece: Piece
    layout: Any  # names and values, for what ranks keep


@dataclasses.dataclass
class Plan:
    """Of a bucket, as long as it holds the same parameters and no step changes their ways."""

    parts: list[Part]
    counts: list[int]
    decisions: list[Decision]
    key: Any = None  # what it holds for


def make_plan(
    names: Names, bucket: dist.GradBucket, ways: Ways, step: int, *, after_spike: bool
) -> Plan:
    """Cuts a bucket, alike on all ranks."""
    parameters, buffer = bucket.parameters(), bucket.buffer()
    known = [names.of(parameter) for parameter in parameters]
    counts = [parameter.numel() for parameter in parameters]
    rules = [None if after_spike else names.rule_of(parameter, ways) for parameter in parameters]
    asked = [ways.after_spikes if after_spike else ways.at(step, rule) for rule in rules]
    configs = {id(config): config for config in asked}
    dtype = DTYPES_OF_TORCH.get(buffer.dtype, DTYPES_OF_TORCH[torch.float32]).number
    bits = {
        number: bits_per_value(config, dtype, buffer.element_size())
        for number, config in configs.items()
    }
    exact = {number: precision(config) for number, config in configs.items()}

    def finer(one: int, other: int) -> bool:
        a, b = exact[one], exact[other]
        return a is not None and b is not None and a != b and a[0] >= b[0] and a[1] >= b[1]

    parts, went = [], dict[int, Config]()
    for number, piece in cut(counts, [id(config) for config in asked], bits, finer):
        own = [i for i in piece.parameters if i not in piece.apart]
        went |= dict.fromkeys(own, configs[number])
        label = f"bucket {bucket.index()}" + (", after a spike" if after_spike else "")
        decisive = {rules[i] for i in own if asked[i] is configs[number]}
        if None not in decisive:
            label += "".join(
                f", rules[{rule}]" for rule in sorted(r for r in decisive if r is not None)
            )
        layout = [
            (known[i] + (" (apart)" if i in piece.apart else ""),
             counts[i] * (2 if buffer.is_complex() else 1))
            for i in piece.parameters
        ]  # fmt: skip
        parts.append(Part(configs[number], label, piece, _core.Layout(layout)))
    decisions = [
        Decision(known[i], tuple(p.shape), rules[i], way_name(went[i]), bucket.index())
        for i, p in enumerate(parameters)
    ]
    return Plan(parts, counts, decisions)


def agree_on(plan: Plan, buffer: torch.Tensor, group: dist.ProcessGroup, step: int) -> None:
    """Ranks compare a plan before it is used; `MismatchError`."""
    config = plan.parts[0].config
    ways = ", ".join(f"{way_name(p.config)} x {len(p.piece.parameters)}" for p in plan.parts)
    specs = [[codec.spec for codec in part.config.codecs or ()] for part in plan.parts]
    pieces = [part.piece for part in plan.parts]
    communicator(group, buffer.device, config).agree({
        "collective": "all_reduce",
        "dtype": str(buffer.dtype).removeprefix("torch."),
        "count": str(buffer.numel()),
        "op": "avg",
        "root": "0",
        "plan": f"rules, step {step}",
        "codecs": ways,
        "checks": f"{', '.join(f'{d.name}: {d.way}' for d in plan.decisions)}; {specs} {pieces}",
    })  # fmt: skip


def way_name(config: Config) -> str:
    """Short, for people."""
    first, second = config.compression_type, config.result_type
    return first if second in (None, first) else f"{first} -> {second}"


def send_parts(
    state: CompressionState, plan: Plan, buffer: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Sends a bucket in its parts; the future is done when all are back in it."""
    places = buffer.split(plan.counts)
    tensors, copied, apart = [], [], list[torch.Tensor]()
    for part in plan.parts:
        piece = part.piece
        chosen = [places[i] for i in piece.parameters]
        apart += [places[i] for i in piece.apart]
        if piece.in_place:
            first = sum(plan.counts[: piece.parameters[0]])
            tensors.append(buffer.narrow(0, first, sum(p.numel() for p in chosen)))
        else:
            tensors.append(torch.cat(chosen))
            copied.append((chosen, tensors[-1]))
    if apart:
        torch._foreach_zero_(apart)
    futures = [
        state.send(tensor, part.label, part.config, part.layout)
        for tensor, part in zip(tensors, plan.parts, strict=True)
    ]

    def put_back() -> torch.Tensor:
        for places, tensor in copied:
            torch._foreach_copy_(places, tensor.split([place.numel() for place in places]))
        return buffer

    if buffer.is_cuda:
        return _on_stream(state, buffer, tensors, futures, put_back)
    done = torch.futures.collect_all(futures)

    def finish(all_done: torch.futures.Future[list[Any]]) -> torch.Tensor:
        all_done.value()  # raises what a part raised
        return put_back()

    return done.then(finish)


def _on_stream(
    state: CompressionState,
    buffer: torch.Tensor,
    tensors: list[torch.Tensor],
    futures: list[Any],
    finish: Callable[[], torch.Tensor],
) -> torch.futures.Future[torch.Tensor]:
    """Where one of the parts ends, behind the others. The caller's stream goes on meanwhile."""
    stream = torch.cuda.current_stream(buffer.device)
    if not is_capturing(buffer):
        stream = state.last_stream(buffer) or stream
        for tensor in (*tensors, buffer):
            tensor.record_stream(stream)
    result: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device])
    with torch.cuda.stream(stream):
        for future in futures:
            future.wait()
        result.set_result(finish())
    return result
