"""What ranks keep between steps: looked at, saved, loaded and reset. Knows no framework."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _core
from .errors import ConfigError

_log = logging.getLogger("cccl")
_VERSION = 1


class StateStore:
    """What this rank keeps of a model's gradients, or of a group's labelled tensors: residuals of
    error feedback, and the last mean where `diff` predicts by it.

    `optimizer.zero_grad` never touches it, `reset` forgets it.
    """

    def __init__(self, place: Callable[[], tuple[int, int]]):
        """`place`: this rank's number, and how many ranks there are."""
        self._place = place
        self.core = _core.StateStore()

    @staticmethod
    def _pack(held: bytes) -> Any:
        """Bytes as what a framework saves and loads without running code."""
        return held

    @staticmethod
    def _unpack(packed: Any) -> bytes:
        """The bytes of `_pack`."""
        return bytes(packed)

    @property
    def nbytes(self) -> int:
        """Memory that it holds."""
        return self.core.bytes

    @property
    def resets(self) -> int:
        """How often something began anew since a shape, the world or a setting had changed."""
        return self.core.resets

    @property
    def moves(self) -> int:
        """How many tensors took over the residuals of their parameters from others, as when DDP
        rebuilds its buckets."""
        return self.core.moves

    def reset(self) -> None:
        """Begins anew, at zero. All ranks should do so at the same step."""
        self.core.reset()

    def state_dict(self) -> dict[str, Any]:
        """The residuals, to be saved. Call it between steps. Each rank's is its own: save all
        of them. Predictions are not saved: the first step after a restart goes without."""
        rank, world = self._place()
        tensors = self.core.save()
        for tensor in tensors:
            for leg in ("sender", "owner"):
                tensor[leg]["bytes"] = self._pack(tensor[leg]["bytes"])
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
            self.core.load([[self._plain(t) for t in one["tensors"]] for one in states])
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise ConfigError(f"load_state_dict(): a saved state is damaged: {error}") from error

    def _plain(self, tensor: Mapping[str, Any]) -> dict[str, Any]:
        def leg(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {**fields, "bytes": self._unpack(fields["bytes"])}

        return {**tensor, "sender": leg(tensor["sender"]), "owner": leg(tensor["owner"])}


class Memory(NamedTuple):
    """Where a collective's residual is: in a store (None: the group's), by its layout (None: one
    piece with the call's label) and the step that it is part of (0: none)."""

    store: StateStore | None = None
    layout: Any = None
    step: int = 0

    def arguments(
        self, store_of_group: Callable[[], StateStore], label: str, count: int, feedback: Any
    ) -> dict[str, Any]:
        """What the core's `submit` takes."""
        store = self.store or store_of_group()
        layout = self.layout or _core.Layout([(label, count)])
        settings = feedback or _core.FeedbackSettings(False, False, "float32", 1.0)
        return {"store": store.core, "layout": layout, "feedback": settings, "step": self.step}

    def cut(self, label: str, count: int, ranges: list[tuple[int, int]]) -> Memory:
        """Of some of the tensor's `count` values: each piece is named by its range."""
        pieces, cut = self.layout.pieces if self.layout else [(label, count)], []
        for begin, end in ranges:
            at = 0
            for name, size in pieces:
                first, last = max(begin - at, 0), min(end - at, size)
                if first < last:
                    whole = last - first == size
                    cut.append((name if whole else f"{name}[{first}:{last}]", last - first))
                at += size
        return self._replace(layout=_core.Layout(cut))
