"""Collectives, sends and receives of NumPy and CuPy arrays between processes."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Callable, Mapping
from numbers import Integral
from types import TracebackType
from typing import Any, cast

from .._config import Config, current_config, loaded
from .._members import NOT_BEGUN, not_begun
from ..errors import (
    ClosedError,
    ConfigError,
    Error,
    MismatchError,
    NonFiniteError,
    UnsupportedError,
)
from ._arrays import empty, from_scalar, memory_of, sum_over_ranks
from ._call import Call, Running
from ._connections import Connection, Connections
from ._meeting import Meeting

_LONGEST = 31 * 24 * 3600.0  # seconds
_LAST_SECONDS = 10.0  # at exit, for what is still under way on a GPU
_HEARING = 3.0  # seconds for other ranks to hear why this one gave up
_abandoned: list[Running] = []  # which were interrupted, and whose arrays may still be written
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()

Settings = Config | Mapping[str, Any] | None
Shape = Callable[[tuple[int, ...]], tuple[int, ...]]


class Communicator:
    """One rank's end of a group of processes.

    CuPy arrays go over NCCL, in the order of the current stream, which the host does not wait for;
    NumPy arrays over sockets, and then the host waits. All ranks make the same calls in the same
    order, each from one thread at a time. Arrays are contiguous, on one GPU per rank.

    Args:
        rank: from 0 to world_size - 1, another on each process.
        world_size: number of processes.
        rendezvous: where they meet: "tcp://host:port" (rank 0 listens there), "file:///folder" or a
            Path (of a folder that all see, new for each communicator), or an mpi4py communicator.
        config: settings of calls that are given none; None: those of `cccl.configure`.
        deadline: seconds that a wait for a peer may take, here and where `config` sets none.
        host: this machine's address for the sockets of the other ranks; None: found.

    Raises `ConfigError` for a rank that came already, `MismatchError`, `DeadlineError`,
    `TransportError`.

    After an error other than `MismatchError`, `NonFiniteError`, `UnsupportedError` and
    `ConfigError` the outputs are NaN, all ranks get a typed error, and every later call raises
    `ClosedError`: close it, and make a new one, with a rendezvous of its own.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        rendezvous: Any,
        *,
        config: Settings = None,
        deadline: float = 300.0,
        host: str | None = None,
    ):
        if not (_is_integer(rank) and _is_integer(world_size) and 0 <= rank < world_size):
            raise ConfigError(
                f"rank {rank!r} of {world_size!r}: a rank is an integer from 0 to world_size - 1"
            )
        if not (isinstance(deadline, int | float) and 0 < deadline <= _LONGEST):
            raise ConfigError(f"deadline = {deadline!r}; allowed: seconds, at most 31 days")
        self.rank, self.world_size = int(rank), int(world_size)
        self._config = None if config is None else loaded(config)
        self._closed = self._failure = ""
        self._raised = False  # the failure, out of some call
        self._meeting = Meeting(self.rank, self.world_size, rendezvous, host, float(deadline))
        self._connections = Connections(self._meeting, float(deadline))
        _open.add(self)

    def all_reduce(
        self,
        array: Any,
        out: Any = None,
        op: str = "sum",
        *,
        config: Settings = None,
        label: str = "all_reduce",
    ) -> Any:
        """The "sum" or "avg" of all ranks' arrays, with the same bits on every rank.

        Into `out`, which may be `array` itself; None: a new array. Integers are summed exactly, as
        each rank adds what all have. Returns the result.

        `config`: settings of this call; `label`: the row of `cccl.stats()` that counts it.
        """
        array = from_scalar(array)
        out = self._output("all_reduce", label, array, out, lambda shape: shape)
        call = Call("all_reduce", array, out, self._settings(config), str(label), op)
        if call.reduces_integers:
            call.check_parts(self.world_size, self.rank)
            gathered = empty((self.world_size, call.array.size), array)
            self._run([_gather(call, array, gathered)])
            sum_over_ranks(gathered, out)
        else:
            self._run([call])
        return out

    def reduce_scatter(
        self,
        array: Any,
        out: Any = None,
        op: str = "sum",
        *,
        config: Settings = None,
        label: str = "reduce_scatter",
    ) -> Any:
        """The same, of which each rank gets its part: `array` has world_size times the values of
        `out`. None: a new array of as many rows of `array`."""
        out = self._output("reduce_scatter", label, array, out, self._part)
        call = Call("reduce_scatter", array, out, self._settings(config), str(label), op)
        if call.reduces_integers:
            call.check_parts(self.world_size, self.rank)
            gathered = empty((self.world_size, call.array.size), array)
            self._run([_gather(call, array, gathered)])
            first = self.rank * out.size
            sum_over_ranks(gathered[:, first : first + out.size], out)
        else:
            self._run([call])
        return out

    def all_gather(
        self,
        array: Any,
        out: Any = None,
        *,
        config: Settings = None,
        label: str = "all_gather",
    ) -> Any:
        """Every rank's `array`, in rank order. `out` has world_size times its values; None: a new
        array of all rows. Exact, or lossless as `weights_type` says, unless `collective_filter`
        names it."""
        array = from_scalar(array)
        out = self._output("all_gather", label, array, out, self._whole)
        call = Call("all_gather", array, out, self._settings(config), str(label))
        self._run([call])
        return out

    def broadcast(
        self, array: Any, root: int = 0, *, config: Settings = None, label: str = "broadcast"
    ) -> Any:
        """The root's `array` in every rank's, the root's own too where bits are lost. Exact,
        or lossless as `weights_type` says, unless `collective_filter` names it."""
        self._check_rank(root, "root")
        call = Call("broadcast", array, array, self._settings(config), str(label), root=root)
        self._run([call])
        return array

    def send(self, array: Any, peer: int, *, config: Settings = None, label: str = "send") -> None:
        """To another rank, which must `recv` an array of that size and dtype; it may have to wait
        for that. Exact unless `collective_filter` names "send"."""
        self.exchange({peer: array}, {}, config=config, label=label)

    def recv(self, out: Any, peer: int, *, config: Settings = None, label: str = "send") -> Any:
        """What another rank sends, in `out`."""
        self.exchange({}, {peer: out}, config=config, label=label)
        return out

    def exchange(
        self,
        sends: Mapping[int, Any],
        receives: Mapping[int, Any],
        *,
        config: Settings = None,
        label: str = "send",
    ) -> None:
        """Sends and receives with several peers at once, `{peer: array}` each: none waits for
        another, as sends and receives in turn would, so that neighbours can swap."""
        settings, calls = self._settings(config), []
        for peer, array in sends.items():
            self._check_peer(peer)
            way = self.rank, int(peer)
            calls.append((way, Call("send", array, None, settings, str(label), way=way)))
        for peer, out in receives.items():
            self._check_peer(peer)
            way = int(peer), self.rank
            calls.append((way, Call("send", out, out, settings, str(label), way=way)))
        # In one order for all ranks: where a first use waits for the other end, none waits in turn.
        self._run([call for _, call in sorted(calls, key=lambda pair: pair[0])])

    @property
    def closed(self) -> str:
        """Why no call is taken any more; "" while they are."""
        for connection in self._connections:
            if not self._failure and connection.core.closed and not self._closed:
                self._fail(connection.core.closed)
        return self._failure or self._closed

    def abort(self, reason: str = "abort() was called") -> None:
        """Fails what is under way, here and on the other ranks, which get `PeerAbortedError` with
        the reason. From any thread."""
        self._fail(reason)

    def close(self) -> None:
        """Finishes what was submitted, and leaves. Raises what failed on a GPU unseen."""
        if self._closed:
            return
        self._closed = "it was closed"
        unseen = None
        for connection in self._connections:
            connection.close()
            unseen = unseen or self._unseen(connection)
        self._connections = Connections(self._meeting, 0.0)
        self._meeting.leave(_HEARING if self._failure else _LAST_SECONDS)
        if unseen is not None:
            raise unseen

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return self.close()
        self._fail(f"{type(error).__name__}: {error}")
        with contextlib.suppress(Error):
            self.close()

    def __repr__(self) -> str:
        state = f", closed: {self.closed}" if self.closed else ""
        return f"Communicator(rank {self.rank} of {self.world_size}{state})"

    def _run(self, calls: list[Call]) -> None:
        """Together, so that none waits for another."""
        for call in calls:
            call.check_parts(self.world_size, self.rank)
        self._check_open()
        running: list[Running] = []
        errors: list[Error] = []
        try:
            for call in calls:
                found = self._connections.get(call.way, call.device, call.config)
                try:
                    running.append(call.start(found))
                except MismatchError as error:  # already, on a GPU: ranks agree in this thread
                    errors.append(_told(error, call))
        except BaseException as error:
            # What was refused before anything was sent leaves the ranks in step.
            if running or not isinstance(error, UnsupportedError | ConfigError):
                self._fail(f"{type(error).__name__}: {error}")
                self._raised = True
            for one in running:
                with contextlib.suppress(Error):
                    one.wait()
            raise
        for one in running:
            try:
                one.wait()
            except MismatchError as error:
                errors.append(_told(error, one.call))
            except NonFiniteError as error:
                errors.append(error)
            except Error as error:
                self._fail(self.closed or str(error))
                self._raised = True
                errors.append(error)
            except BaseException:  # Ctrl-C: the core goes on
                _abandoned.extend(running)
                raise
        if errors:
            raise errors[0]

    def _fail(self, reason: str) -> None:
        """No more calls, on any rank; the first reason stays."""
        if self._failure or self._closed:
            return
        self._failure = reason
        self._meeting.tell(reason)
        for connection in self._connections:
            if not connection.core.closed:
                connection.core.abort(reason)

    def _check_open(self) -> None:
        if not self.closed:
            return
        for connection in self._connections:
            if unseen := self._unseen(connection):
                raise not_begun(unseen) from unseen
        raise ClosedError(
            f"this communicator takes no calls any more: {self.closed}. {NOT_BEGUN} Close it on "
            "all ranks, and make a new one with a rendezvous of its own"
        )

    def _unseen(self, connection: Connection) -> Exception | None:
        """What failed on a GPU after its call had returned, once."""
        if connection.device is None or self._raised:
            return None
        failure: Exception | None = cast(Any, connection.core).failure
        self._raised = failure is not None
        return failure

    def _settings(self, config: Settings) -> Config:
        if config is not None:
            return loaded(config)
        return current_config() if self._config is None else self._config

    def _output(self, collective: str, label: str, array: Any, out: Any, shape_of: Shape) -> Any:
        if out is not None:
            return out
        memory_of(array, f"{collective} {label!r}")
        return empty(shape_of(array.shape), array)

    def _part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape or shape[0] % self.world_size:
            raise ConfigError(
                f"reduce_scatter: the first axis of {shape} is not {self.world_size} equal parts; "
                "pass out="
            )
        return shape[0] // self.world_size, *shape[1:]

    def _whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        rows, *rest = shape or (1,)
        return rows * self.world_size, *rest

    def _check_rank(self, rank: Any, name: str) -> None:
        if not (_is_integer(rank) and 0 <= rank < self.world_size):
            raise ConfigError(f"{name} = {rank!r}; allowed: 0 to {self.world_size - 1}")

    def _check_peer(self, peer: Any) -> None:
        self._check_rank(peer, "peer")
        if peer == self.rank:
            raise ConfigError(f"peer = {peer}: that is this rank itself")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral)  # as NumPy's are


def _gather(call: Call, array: Any, gathered: Any) -> Call:
    return Call("all_gather", array, gathered, call.config, call.label, exact=True)


def _told(error: MismatchError, call: Call) -> MismatchError:
    """The core counts the two ranks of a way from 0."""
    if call.way is None:
        return error
    source, target = call.way
    return MismatchError(
        f"from rank {source} (here called 0) to rank {target} (here called 1): {error}"
    )


def _forget_in_fork() -> None:
    """A fork has none of the threads that connections need: they are never touched there."""
    for communicator in list(_open):
        communicator._closed = (
            "it was made before a fork, and its connections are the parent's: make one in the child"
        )
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_fork)


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: connections have threads that call into Python."""
    for communicator in list(_open):
        until = time.monotonic() + _LAST_SECONDS
        connections = list(communicator._connections)
        while any(c.core.busy for c in connections) and time.monotonic() < until:
            time.sleep(0.001)
        if any(c.core.busy for c in connections):
            communicator.abort("its process is exiting")
        with contextlib.suppress(Error):
            communicator.close()
