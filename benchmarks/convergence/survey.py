"""All runs of a survey, several at a time, each kept as it ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from one_run import Settings, train

import cccl

Job = tuple[str, str, int]  # workload, way, seed
_THREADS = 1  # of torch in each process: also what makes runs on a CPU repeat bit by bit


def jobs_of(workloads: Iterable[str], ways: Iterable[str], seeds: Iterable[int]) -> list[Job]:
    """All variants of a seed before those of the next."""
    ways, workloads = list(ways), list(workloads)
    return [(workload, way, seed) for seed in seeds for workload in workloads for way in ways]


def load(file: Path) -> list[dict[str, Any]]:
    """The runs of a file of JSON lines; the last may have been cut off while it was written."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise cccl.ConfigError(f"{str(file)!r} holds no runs of a survey: {error}") from error


def run(file: Path, jobs: list[Job], settings: Settings, processes: int, resume: bool) -> bool:
    """Runs what the file lacks; whether all is there then."""
    kept = [record for record in load(file) if "error" not in record]  # others are tried again
    if kept and not resume:
        raise cccl.ConfigError(f"{str(file)!r} holds runs: --resume goes on, or name another file")
    shared = _shared(settings)
    for record in kept:
        if record["settings"] != shared:
            raise cccl.ConfigError(
                f"{str(file)!r} was made with {record['settings']}, not {shared}: another file"
            )
    done = {(record["workload"], record["way"], record["seed"]) for record in kept}
    left = [job for job in jobs if job not in done]
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")  # without a line that was cut off
    part.write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(part, file)
    with open(file, "a") as lines:
        for record in _records(left, settings, processes):
            if "failed" not in record:
                lines.write(json.dumps(record | {"settings": shared}) + "\n")
                lines.flush()
                done.add((record["workload"], record["way"], record["seed"]))
            _tell(record, len(done), len(jobs))
    missing = len([job for job in jobs if job not in done])
    if missing:
        print(f"{missing} of {len(jobs)} runs are missing: --resume goes on")
    return not missing


def _shared(settings: Settings) -> dict[str, Any]:
    found = settings._asdict()
    for name in ("until", "digits"):
        del found[name]
    return found


def _records(jobs: list[Job], settings: Settings, processes: int) -> Iterator[dict[str, Any]]:
    """As runs end. A run that is refused, as where a codec is missing, has an `error`."""
    if processes == 1:
        prepare()
        yield from (record for job in jobs if (record := attempt(job, settings)) is not None)
        return
    os.environ.setdefault("CCCL_CODEC_THREADS", "1")  # the processes share the cores
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, prepare) as pool:
        futures = [pool.submit(attempt, job, settings) for job in jobs]
        try:
            for future in concurrent.futures.as_completed(futures):
                if (record := future.result()) is not None:
                    yield record
        finally:
            pool.shutdown(cancel_futures=True)


def prepare() -> None:
    """A process for runs."""
    torch.set_num_threads(_THREADS)


def attempt(job: Job, settings: Settings) -> dict[str, Any] | None:
    """A run's record; None where time ran out. What goes wrong in a run does not end the others."""
    if time.time() > settings.until:
        return None
    name = dict(zip(("workload", "way", "seed"), job, strict=True))
    try:
        return train(*job, settings)
    except cccl.UnsupportedError as error:
        return name | {"error": str(error)}
    except Exception:
        return name | {"failed": traceback.format_exc()}


def _tell(record: dict[str, Any], done: int, of: int) -> None:
    name = f"{record['workload']}, {record['way']}, seed {record['seed']}"
    for what in ("error", "failed"):
        if what in record:
            print(f"{done}/{of} {name}: {record[what]}", flush=True)
            return
    print(
        f"{done}/{of} {name}: loss {record['final']:.5f}, {record['bits_per_value']:.2f} bits, "
        f"{record['seconds']:.1f} s",
        flush=True,
    )


@contextlib.contextmanager
def sharing(wanted: bool) -> Iterator[None]:
    """CUDA's multi-process service (MPS), which lets kernels of several processes run at once, with
    folders of its own; it ends with the survey."""
    if not wanted:
        yield
        return
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise cccl.UnsupportedError("--mps needs nvidia-cuda-mps-control: leave it out")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", check=False, stdout=sys.stderr)
