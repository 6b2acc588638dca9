"""`dist.init_process_group("cpu:cccl,cuda:cccl")`: large tensors go compressed, the rest plain."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend
from torch.distributed import distributed_c10d as c10d

from .._config import Config
from ..errors import ConfigError, UnsupportedError
from ._backend_group import CompressedGroup

NAME = "cccl"
_PLAIN = {"cpu": "gloo", "cuda": "nccl"}  # what carries a device's plain calls


def register() -> None:
    """Makes the name known to torch."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=list(_PLAIN))


def create(options: Any, pg_options: Any = None) -> CompressedGroup:
    """Called by torch for each new group. `pg_options`: the group's own configuration, as a dict or
    `cccl.Config` (else the default group's is taken, then `cccl.configure`'s), or NCCL's options.

    Raises:
        ConfigError: the backend string names what "cccl" does not go with.
        UnsupportedError: none of its devices is there, or this torch is too different.
    """
    caller = sys._getframe(1).f_locals
    config = getattr(dist.group.WORLD, "config", None)
    if isinstance(pg_options, Config | Mapping):
        config, pg_options = Config.load(pg_options), None
    elif pg_options is not None and not isinstance(pg_options, _Backend.Options):
        raise ConfigError(
            f"pg_options is a {type(pg_options).__name__}; allowed: a dict of settings, "
            "cccl.Config, or options of the plain backend"
        )
    devices = _devices(caller)
    backends = ",".join(
        f"{device}:{_PLAIN[device] if name == NAME else name}" for device, name in devices.items()
    )
    name = f"{options.group_id}:plain"
    plain, _ = c10d._new_process_group_helper(
        options.group_size, options.group_rank, options.global_ranks_in_group,
        dist.Backend(backends), options.store, name, backend_options=pg_options,
        timeout=options.timeout, pg_tag=name,
    )  # fmt: skip
    _forget(plain)
    ranks = options.global_ranks_in_group or range(options.group_size)
    compressed = {device for device, name in devices.items() if name == NAME}
    group = CompressedGroup(plain, list(ranks), compressed, config)
    if caller.get("device_id") is not None:
        plain.bound_device_id = group.bound_device_id = caller["device_id"]
    return group


def _forget(group: dist.ProcessGroup) -> None:
    """Out of torch's tables: who looks for a group of these ranks shall find the one around it,
    which alone closes it."""
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config):
        table.pop(group, None)
    world.tags_to_pg.pop(world.pg_to_tag.pop(group, ""), None)
    c10d._unregister_process_group(group.group_name)


def _devices(caller: Mapping[str, Any]) -> dict[str, str]:
    """The backend of each device that the new group is for. torch asks for a group once, and does
    not say for which devices: its caller's variables do."""
    try:
        asked = {d: str(b) for d, b in caller["backend_config"].get_device_backend_map().items()}
    except (KeyError, AttributeError):
        raise UnsupportedError(
            f"torch {torch.__version__} makes process groups in a way that backend 'cccl' does not "
            "know: use 'gloo' or 'nccl' and cccl.torch.compress(model) or compress_fsdp(model)"
        ) from None
    text = ",".join(f"{device}:{name}" for device, name in asked.items())
    for device, name in asked.items():
        if device not in _PLAIN:
            raise ConfigError(
                f"backend {text!r}: cccl takes devices {' and '.join(_PLAIN)}, not {device!r}"
            )
        if name not in (NAME, *_PLAIN.values()):
            raise ConfigError(
                f"backend {text!r}: {name!r} does not go with cccl in one group; allowed: cccl, "
                f"{', '.join(_PLAIN.values())}"
            )
    there = {device: name for device, name in asked.items() if _AVAILABLE[device]()}
    if not there:
        raise UnsupportedError(
            f"backend {text!r}: there is no such device, or this torch has no "
            f"{' or '.join(_PLAIN[device] for device in asked)}; use 'cpu:cccl' for CPU tensors"
        )
    return there


_AVAILABLE: dict[str, Callable[[], bool]] = {
    "cpu": dist.is_gloo_available,
    "cuda": lambda: dist.is_nccl_available() and torch.cuda.is_available(),
}
