"""Runs an example's ranks: as processes of this machine, or as the one that a launcher started."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import cccl.cupy

Main = Callable[[cccl.cupy.Communicator, Any, argparse.Namespace], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What all examples take."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="without a launcher")


def run(main: Main, options: argparse.Namespace) -> None:
    """`main(communicator, numpy or cupy, options)` on each rank.

    torchrun, Slurm's scripts and the like set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The
    last is torchrun's own, so the next one is taken.
    """
    environment = os.environ
    if "RANK" in environment:
        where = f"tcp://{environment['MASTER_ADDR']}:{int(environment['MASTER_PORT']) + 1}"
        return _rank(main, int(environment["RANK"]), int(environment["WORLD_SIZE"]), where, options)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/meeting"
        ranks = [
            context.Process(target=_rank, args=(main, rank, options.ranks, where, options))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(1)


def _rank(main: Main, rank: int, world: int, where: str, options: argparse.Namespace) -> None:
    if options.device == "cuda":
        import cupy as xp

        gpus = xp.cuda.runtime.getDeviceCount()
        xp.cuda.Device(int(os.environ.get("LOCAL_RANK", rank)) % gpus).use()
        if gpus < world:  # ranks that share a GPU are hosts apart to NCCL
            os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
    else:
        import numpy as xp
    with cccl.cupy.Communicator(rank, world, where) as communicator:
        main(communicator, xp, options)
