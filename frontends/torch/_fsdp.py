"""Fully sharded models: gradients go compressed on their way into reduce-scatter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._config import Config, current_config
from .._state import Memory
from .._ways import check_sent, check_sharded
from ..errors import ConfigError
from ._call import send
from ._plain import parts_of
from ._state import StateStore, keep_for


def compress_fsdp(
    model: torch.nn.Module,
    config: Config | Mapping[str, Any] | None = None,
    *,
    step: int = 0,
) -> None:
    """Compresses what a model sharded by `fully_shard` sends, and its submodules.

    Reduce-scatters of gradients go compressed; all-gathers of parameters too if `collective_filter`
    names "all_gather", which by default it does not: then training goes on from rounded
    parameters. Call it after `fully_shard`; the last call holds. `config`: None for that of
    `cccl.configure`. The all-reduce between the replicas of an HSDP mesh has no hook: it goes
    compressed where its group's backend is "cccl". `start_step` and `schedule` hold for gradients;
    `step`: how many steps are done already, where training goes on from a checkpoint.

    A model in FSDP1's `FullyShardedDataParallel` gets its communication hook, for gradients only.

    Raises `ConfigError` if `model` is not sharded or the configuration compresses nothing of it;
    `UnsupportedError` for rules of parameters: FSDP hands over a module's gradients as one tensor,
    in which rows of ranks are mixed.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    settings = None if config is None else Config.load(config)
    steps = not isinstance(model, FullyShardedDataParallel)
    check_sharded(settings or current_config(), steps=steps)
    if isinstance(model, FullyShardedDataParallel):
        check_sent(settings or current_config(), "reduce_scatter", "all_reduce")
        _register_hook(model, settings)
        return
    sharded = {n: m for n, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not sharded:
        raise ConfigError(
            f"compress_fsdp() takes a model sharded by fully_shard() or FullyShardedDataParallel; "
            f"no part of this {type(model).__name__} is. DistributedDataParallel: use compress()"
        )
    check_sent(settings or current_config(), "reduce_scatter", "all_gather")
    store = StateStore(lambda: None)
    for name, module in sharded.items():
        label = f"fsdp {name}" if name else "fsdp"
        try:
            module.set_custom_reduce_scatter(ReduceScatter(settings, label, Memory(store), step))
            module.set_custom_all_gather(AllGather(settings, label))
        except ValueError as error:  # parameters of one module on several meshes
            raise ConfigError(f"{label}: FSDP takes no custom collectives here: {error}") from error
    keep_for(model, store)


class _Comm:
    """What FSDP2 asks of a custom collective, but the call."""

    def __init__(
        self, config: Config | None, label: str, memory: Memory | None = None, step: int = 0
    ):
        self.config, self.label, self.memory, self._step = config, label, memory, step

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ReduceScatter(_Comm):
    """For `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if op == dist.ReduceOp.PREMUL_SUM:  # of `set_gradient_divide_factor`, as NCCL does it
            input_tensor.mul_(parts_of(op)[1])
            op = dist.ReduceOp.SUM
        config = (self.config or current_config()).of("reduce_scatter")
        if config.ways is not None:
            check_sharded(config)
            config = config.ways.at(self._step)
        self._step += 1
        return send(
            "reduce_scatter", input_tensor, output_tensor, op, group, async_op, config,
            self.label, memory=self.memory,
        )  # fmt: skip


class AllGather(_Comm):
    """For `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        op = dist.ReduceOp.SUM
        return send(
            "all_gather", input_tensor, output_tensor, op, group, async_op, self.config, self.label
        )


def _hook(
    state: tuple[dist.ProcessGroup, Config | None],
    gradient: torch.Tensor,
    part: torch.Tensor | None = None,
) -> None:
    """Of FSDP1: averages the gradient, or its part that this rank keeps."""
    group, config = state
    if part is None:  # NO_SHARD
        send("all_reduce", gradient, gradient, "avg", group, False, config, "fsdp")
    else:
        send("reduce_scatter", gradient, part, "avg", group, False, config, "fsdp")


def _register_hook(model: Any, config: Config | None) -> None:
    try:
        model.register_comm_hook((model.process_group, config), _hook)
    except AssertionError as error:  # hybrid sharding, no root, or a hook is there
        raise ConfigError(
            f"FSDP1 takes no communication hook here: {error}. Backend 'cccl' of its process "
            "groups compresses without one"
        ) from error
