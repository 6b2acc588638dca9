"""How ranks come together: by file, TCP or MPI, and what is said where they do not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from meet import communicator
from ranks import free_port

import cccl
import cccl.cupy
from cccl.cupy._stores import FileStore, StoreServer, TcpStore


def _meet(where):
    with communicator(where) as comm:
        return comm.all_reduce(np.array([comm.rank + 1.0])).tolist()


def test_ranks_meet_in_a_folder_and_leave_nothing_behind(ranks, tmp_path):
    folder = tmp_path / "a folder" / "meeting"
    for _ in range(2):  # it may be used again, as it is gone
        assert ranks(3)(_meet, f"file://{folder}") == [[6.0]] * 3
        assert not folder.exists()


@pytest.mark.parametrize("host", ("127.0.0.1", "localhost", "[::1]"))
def test_ranks_meet_over_tcp(ranks, host):
    if "::" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no IPv6")
    assert ranks(3)(_meet, f"tcp://{host}:{free_port()}") == [[6.0]] * 3


def _early(where):
    if os.environ["RANK"] == "0":
        time.sleep(0.7)
    return _meet(where)


def test_rank_0_may_come_last(ranks):
    assert ranks(2)(_early, f"tcp://127.0.0.1:{free_port()}") == [[3.0]] * 2


SCRIPT = """
from mpi4py import MPI
import numpy as np, cccl, cccl.cupy
world = MPI.COMM_WORLD
with cccl.cupy.Communicator(world.Get_rank(), world.Get_size(), world, deadline=30) as comm:
    total = comm.all_reduce(np.ones(5))
    assert (total == world.Get_size()).all()
    try:
        cccl.cupy.Communicator(world.Get_rank(), world.Get_size() + 1, world)
    except cccl.ConfigError as error:
        assert "MPI" in str(error)
    print("fine")
