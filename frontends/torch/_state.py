"""What ranks keep between steps: looked at, saved, loaded and reset."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import _core
from ..errors import ConfigError, UnsupportedError
from ._groups import resolve

_log = logging.getLogger("cccl")
_VERSION = 1


class StateStore:
    """What this rank keeps of a model's gradients, or of a group's labelled tensors: residuals of
    error feedback, and the last mean where `diff` predicts by it.

    `optimizer.zero_grad` never touches it, `reset` forgets it.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup | None]):
        self._group = group
        self._core = _core.StateStore()

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return self._core.bytes

    @property
    def resets(self) -> int:
        """How often something began anew since a shape, the world or a setting had changed."""
        return self._core.resets

    @property
    def moves(self) -> int:
        """How many tensors took over the residuals of their parameters from others, as when DDP
        rebuilds its buckets."""
        return self._core.moves

    def reset(self) -> None:
        """Begins anew, at zero. All ranks should do so at the same step."""
        self._core.reset()

    def state_dict(self) -> dict[str, Any]:
        """The residuals, for `torch.save`. Call it between steps. Each rank's is its own: save all
        of them. Predictions are not saved: the first step after a restart goes without."""
        rank, world = self._place()
        tensors = self._core.save()
        for tensor in tensors:
            for leg in ("sender", "owner"):
                held = bytearray(tensor[leg]["bytes"]) or bytearray(1)
                count = len(tensor[leg]["bytes"])
                tensor[leg]["bytes"] = torch.frombuffer(held, dtype=torch.uint8)[:count]
        return {"version": _VERSION, "rank": rank, "world": world, "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """In place of what there is: this rank's saved state, or a list of all ranks'.

        Of as many ranks as there are now, each takes its own. Of another number each takes the mean
        of all residuals, so that the mean over ranks, which is what gradients get, stays what it
        was; what owners had lost of means is dropped. A single state of another rank or world is
        dropped, with a warning. Raises `ConfigError` for what is no saved state.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if not isinstance(one, Mapping) or one.get("version") != _VERSION:
                raise ConfigError(
                    "load_state_dict() takes what StateStore.state_dict() returned, version "
                    f"{_VERSION}, or a list of all ranks' of it"
                )
        rank, world = self._place()
        states.sort(key=lambda one: one["rank"])
        saved = states[0]["world"] if states else 0
        if any(one["world"] != saved for one in states):
            raise ConfigError("load_state_dict(): these states are of different world sizes")
        own = [one for one in states if (one["rank"], one["world"]) == (rank, world)]
        if own:
            self._load(own)
        elif len(states) == saved and saved != world:
            _log.info("residuals of %d ranks folded into %d", saved, world)
            self._load(states)
        else:
            found = [one["rank"] for one in states]
            _log.warning(
                "residuals of ranks %s of %d dropped: this is rank %d of %d; load a list of all "
                "ranks' states to keep their mean", found, saved, rank, world,
            )  # fmt: skip
            self.reset()

    def _load(self, states: list[Mapping[str, Any]]) -> None:
        try:
            self._core.load([[_plain(t) for t in one["tensors"]] for one in states])
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise ConfigError(f"load_state_dict(): a saved state is damaged: {error}") from error

    def _place(self) -> tuple[int, int]:
        group = resolve(self._group())
        if group is None:
            raise UnsupportedError("this process is no member of the group whose state this is")
        return group.rank(), group.size()


def _plain(tensor: Mapping[str, Any]) -> dict[str, Any]:
    def leg(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields, "bytes": fields["bytes"].cpu().numpy().tobytes()}

    return {**tensor, "sender": leg(tensor["sender"]), "owner": leg(tensor["owner"])}


class Memory(NamedTuple):
    """Where a collective's residual is: in a store (None: the group's), by its layout (None: one
    piece with the call's label) and the step that it is part of (0: none)."""

    store: StateStore | None = None
    layout: Any = None
    step: int = 0

    def arguments(self, group: Any, label: str, count: int, feedback: Any) -> dict[str, Any]:
        """What the core's `submit` takes."""
        store = self.store or state_of(group)
        layout = self.layout or _core.Layout([(label, count)])
        settings = feedback or _core.FeedbackSettings(False, False, "float32", 1.0)
        return {"store": store._core, "layout": layout, "feedback": settings, "step": self.step}


_stores: weakref.WeakKeyDictionary[Any, StateStore] = weakref.WeakKeyDictionary()


def keep_for(model: torch.nn.Module, store: StateStore) -> None:
    """`state_of(model)` from now on."""
    _stores[model] = store


def state_of(owner: torch.nn.Module | dist.ProcessGroup | None = None) -> StateStore:
    """The `StateStore` of a model that `compress`, `compress_fsdp` or `cccl.configure` compresses;
    of a process group, that of collectives with a label; None: of the default group.

    Raises `ConfigError` for a model that is not compressed.
    """
    if isinstance(owner, torch.nn.Module):
        if owner not in _stores:
            raise ConfigError(
                f"this {type(owner).__name__} is not compressed (yet): a model that cccl.configure "
                "compresses is from its first forward pass on"
            )
        return _stores[owner]
    group = resolve(owner)
    if group is None:
        raise UnsupportedError("this process is no member of that group")
    store = _stores.get(group)
    if store is None:
        reference = weakref.ref(group)
        store = _stores[group] = StateStore(lambda: reference())
    return store
