"""Bytes between processes over TCP sockets of the standard library: the transport without a GPU.

A connection per pair of ranks. Calls into the kernel are few and large and run without the GIL: a
thread per peer receives straight into the memory that waits for a message; what the kernel does
not take at once, another one sends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from .._channel import StoreChannel
from .._host import haste, memory_at
from ..errors import ClosedError, ConfigError, DeadlineError, PeerAbortedError, TransportError

_HEAD = struct.Struct("<IQ")  # of a message: the collective's tag, bytes
_HELLO = struct.Struct("<16sI")  # of a connection: the secret of who listens, the caller's rank
_ADDRESS = struct.Struct("<16s16sH255s")  # secret, machine, port, host
_HELLO_SECONDS = 2.0  # for who connects to say who it is
_JOIN_SECONDS = 5.0


class _Link:
    """The connection to one peer. Its threads know only this, so that a transport that nobody uses
    can go."""

    def __init__(self, connection: socket.socket, peer: int, done: SimpleQueue[Any]):
        self.peer = peer
        self._socket, self._done = connection, done
        self._expected: SimpleQueue[Any] = SimpleQueue()  # (request, tag, memory), in posting order
        self._outgoing: SimpleQueue[Any] = SimpleQueue()  # (request, parts)
        self._queued = self._sent = 0  # each counted by one thread
        self._threads = [self._start(self._receive_all)]

    def expect(self, request: int, tag: int, memory: memoryview) -> None:
        """Where the next message that nothing is expected for yet goes."""
        self._expected.put((request, tag, memory))

    def send(self, request: int, tag: int, memory: memoryview) -> bool:
        """Whether the kernel took it whole; else it is queued."""
        head, sent = _HEAD.pack(tag, len(memory)), 0
        if self._queued == self._sent:
            with contextlib.suppress(BlockingIOError):
                sent = self._socket.sendmsg((head, memory), (), socket.MSG_DONTWAIT)
            if sent == len(head) + len(memory):
                return True
        if len(self._threads) == 1:
            self._threads.append(self._start(self._send_all))
        rest = memory[max(0, sent - len(head)) :]
        self._queued += 1
        self._outgoing.put((request, (head[sent:], rest)))
        return False

    def shut(self) -> None:
        """Whatever waits for it fails, here and at the peer. What was sent still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._expected.put(None)
        self._outgoing.put(None)

    def join(self) -> None:
        """After `shut`: until no thread touches any memory."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_SECONDS)
        self._socket.close()

    def _start(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guard, args=(run,), name="cccl-socket", daemon=True)
        thread.start()
        return thread

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except (OSError, TransportError) as error:
            self._done.put((self.peer, error))

    def _send_all(self) -> None:
        while (item := self._outgoing.get()) is not None:
            request, parts = item
            for part in parts:
                self._socket.sendall(part)
            self._sent += 1
            self._done.put(request)

    def _receive_all(self) -> None:
        head = memoryview(bytearray(_HEAD.size))
        while True:
            self._fill(head)
            tag, nbytes = _HEAD.unpack(head)
            item = self._expected.get()
            if item is None:
                return
            request, wanted, memory = item
            if tag != wanted or nbytes > len(memory):
                raise TransportError(
                    "sent something else than is expected here: the ranks' calls or settings "
                    "differ. Make them equal on all ranks"
                )
            self._fill(memory[:nbytes])
            self._done.put(request)

    def _fill(self, memory: memoryview) -> None:
        while memory:
            received = self._socket.recv_into(memory, 0, socket.MSG_WAITALL)
            if received == 0:
                raise ConnectionError("it was closed")
            memory = memory[received:]


class SocketTransport:
    """The `external` transport of some ranks. All methods but `abort` run on one thread.

    Connections are made when they are first needed.
    """

    def __init__(self, channel: StoreChannel, host: str, seconds: float):
        self.rank, self.size = channel.rank, channel.size
        self._channel, self._host, self._seconds = channel, host, seconds
        self._links: dict[int, _Link] = {}
        self._lost: dict[int, Exception] = {}
        # Requests that are done, and (peer, error) of connections that are lost.
        self._done: SimpleQueue[Any] = SimpleQueue()
        self._peers: dict[int, int] = {}  # of requests under way
        self._last, self._tag = 0, -1
        self._leavers = select.poll()  # connections whose peer closed them
        self._aborted = ""
        self._process = os.getpid()

    def post(self, transfers: list[tuple[bool, int, int, int, int]]) -> list[int]:
        """Starts transfers (sends, address, bytes, peer, tag); returns a number for each."""
        if not self._links:
            self._connect()
        haste.begin(self)
        if transfers[0][4] != self._tag:
            self._tag = transfers[0][4]
            self._refuse_after_abort()
        first = self._last + 1
        for sends, address, nbytes, peer, tag in transfers:
            self._last += 1
            memory = memory_at(address, nbytes)
            if not sends:
                self._links[peer].expect(self._last, tag, memory)
            else:
                try:
                    if self._links[peer].send(self._last, tag, memory):
                        continue
                except OSError as error:
                    raise self._failure(peer, error) from error
            self._peers[self._last] = peer
        return list(range(first, self._last + 1))

    def wait(self, requests: list[int], seconds: float) -> None:
        """Until all are done; `seconds` may pass without one that ends."""
        waiting = [request for request in requests if request in self._peers]
        while waiting := [request for request in waiting if request in self._peers]:
            for request in waiting if self._lost else ():
                if error := self._lost.get(self._peers[request]):
                    raise self._failure(self._peers[request], error) from error
            try:
                item = self._done.get(timeout=seconds)
            except Empty:
                raise self._late(waiting, seconds) from None
            if self._aborted:
                raise ClosedError(f"rank {self._name} gave up meanwhile: {self._aborted}")
            if isinstance(item, int):
                del self._peers[item]
            elif item:
                self._lost.setdefault(*item)
        if not self._peers:
            haste.end(self)

    def abort(self, reason: str) -> None:
        """Tells the other ranks why, then closes all connections: every wait there fails."""
        if self._aborted:
            return
        self._aborted = reason
        haste.end(self)
        self._channel.tell(reason)
        for link in list(self._links.values()):
            link.shut()
        self._done.put(None)

    def close(self) -> None:
        """Ends the connections. What was sent still arrives."""
        if os.getpid() != self._process:  # a fork's: they are the parent's
            return
        links, self._links = self._links, {}
        for link in links.values():
            link.shut()
        for link in links.values():
            link.join()

    def __del__(self) -> None:
        self.close()

    def _refuse_after_abort(self) -> None:
        """Before a collective begins: a rank that gave up may have sent its part of it before. One
        that just left has sent all that is needed of it."""
        if self._leavers.poll(0) and (notice := self._channel.heard(False)):
            raise PeerAbortedError(notice)

    @property
    def _name(self) -> int:
        return self._channel.names[self.rank]

    def _late(self, requests: list[int], seconds: float) -> TransportError:
        if notice := self._channel.heard(False):
            return PeerAbortedError(notice)
        peers = sorted({self._channel.names[self._peers[request]] for request in requests})
        late = ", ".join(map(str, peers))
        return DeadlineError(f"rank {self._name} waited {seconds:g} s for rank {late}")

    def _failure(self, peer: int, error: Exception) -> TransportError:
        if self._aborted:
            return ClosedError(f"rank {self._name} gave up meanwhile: {self._aborted}")
        # A rank that gave up closes its connections, having said why.
        name, gone = self._channel.names[peer], isinstance(error, OSError)
        if notice := self._channel.heard(gone):
            return PeerAbortedError(notice)
        if gone:
            return TransportError(f"rank {self._name} lost its connection to rank {name}: {error}")
        return TransportError(f"rank {name} {error}")

    def _connect(self) -> None:
        """All pairs: the later rank calls the earlier one, which knows it by its own secret."""
        until = time.monotonic() + self._seconds
        secret = secrets.token_bytes(16)
        with _listener(self._host, self.size) as listener:
            address = _ADDRESS.pack(
                secret, _machine(), listener.getsockname()[1], self._host.encode()
            )
            everyone = self._channel.exchange(address, 0, self._seconds)
            for peer in range(self.rank):
                theirs = _ADDRESS.unpack_from(everyone, peer * _ADDRESS.size)
                self._add(peer, self._call(peer, *theirs, until=until))
            while len(self._links) < self.size - 1 and not self._aborted:
                self._accept(listener, secret, until)
        if self._aborted:
            raise ClosedError(f"rank {self._name} gave up meanwhile: {self._aborted}")

    def _call(
        self, peer: int, secret: bytes, machine: bytes, port: int, name: bytes, *, until: float
    ) -> socket.socket:
        host = name.rstrip(b"\0").decode()
        if (host in ("localhost", "::1") or host.startswith("127.")) and machine != _machine():
            raise ConfigError(
                f"rank {self._channel.names[peer]} is on another machine and listens on {host}, "
                "its loopback: pass host= an address of its machine that all ranks reach"
            )
        try:
            left = max(0.1, until - time.monotonic())
            connection = socket.create_connection((host, port), left)
            connection.sendall(_HELLO.pack(secret, self.rank))
        except OSError as error:
            raise TransportError(
                f"rank {self._name} cannot connect to rank {self._channel.names[peer]} at "
                f"{host}:{port}: {error}. If it has another address, pass that as host= there"
            ) from error
        return connection

    def _accept(self, listener: socket.socket, secret: bytes, until: float) -> None:
        listener.settimeout(0.5)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if notice := self._channel.heard(False):
                raise PeerAbortedError(notice) from None
            if time.monotonic() > until:
                late = [
                    str(name)
                    for peer, name in enumerate(self._channel.names)
                    if peer > self.rank and peer not in self._links
                ]
                raise DeadlineError(
                    f"rank {self._name} waited {self._seconds:g} s for rank {', '.join(late)} to "
                    "connect"
                ) from None
            return
        connection.settimeout(_HELLO_SECONDS)
        with contextlib.suppress(OSError, struct.error):
            found, peer = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
            if secrets.compare_digest(found, secret) and self.rank < peer < self.size:
                self._add(peer, connection)
                return
        connection.close()  # somebody else

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[peer] = _Link(connection, peer, self._done)
        self._leavers.register(connection.fileno(), select.POLLRDHUP)


def _listener(host: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(
            f"host = {host!r} is no address of this machine on which to listen: {error}"
        ) from error


def _machine() -> bytes:
    """Equal where two processes have the same loopback."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    network = Path("/proc/self/ns/net").stat().st_ino
    return hashlib.blake2b(f"{boot} {network}".encode(), digest_size=16).digest()
