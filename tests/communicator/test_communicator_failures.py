"""What goes wrong between processes: a typed error on every rank that is left, and no hang."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from meet import communicator, settings
from ranks import Died, die, free_port

import cccl
import cccl.cupy
from cccl.cupy import _sockets

BIG = 4_000_000  # values: a collective of them takes a while


def _killed(where, victim, when):
    comm = communicator(where)
    comm.all_reduce(np.ones(10))
    if comm.rank == victim:
        die(0.0 if when == "before" else 0.05)
    out, begun = np.zeros(BIG, np.float32), time.monotonic()
    with pytest.raises(cccl.TransportError) as caught:
        for _ in range(1000):
            comm.all_reduce(np.ones(BIG, np.float32), out)
    took = time.monotonic() - begun
    assert np.isnan(out).all()
    with pytest.raises(cccl.ClosedError, match="make a new one"):
        comm.all_reduce(np.ones(10))
    assert comm.closed
    comm.close()
    return took, str(caught.value)


@pytest.mark.parametrize("kind", ("file", "tcp"))
@pytest.mark.parametrize("victim", (0, 2))
@pytest.mark.parametrize("when", ("before", "during"))
def test_survivors_of_a_killed_rank_get_a_typed_error(own_ranks, tmp_path, kind, victim, when):
    where = f"file://{tmp_path}/x" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    outcomes = own_ranks(3).outcomes(_killed, where, victim, when)
    assert isinstance(outcomes.pop(victim), Died)
    for outcome in outcomes:
        assert not isinstance(outcome, BaseException), outcome
        took, said = outcome
        assert took < 12
        assert "rank" in said
    assert any(f"rank {victim}" in said for _, said in outcomes)


def _late(folder, first):
    with communicator(folder, deadline=1.0) as comm:
        if not first:
            comm.all_reduce(np.ones(100))
        begun = time.monotonic()
        if comm.rank == 1:
            time.sleep(3)
        with pytest.raises(cccl.TransportError) as caught:
            comm.all_reduce(np.ones(100))
        error = caught.value
        assert isinstance(error, cccl.PeerAbortedError if comm.rank == 1 else cccl.DeadlineError)
        assert "rank 1" in str(error) or comm.rank == 1
        with pytest.raises(cccl.ClosedError):
            comm.all_reduce(np.ones(100))
        return time.monotonic() - begun


@pytest.mark.parametrize("first", (True, False), ids=("its first call", "a later call"))
def test_a_rank_that_does_not_call_meets_the_deadline(ranks, tmp_path, first):
    assert max(ranks(2)(_late, tmp_path / "meeting", first)) < 10


def _own_deadline(folder):
    with communicator(folder, deadline=60.0) as comm:
        comm.all_reduce(np.ones(100))
        begun = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(cccl.DeadlineError, match=r"waited 0\.5 s for rank 1"):
                comm.all_reduce(np.ones(100), config={"deadline": 0.5})
        else:
            time.sleep(1.5)
        return time.monotonic() - begun


def test_a_call_may_have_a_deadline_of_its_own(ranks, tmp_path):
    assert max(ranks(2)(_own_deadline, tmp_path / "meeting")) < 10


def _aborted(folder, first):
    comm = communicator(folder)
    if not first:
        comm.all_reduce(np.ones(10))
    begun = time.monotonic()
    if comm.rank == 1:
        time.sleep(0.5)
        comm.abort("the disk is full")
    expected = {0: cccl.PeerAbortedError, 1: cccl.ClosedError, 2: cccl.PeerAbortedError}[comm.rank]
    with pytest.raises(expected, match="the disk is full"):
        comm.all_reduce(np.ones(10))
    comm.close()
    return time.monotonic() - begun


@pytest.mark.parametrize("first", (True, False), ids=("its first call", "a later call"))
def test_an_abort_reaches_every_rank_with_its_reason(ranks, tmp_path, first):
    assert max(ranks(3)(_aborted, tmp_path / "meeting", first)) < 10


def _aborts_itself(folder, first):
    """From another thread, while this one waits for a rank that does not come."""
    comm = communicator(folder)
    if not first:
        comm.all_reduce(np.ones(10))
    if comm.rank == 1:
        time.sleep(1)
        comm.close()
        return 0.0
    begun = time.monotonic()
    threading.Timer(0.3, comm.abort, ("it takes too long",)).start()
    with pytest.raises(cccl.ClosedError, match="it takes too long"):
        comm.all_reduce(np.ones(10))
    comm.close()
    return time.monotonic() - begun


@pytest.mark.parametrize("first", (True, False), ids=("its first call", "a later call"))
def test_another_thread_can_abort_a_wait(ranks, tmp_path, first):
    assert max(ranks(2)(_aborts_itself, tmp_path / "meeting", first)) < 10


def _raises(folder):
    try:
        with communicator(folder) as comm:
            comm.all_reduce(np.ones(10))
            if comm.rank == 1:
                raise KeyError("a script's own fault")
            comm.all_reduce(np.ones(10))
    except (KeyError, cccl.Error) as error:
        return type(error).__name__, "script's own fault" in str(error)


def test_an_exception_in_the_block_ends_it_for_all(ranks, tmp_path):
    found = ranks(3)(_raises, tmp_path / "meeting")
    assert found == [("PeerAbortedError", True), ("KeyError", True), ("PeerAbortedError", True)]


def _mismatched(folder):
    with communicator(folder, config=settings()) as comm:
        odd = comm.rank == 1
        for field, call in (
            ("count", lambda: comm.all_reduce(np.ones(11 if odd else 10))),
            ("dtype", lambda: comm.all_reduce(np.ones(10, np.float32 if odd else np.float64))),
            ("op", lambda: comm.all_reduce(np.ones(10), op="avg" if odd else "sum")),
            ("root", lambda: comm.broadcast(np.ones(10), int(odd))),
            ("collective", lambda: comm.all_gather(np.ones(10)) if odd
             else comm.all_reduce(np.ones(10))),
            ("codecs", lambda: comm.all_reduce(np.ones(10), config=settings(
                "block_float4" if odd else "block_float8"))),
        ):  # fmt: skip
            with pytest.raises(cccl.MismatchError, match=f"{field}: rank 0 has .* rank 1 has"):
                call()
        return comm.all_reduce(np.ones(3)).tolist()


def test_ranks_that_differ_are_told_in_what_and_go_on(ranks, tmp_path):
    assert ranks(3)(_mismatched, tmp_path / "meeting") == [[3.0, 3.0, 3.0]] * 3


def _diverged(folder):
    """Both calls are known to all by then, so nobody asks before data moves."""
    with communicator(folder) as comm:
        for count in (10, 2000):
            comm.all_reduce(np.ones(count))
        begun = time.monotonic()
        with pytest.raises(cccl.TransportError, match=r"settings differ|gave up"):
            comm.all_reduce(np.ones(10 if comm.rank else 2000))
        return time.monotonic() - begun


def test_ranks_that_differ_later_are_told_at_once(ranks, tmp_path):
    assert max(ranks(2)(_diverged, tmp_path / "meeting")) < 8


def _between_two(folder):
    """A failure of a send ends the collectives of all."""
    comm = communicator(folder, deadline=1.0)
    comm.all_reduce(np.ones(10))
    begun = time.monotonic()
    with pytest.raises(cccl.TransportError):
        if comm.rank == 0:
            comm.send(np.ones(10), 1)  # which nobody receives
        time.sleep(2)
        comm.all_reduce(np.ones(10))
    comm.close()
    return time.monotonic() - begun


def test_a_failed_send_ends_it_for_all(ranks, tmp_path):
    assert max(ranks(3)(_between_two, tmp_path / "meeting")) < 12


def _interrupted(folder):
    with communicator(folder) as comm:
        comm.all_reduce(np.ones(10))
        if comm.rank == 1:
            time.sleep(1)
            with pytest.raises(cccl.PeerAbortedError, match="KeyboardInterrupt"):
                comm.all_reduce(np.ones(10))
            return
        threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(np.ones(10))
        comm.abort("KeyboardInterrupt")


def test_ctrl_c_is_heard_while_it_waits(own_ranks, tmp_path):
    own_ranks(2)(_interrupted, tmp_path / "meeting")


FORKS = """
import os, sys
import numpy as np, cccl, cccl.cupy
rank, folder = int(sys.argv[1]), sys.argv[2]
with cccl.cupy.Communicator(rank, 2, "file://" + folder, deadline=20) as comm:
    comm.all_reduce(np.ones(10))
    child = os.fork()
    if child == 0:
        try:
            comm.all_reduce(np.ones(10))
        except cccl.ClosedError as error:
            sys.exit(0 if "before a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert comm.all_reduce(np.ones(1))[0] == 2  # the parent's goes on
"""


def _run(script, *arguments):
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], text=True,
                            stderr=subprocess.PIPE)  # fmt: skip


def _end(processes):
    """Their exit codes and what they said."""
    said = [process.communicate(timeout=60)[1] for process in processes]
    return [process.returncode for process in processes], said


def test_a_fork_leaves_the_parents_communicator_alone(tmp_path):
    codes, said = _end([_run(FORKS, rank, tmp_path / "meeting") for rank in range(2)])
    assert codes == [0, 0], said


LEAVES = """
import sys
import numpy as np, cccl, cccl.cupy
rank, where = int(sys.argv[1]), sys.argv[2]
comm = cccl.cupy.Communicator(rank, 3, where, deadline=20)
for _ in range(20):
    comm.all_reduce(np.ones(300_000))
"""


@pytest.mark.parametrize("kind", ("file", "tcp"))
def test_scripts_that_just_end_end_well(tmp_path, kind):
    """Nothing is closed: the last collective still reaches every rank."""
    where = f"file://{tmp_path}/x" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    begun = time.monotonic()
    codes, said = _end([_run(LEAVES, rank, where) for rank in range(3)])
    assert codes == [0, 0, 0], said
    assert time.monotonic() - begun < 15
    assert not any("Traceback" in text for text in said), said


def test_a_stranger_that_calls_is_shown_the_door(tmp_path, monkeypatch):
    """Ranks are threads here, so that it is known where they listen."""
    calls, real = [], _sockets._listener

    def listen(host, backlog):
        listener = real(host, backlog)
        for said in (b"", b"x" * 20, b"x"):
            calls.append(socket.create_connection(listener.getsockname()[:2]))
            calls[-1].sendall(said)
        return listener

    monkeypatch.setattr(_sockets, "_listener", listen)
    monkeypatch.setattr(_sockets, "_HELLO_SECONDS", 0.3)
    found = []

    def rank(number):
        with cccl.cupy.Communicator(number, 2, tmp_path / "meeting", deadline=20) as comm:
            found.append(comm.all_reduce(np.ones(1))[0])

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [2.0, 2.0]
    assert len(calls) == 6
    for call in calls:
        call.close()
