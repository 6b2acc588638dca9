"""Starts training runs as processes of their own: on this machine, or in the lab behind links."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TRAINING = Path(__file__).resolve().with_name("training.py")
NETLAB = Path(__file__).resolve().parents[1] / "benchmarks" / "netlab.py"
SECONDS_TO_END = 30.0
LOG_LINES = 60  # of a failed run, shown in the error


class RunError(Exception):
    """A run failed or took too long; the message holds the end of its output."""


def lab_command(ranks: int, rate: str, limit: float) -> list[str]:
    """What stands before a command to run it once on each of `ranks` hosts of the lab."""
    options = ["--hosts", str(ranks), "--rate", rate, "--timeout", f"{limit:g}s", "--grace", "5s"]
    return [sys.executable, str(NETLAB), "run", *options, "--"]


def lab_problem(ranks: int, rate: str) -> str | None:
    """Why the lab cannot be made here, found by making one; None if it can."""
    if not NETLAB.exists():
        return f"{NETLAB} is missing"
    done = subprocess.run([*lab_command(ranks, rate, 20), "true"], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return said[-1].removeprefix("netlab: ")


def train(
    options: list[str],
    result: Path,
    on_step: Callable[[int, float], None],
    limit: float,
    launcher: list[str] | None = None,
) -> dict[str, Any]:
    """Runs training.py with `options`, under `launcher` if given; returns what it found.

    `on_step` gets each step's number and loss. All output goes to a file beside `result`. The
    lab's counters come back under "netlab". Raises `RunError` after `limit` seconds or a failure;
    no process outlives the call.
    """
    command = [sys.executable, str(TRAINING), *options, "--result", str(result)]
    log = result.with_suffix(".log")
    lab: dict[str, Any] = {}
    too_late = threading.Event()
    with log.open("w") as file, _process([*(launcher or []), *command]) as process:
        assert process.stdout is not None

        def give_up() -> None:
            too_late.set()
            os.killpg(process.pid, signal.SIGTERM)

        watch = threading.Timer(limit, give_up)
        watch.daemon = True
        watch.start()
        try:
            for line in process.stdout:
                message = _message(line)
                if "step" in message:
                    on_step(message["step"], message["loss"])
                elif "netlab" in message:
                    lab = message["netlab"]
                else:
                    file.write(line)
        finally:
            watch.cancel()
        status = process.wait()
    if too_late.is_set():
        raise RunError(f"not done after {limit:g} s (--timeout allows more); its output: {log}")
    if status:
        tail = "\n".join(log.read_text().splitlines()[-LOG_LINES:])
        raise RunError(f"failed with exit status {status}; the end of {log}:\n{tail}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found | ({"netlab": lab} if lab else {})


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, which ends, with all below it, when the block does."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # SIGTERM first: the lab then removes its namespaces and the ranks inside.
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, ending)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SECONDS_TO_END)
        process.stdout.close()


def _message(line: str) -> dict[str, Any]:
    """The JSON object of a line, behind the lab's '[RANK] ' if there; {} for any other line."""
    with contextlib.suppress(json.JSONDecodeError):
        found = json.loads(re.sub(r"^\[\d+\] ", "", line))
        if isinstance(found, dict):
            return found
    return {}
