"""Where ranks meet: a folder that all of them see, or a small server that rank 0 keeps.

A store holds text under names; `cccl._channel.Store` says what is asked of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import socketserver
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import DeadlineError, TransportError

_REQUEST_SECONDS = 5.0  # that the server may take for one request
_LONGEST_REQUEST = 1 << 20  # bytes


class FileStore:
    """A file per key in a folder. A file appears whole, and the first that is linked stays."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def set(self, key: str, value: str) -> None:
        """Sets it, whatever it was."""
        os.replace(self._written(value), self._path(key))

    def get(self, key: str) -> str:
        """What it is; raises `OSError` if it is not there."""
        return self._path(key).read_text()

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(self._path(key).exists() for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets it if it is not there yet; returns what it then is. `expected` is ""."""
        assert expected == ""
        written = self._written(desired)
        try:
            os.link(written, self._path(key))
        except FileExistsError:
            return self.get(key)
        finally:
            written.unlink()
        return desired

    def delete_key(self, key: str) -> None:
        """Removes it, if it is there."""
        self._path(key).unlink(missing_ok=True)

    def remove(self) -> None:
        """The whole folder, once nobody needs it."""
        with contextlib.suppress(OSError):  # another rank is at it too
            for path in self.folder.iterdir():
                path.unlink(missing_ok=True)
            self.folder.rmdir()

    def _path(self, key: str) -> Path:
        return self.folder / quote(key, safe="")

    def _written(self, value: str) -> Path:
        path = self.folder / f"~{secrets.token_hex(8)}"
        path.write_text(value)
        return path


class _Values:
    """What a server holds. Each method is a request."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def answer(self, request: bytes) -> Any:
        """Of a request `[name, argument, ...]` in JSON. Raises `ValueError` for any other."""
        name, *arguments = json.loads(request)
        with self._lock:
            match name, arguments:
                case "set", [str(key), str(value)]:
                    self._values[key] = value
                    return None
                case "get", [str(key)]:
                    return self._values.get(key)
                case "check", [[*keys]]:
                    return all(key in self._values for key in keys)
                case "compare_set", [str(key), "", str(value)]:
                    return self._values.setdefault(key, value)
                case "delete_key", [str(key)]:
                    return self._values.pop(key, None) is not None
        raise ValueError(name)


class _Handler(socketserver.StreamRequestHandler):
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answers one client, until it sends what is no request."""
        assert isinstance(self.server, StoreServer)
        with contextlib.suppress(OSError, ValueError, TypeError):
            while request := self.rfile.readline(_LONGEST_REQUEST):
                answer = self.server.values.answer(request)
                self.wfile.write(json.dumps(answer).encode() + b"\n")


class StoreServer(socketserver.ThreadingTCPServer):
    """Answers `TcpStore`s from a thread of its own."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, host: str, port: int):
        self.values = _Values()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="cccl-store")
        thread.daemon = True
        thread.start()

    @property
    def port(self) -> int:
        """On which it listens."""
        return int(self.server_address[1])

    def stop(self) -> None:
        """Ends it. Clients that are connected are answered until this process ends."""
        self.shutdown()
        self.server_close()


class TcpStore:
    """A client of a `StoreServer`. For any thread; requests go one after the other."""

    def __init__(self, host: str, port: int, seconds: float):
        """Waits `seconds` for the server to be there."""
        self._lock = threading.Lock()
        until, problem = time.monotonic() + seconds, ""
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise DeadlineError(
                    f"no rendezvous at tcp://{host}:{port} within {seconds:g} s ({problem}): "
                    "rank 0 must be running, and the address be one of its machine"
                )
            try:
                self._socket = socket.create_connection((host, port), min(left, 5.0))
                break
            except OSError as error:
                problem = str(error)
                time.sleep(min(left, 0.05))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(_REQUEST_SECONDS)
        self._answers = self._socket.makefile("rb")

    @property
    def own_host(self) -> str:
        """This machine's address, as far as the server's machine is concerned."""
        return str(self._socket.getsockname()[0])

    def set(self, key: str, value: str) -> None:
        """Sets it, whatever it was."""
        self._ask("set", key, value)

    def get(self, key: str) -> str:
        """What it is; raises `RuntimeError` if it is not there."""
        value = self._ask("get", key)
        if value is None:
            raise RuntimeError(f"the rendezvous has no key {key!r}")
        return str(value)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return bool(self._ask("check", keys))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Sets it if it is not there yet; returns what it then is. `expected` is ""."""
        return str(self._ask("compare_set", key, expected, desired))

    def delete_key(self, key: str) -> None:
        """Removes it, if it is there."""
        self._ask("delete_key", key)

    def close(self) -> None:
        """Ends the connection, and any request under way."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._answers.close()
        self._socket.close()

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                answer = self._answers.readline()
            except OSError:
                self._socket.close()  # an answer that comes later would be taken for the next
                raise
            except ValueError as error:  # it was closed meanwhile
                raise ConnectionError(str(error)) from error
        if not answer:
            raise ConnectionError("rank 0, which keeps the rendezvous, is gone")
        return json.loads(answer)


class PrefixStore:
    """A part of another store."""

    def __init__(self, prefix: str, store: Any):
        self._prefix, self._store = prefix, store

    def set(self, key: str, value: str) -> None:
        """As the store's."""
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> str:
        """As the store's."""
        return str(self._store.get(f"{self._prefix}/{key}"))

    def check(self, keys: list[str]) -> bool:
        """As the store's."""
        return bool(self._store.check([f"{self._prefix}/{key}" for key in keys]))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """As the store's."""
        return str(self._store.compare_set(f"{self._prefix}/{key}", expected, desired))

    def delete_key(self, key: str) -> None:
        """As the store's."""
        self._store.delete_key(f"{self._prefix}/{key}")


def serve(host: str, port: int) -> StoreServer:
    """The server of rank 0, on that address or, where it is none of this machine's, on all."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            return StoreServer(str(address[0]), port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # the name of a service in front of it, say
                raise
        return StoreServer("::" if family == socket.AF_INET6 else "0.0.0.0", port)
    except OSError as error:
        raise TransportError(
            f"rank 0 cannot listen on tcp://{host}:{port}: {error}. Name a free port of a machine "
            "that all ranks reach, and one rank 0"
        ) from error


def default_host() -> str:
    """The address by which other machines reach this one; the loopback's where there are none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it asks for the way there
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
