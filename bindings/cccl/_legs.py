"""Legs of hierarchical collectives, run in their order. Knows no framework."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from . import _core
from ._config import Config
from ._hierarchy import STAGES, Hosts
from .errors import Error, NonFiniteError, UnsupportedError

Leg = Callable[..., Any]  # submits it, with the core's `on_done` among others

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


def ending(
    end: Callable[[], None],
    spoil: Callable[[], None],
    give_up: Callable[[Exception], None],
    on_done: Callable[[Exception | None], None] | None,
) -> Callable[[Exception | None], Exception | None]:
    """For a chain: what follows its last leg, what makes the result NaN where something failed,
    what ends all other collectives then, and who is told."""

    def on_end(error: Exception | None) -> Exception | None:
        if error is None or isinstance(error, NonFiniteError):
            try:
                end()
            except RuntimeError as failure:
                error = failure
        if error is not None and not isinstance(error, NonFiniteError):
            give_up(error)
            spoil()
        if on_done is not None:
            on_done(error)
        return error

    return on_end


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

    @property
    def seconds(self) -> float | None:
        """On the device, once done: each leg begins behind the one before it."""
        parts = [work.seconds for work in self._works]
        return None if None in parts else sum(parts)

    def precede(self, device: int, stream: int) -> None:
        for work in self._works:
            work.precede(device, stream)


class Hierarchy:
    """A group's hosts, and a communicator for each kind of leg, shared with the ranks it joins."""

    def __init__(
        self,
        hosts: Hosts,
        connect: Callable[[str, Sequence[int]], Any],
        sides: Sequence[int],
    ):
        """`connect`: the core's communicator of some of the group's ranks, by a name that is theirs
        alone. `sides`: streams of a GPU that order the legs of collectives; none on CPUs."""

        def core(name: str, members: tuple[int, ...]) -> Any:
            return connect(f"{name} {members[0]}", members) if len(members) > 1 else None

        self.hosts, self.lines = hosts, Lines()
        gather, across = core("gather", hosts.inside), core("across", hosts.between)
        # On CPUs with a thread of its own: a later collective's first leg must not wait for it.
        spread = gather if sides else core("spread", hosts.inside)
        self.cores = gather, across, spread
        self._sides = itertools.cycle(sides)
        for one in filter(None, self.cores):  # they connect, for a failure to reach all at once
            one.agree({"collective": "hierarchy"}).wait()

    def next_side(self) -> int:
        """A stream that orders the legs of one collective."""
        return next(self._sides)


def check_on_gpu(config: Config, kept: bool, known: bool, capturing: bool) -> None:
    """Refuses what the leg between hosts would, before one inside has moved anything. `kept`:
    whether there is a place for residuals; `known`: whether such a collective has run before;
    `capturing`: into a CUDA graph."""
    if config.feedback and kept:
        raise UnsupportedError("error feedback is there on CPUs only: set error_feedback to 'none'")
    if known:
        return
    if capturing:
        raise UnsupportedError(
            "a collective in a CUDA graph must have run once before the capture, with the same "
            "shapes and settings"
        )
    for codec in config.codecs or ():
        _core.codec_on_cuda(codec)  # which refuses one without CUDA code