"""


def test_ranks_meet_over_mpi(tmp_path):
    pytest.importorskip("mpi4py", reason="it is what is tested")
    launcher = shutil.which("mpiexec", path=os.pathsep.join((str(Path(sys.executable).parent),
                                                             os.environ["PATH"])))  # fmt: skip
    if not launcher:
        pytest.skip("there is no mpiexec")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([launcher, "-n", "3", sys.executable, str(script)], text=True,
                          capture_output=True, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 3


@pytest.mark.parametrize(
    "where", ("", "somewhere", "tcp://host", "tcp://:5", "tcp://h:x", "file://h/x", "ftp://h:1/", 5)
)
def test_what_is_no_rendezvous_is_refused(where):
    with pytest.raises(cccl.ConfigError, match="tcp://host:port"):
        cccl.cupy.Communicator(0, 1, where)


def test_ranks_deadlines_and_hosts_are_checked(tmp_path):
    for rank, world in ((1, 1), (-1, 2), (0, 0), ("0", 1), (0, 1.5)):
        with pytest.raises(cccl.ConfigError, match="from 0 to world_size - 1"):
            cccl.cupy.Communicator(rank, world, tmp_path / "never")
    for deadline in (0, -1, 1e9, "5", float("nan")):
        with pytest.raises(cccl.ConfigError, match="deadline"):
            cccl.cupy.Communicator(0, 1, tmp_path / "never", deadline=deadline)
    (tmp_path / "file").write_text("")
    with pytest.raises(cccl.ConfigError, match="cannot be made"):
        cccl.cupy.Communicator(0, 1, tmp_path / "file")


def test_one_rank_alone_works(tmp_path):
    with cccl.cupy.Communicator(0, 1, tmp_path / "alone") as comm:
        array = np.arange(5.0)
        assert (comm.all_reduce(array) == array).all()
        assert "rank 0 of 1" in repr(comm)
    assert comm.closed == "it was closed"
    with pytest.raises(cccl.ClosedError, match="it was closed"):
        comm.all_reduce(array)
    comm.close()


def _missing(where):
    begun = time.monotonic()
    if os.environ["RANK"] == "2":
        return 0.0
    with pytest.raises(cccl.TransportError, match=r"for rank 2|gave up"):
        communicator(where, deadline=1.0)
    return time.monotonic() - begun


@pytest.mark.parametrize("kind", ("file", "tcp"))
def test_a_rank_that_does_not_come_is_named(ranks, tmp_path, kind):
    where = f"file://{tmp_path}/x" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    assert max(ranks(3)(_missing, where)) < 8


def _no_server(where):
    with pytest.raises(cccl.DeadlineError, match="rank 0 must be running"):
        cccl.cupy.Communicator(1, 2, where, deadline=0.5)


def test_a_rendezvous_that_is_not_there_is_named(ranks):
    ranks(1)(_no_server, f"tcp://127.0.0.1:{free_port()}")


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(cccl.TransportError, match="free port"):
            cccl.cupy.Communicator(0, 1, f"tcp://127.0.0.1:{port}")


def _worlds(where):
    rank = int(os.environ["RANK"])
    with pytest.raises((cccl.MismatchError, cccl.PeerAbortedError), match="different world_size"):
        cccl.cupy.Communicator(rank, 2 + rank, where, deadline=10.0)


def test_ranks_that_were_told_different_sizes_are_told(ranks, tmp_path):
    ranks(2)(_worlds, tmp_path / "meeting")


def _twice(folder):
    with communicator(folder) as comm:
        if comm.rank == 0:
            with pytest.raises(cccl.ConfigError, match="rank 1 came to this rendezvous already"):
                cccl.cupy.Communicator(1, 2, folder)
        return comm.all_reduce(np.ones(1)).tolist()


def test_a_rank_that_comes_twice_is_refused_and_disturbs_nobody(ranks, tmp_path):
    assert ranks(2)(_twice, tmp_path / "meeting") == [[2.0]] * 2


def test_a_host_that_is_none_of_this_machine_is_named(ranks, tmp_path):
    for outcome in ranks(2).outcomes(_elsewhere, tmp_path / "meeting"):
        assert isinstance(outcome, cccl.Error)
        assert "host" in str(outcome)


def _elsewhere(folder):
    with communicator(folder, host="192.0.2.77") as comm:
        comm.all_reduce(np.ones(1))


@pytest.fixture(params=("file", "tcp"))
def store(request, tmp_path):
    if request.param == "file":
        yield FileStore(tmp_path / "store")
        return
    server = StoreServer("127.0.0.1", 0)
    client = TcpStore("127.0.0.1", server.port, 5.0)
    yield client
    client.close()
    server.stop()


def test_a_store_holds_text(store):
    names = ("a", "a/b", "../c", "ä %2f \n", "." * 3)
    for name in names:
        assert not store.check([name])
        store.set(name, f"of {name}")
    assert store.check(list(names))
    assert [store.get(name) for name in names] == [f"of {name}" for name in names]
    store.set("a", "new")
    assert store.get("a") == "new"
    assert store.compare_set("a", "", "late") == "new"
    assert store.compare_set("first", "", "one") == "one"
    store.delete_key("a")
    store.delete_key("a")
    assert not store.check(["a", "a/b"])
    with pytest.raises((RuntimeError, OSError)):
        store.get("a")


def test_of_many_that_come_first_one_is(store):
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(store.compare_set("k", "", str(i))))
        for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 16


def test_a_store_survives_what_is_no_request():
    server = StoreServer("127.0.0.1", 0)
    for junk in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'["set"]\n', b'["__init__"]\n', b"\xff\n",
                 b'{"a": 1}\n', b"5\n", b'["check", [[]]]\n', b"x" * 3_000_000):  # fmt: skip
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.settimeout(10)
            try:
                stranger.sendall(junk)
                assert stranger.recv(100) == b""  # it is shown the door
            except ConnectionError:
                pass
    client = TcpStore("127.0.0.1", server.port, 5.0)
    client.set("a", "b")
    assert client.get("a") == "b"
    client.close()
    server.stop()
