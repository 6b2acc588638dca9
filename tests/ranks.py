"""Processes as ranks, in a group of torch or of none, kept alive between tests."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

# A server that has imported torch once forks the workers.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.nn.parallel", "cccl.torch", "pytest", "numpy"])

_START_SECONDS = 60.0
_GROUP_SECONDS = 30.0


class RankFailed(AssertionError):
    """A rank raised what its test did not expect; the message has its traceback."""


class Died(Exception):
    """A rank's process ended."""


def die(seconds: float = 0.0) -> None:
    """As the out-of-memory killer would have it: now, or later, in the middle of whatever runs."""
    if seconds:
        threading.Timer(seconds, die).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def stay_away(seconds: float, kill: bool) -> None:
    """Does not come to what the other ranks do, or dies before it."""
    if kill:
        die()
    time.sleep(seconds)


def free_port() -> int:
    """Not one of those that the system gives to connections, which might take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def _init_group(rank: int, world: int, backend: str, near: bool) -> None:
    import torch
    import torch.distributed as dist

    device = None
    if "cuda" in backend:
        # Ranks that share a GPU are hosts apart to NCCL, which then talks over sockets.
        if torch.cuda.device_count() < world:
            os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=_GROUP_SECONDS), device_id=device)
    if near:  # NCCL has read it
        os.environ.pop("NCCL_HOSTID", None)


def _work(
    rank: int, world: int, port: int, connection: Any, backend: str | None, near: bool
) -> None:
    import cccl

    for variable in [v for v in os.environ if v.startswith("CCCL_")]:
        del os.environ[variable]
    faulthandler.enable()
    if backend is not None:
        import torch

        torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(world), LOCAL_RANK=str(rank))  # fmt: skip
    if backend:
        _init_group(rank, world, backend, near)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell's & began it
    connection.send(None)
    while True:
        try:
            job, arguments, seconds = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        cccl.reset_stats()
        cccl.configure(cccl.Config(attach_ddp=False))
        if backend is not None:
            torch.manual_seed(0)
        faulthandler.dump_traceback_later(seconds)
        try:
            outcome: tuple[Any, str] = (job(*arguments), "")
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # pytest's own failures are no Exceptions
            held = error if isinstance(error, Exception) else AssertionError(str(error))
            outcome = (held, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        try:
            pickle.dumps(outcome)
        except Exception:
            outcome = (RuntimeError(repr(outcome[0])), outcome[1] or "a result cannot be pickled")
        connection.send(outcome)


class Ranks:
    """`world` processes of one group, of a backend or, with "", of none. None: without torch.
    `near`: to CCCL they are of one host, though they may share a GPU."""

    def __init__(self, world: int, *, backend: str | None = "gloo", near: bool = False):
        self.world = world
        port = free_port()
        self._connections, self._processes = [], []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_work, args=(rank, world, port, theirs, backend, near), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        for outcome, _ in self._collect(_START_SECONDS, [(None, "")] * world):
            if isinstance(outcome, Exception):
                self.close()
                raise outcome

    def outcomes(
        self, job: Callable[..., Any], *arguments: Any, seconds: float = 60.0
    ) -> list[Any]:
        """What `job(*arguments)` returned or raised on each rank; `Died` where the process ended.

        `job` is a function at the top of a module.
        """
        return [outcome for outcome, _ in self._run(job, arguments, seconds)]

    def __call__(
        self, job: Callable[..., Any], *arguments: Any, seconds: float = 60.0
    ) -> list[Any]:
        """What `job(*arguments)` returned on each rank; `RankFailed` if one raised."""
        outcomes = self._run(job, arguments, seconds)
        failed = [
            f"rank {rank}: {text or outcome}"
            for rank, (outcome, text) in enumerate(outcomes)
            if isinstance(outcome, Exception)
        ]
        if failed:
            raise RankFailed("\n".join(failed))
        return [outcome for outcome, _ in outcomes]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
            process.join(10)

    def _run(self, job, arguments, seconds) -> list[tuple[Any, str]]:
        for connection in self._connections:
            connection.send((job, arguments, seconds))
        return self._collect(seconds)

    def _collect(self, seconds: float, fallback: Any = None) -> list[tuple[Any, str]]:
        until = time.monotonic() + seconds
        outcomes: list[Any] = [None] * self.world
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    self._processes[rank].kill()
                    outcomes[rank] = (TimeoutError(f"rank {rank} took over {seconds} s"), "")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = connection.recv() or fallback[rank]
                except (EOFError, ConnectionError):
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    outcomes[rank] = (Died(f"rank {rank} ended with exit code {code}"), "")
        return outcomes


class Pools:
    """One set of processes per world size, started anew where a test left one unusable."""

    def __init__(self, backend: str | None = "gloo", **options: Any) -> None:
        self._options = {"backend": backend, **options}
        self._pools: dict[int, Ranks] = {}

    def __call__(self, world: int) -> Ranks:
        pool = self._pools.get(world)
        if pool is None or not pool.alive:
            if pool is not None:
                pool.close()
            pool = self._pools[world] = Ranks(world, **self._options)
        return pool

    def discard(self) -> None:
        """After a failure: the ranks may be out of step."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
