"""Monitoring of a running job, off until it is asked for: Prometheus text in a file or on a
loopback port, from `cccl.stats()`. Needs prometheus-client (`pip install 'cccl[tools]'`)."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ._stats import stats
from .errors import ConfigError, UnsupportedError

LOOPBACK = "127.0.0.1"
LABELS = ("rank", "label", "collective", "codec", "algorithm", "dtype", "reason")
COUNTERS = {
    "calls": "collectives",
    "failures": "of them failed",
    "values": "values sent through collectives",
    "value_bytes": "the same uncompressed",
    "plain_bytes": "bytes that a plain ring would have sent",
    "bytes_sent": "bytes sent",
    "bytes_received": "bytes received",
    "encode_seconds": "encoding",
    "reduce_seconds": "decoding, adding and encoding sums",
    "decode_seconds": "decoding results",
    "exposed_seconds": "waiting for the network",
    "total_seconds": "all of these",
    "latency_seconds": "from each call to its result",
}
GAUGES = {"relative_error": "norm of the error over norm of the values, of a sample"}

_log = logging.getLogger("cccl")


def client(part: str = "") -> Any:
    """The module prometheus_client, or a part of it."""
    try:
        return importlib.import_module("prometheus_client" + part)
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"needs {error.name}: pip install 'cccl[tools]'") from error


class Collector:
    """`cccl.stats()` for a registry of prometheus_client, under names that begin `cccl_`."""

    def __init__(self, rank: int | None = None):
        core = client(".core")
        self._counter, self._gauge = core.CounterMetricFamily, core.GaugeMetricFamily
        self._rank = str(_rank() if rank is None else rank)

    def collect(self) -> Iterator[Any]:
        """One family per quantity, with a sample per row of the statistics."""
        found = stats()
        rows = [([self._rank, *(row[key] for key in LABELS[1:])], row) for row in found["rows"]]
        for kind, names in (self._counter, COUNTERS), (self._gauge, GAUGES):
            for name, text in names.items():
                family = kind(f"cccl_{name}", text, labels=LABELS)
                for labels, row in rows:
                    family.add_metric(labels, row[name])
                yield family
        pool = self._gauge("cccl_pool_bytes", "memory for payloads in flight", labels=LABELS[:1])
        pool.add_metric([self._rank], found["total"]["pool_bytes"])
        yield pool


def text() -> str:
    """The statistics now, in Prometheus' text format."""
    return str(client().generate_latest(_registry()).decode())


class Monitor:
    """Keeps a file current, or serves http://127.0.0.1:port/metrics, from threads of its own, until
    `stop()` or the end of the process. Each rank of a job has its own.

    `file` may hold "{rank}"; it is replaced as a whole every `interval` seconds, and at the end.
    `port` 0 takes a free one; `port` then tells it. Only this machine can reach it. Raises
    `ConfigError` if a file cannot be written or a port not be had.
    """

    def __init__(
        self,
        file: str | Path | None = None,
        port: int | None = None,
        *,
        interval: float = 10.0,
    ):
        if (file is None and port is None) or not interval > 0:
            raise ConfigError("monitoring takes a file, a port or both, and an interval above 0")
        if port is not None and not 0 <= port < 1 << 16:
            raise ConfigError(f"port = {port}; allowed: 0 to 65535")
        self._client, self._registry = client(), _registry()
        self.file = None if file is None else Path(str(file).replace("{rank}", str(_rank())))
        self.port, self._server = port, None
        self.interval, self._stopped = interval, threading.Event()
        self._thread: threading.Thread | None = None
        if self.file is not None:
            try:
                self._write()
            except OSError as error:
                raise ConfigError(f"cannot write {str(self.file)!r}: {error}") from error
        if port is not None:
            try:
                self._server, _ = self._client.start_http_server(port, LOOPBACK, self._registry)
            except OSError as error:
                raise ConfigError(f"port {port} on {LOOPBACK}: {error}") from error
            self.port = self._server.server_port
        if self.file is not None:
            self._thread = threading.Thread(target=self._keep, name="cccl monitor", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Writes the file a last time and frees the port."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _keep(self) -> None:
        while True:
            ended = self._stopped.wait(self.interval)
            try:
                self._write()
            except OSError as error:  # a full disk must not end a training
                _log.warning("monitoring: cannot write %s: %s", self.file, error)
            if ended:
                return

    def _write(self) -> None:
        self._client.write_to_textfile(str(self.file), self._registry)


def since(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of two `cccl.stats()` subtracted, where anything happened in between; a row that
    was reset counts from its reset."""
    keys = LABELS[1:]
    old = {tuple(row[key] for key in keys): row for row in before["rows"]}
    found = []
    for row in now["rows"]:
        base = old.get(tuple(row[key] for key in keys), {})
        if base.get("calls", 0) > row["calls"]:
            base = {}
        if row["calls"] > base.get("calls", 0):
            found.append({**row, **{name: row[name] - base.get(name, 0) for name in COUNTERS}})
    return found


def _registry() -> Any:
    registry = client().CollectorRegistry()
    registry.register(Collector())
    return registry


def _rank() -> int:
    return int(os.environ.get("RANK", 0))
