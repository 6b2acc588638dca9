"""The process group of a command that a launcher started once per rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import ConfigError, UnsupportedError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextlib.contextmanager
def launched(command: str, device: str, deadline: float) -> Iterator[torch.device]:
    """Joins the ranks over gloo or NCCL; gives this rank's device."""
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: start one process per rank, e.g. torchrun "
            f"--nproc-per-node 2 -m cccl {command}"
        )
    limit = timedelta(seconds=deadline)
    torch.set_num_threads(1)  # ranks often share the cores
    if device == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError("device 'cuda': torch finds no CUDA device here")
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        torch.cuda.set_device(index)
        found = torch.device("cuda", index)
        dist.init_process_group("nccl", timeout=limit, device_id=found)
    else:
        found = torch.device("cpu")
        dist.init_process_group("gloo", timeout=limit)
    try:
        yield found
    finally:
        dist.destroy_process_group()
