"""The process group of backend "cccl": a plain group, and what of its calls goes compressed."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .._calls import PlainRow, why_plain
from .._config import Config, current_config
from ..errors import NotCompressedError, UnsupportedError
from ._call import Call
from ._compile import untraced
from ._group_work import GroupWork, finished
from ._plain import PlainCall

_LABEL = "backend cccl"
_MOST_ROWS = 1024
_NO_TIMEOUT = timedelta(0)
_KIND = dist.ProcessGroup.BackendType
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # inputs and outputs


def _method(*names: str) -> Any:
    """Of plain groups, by the first name that this release has."""
    return next(getattr(dist.ProcessGroup, n) for n in names if hasattr(dist.ProcessGroup, n))


_all_gather = _method("all_gather_single", "_allgather_base")
_all_gathers = _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_reduce_scatter = _method("reduce_scatter_single", "_reduce_scatter_base")
_reduce_scatters = _method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def _unless_off(plain: Callable[..., Any]) -> Callable[[Any], Any]:
    """Where compression is off, the plain group's method gets the call as it is, and nothing else
    costs time."""

    def around(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: CompressedGroup, *args: Any, **kwargs: Any) -> Any:
            if (self.config or current_config()).is_off:
                return plain(self.plain_group, *args, **kwargs)
            return method(self, *args, **kwargs)

        return call

    return around


class CompressedGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Hands every call to `plain_group`, made as torch makes it, but what goes compressed.

    Every method that C++ looks for in a subclass is defined here or by `_forward`: the base's
    would run with the GIL held, and wait for gloo's thread, which wants it.
    """

    def __init__(
        self,
        plain_group: dist.ProcessGroup,
        ranks: list[int],
        devices: set[str],
        config: Config | None,
    ):
        super().__init__(plain_group.rank(), plain_group.size())
        self.plain_group, self.config = plain_group, config
        self._ranks, self._devices = ranks, devices
        self._rows: dict[Any, PlainRow] = {}
        for device in plain_group._device_types:  # for what C++ asks of the group itself
            kind = _KIND.NCCL if device.type == "cuda" else _KIND.GLOO
            self._register_backend(device, kind, plain_group._get_backend(device))
            self._set_default_backend(kind)
        # By this table dist's functions know a group's ranks.
        c10d._world.pg_group_ranks[plain_group] = {r: i for i, r in enumerate(ranks)}

    # What may go compressed, with the signatures of ProcessGroup and the names of all releases.

    @_unless_off(dist.ProcessGroup.allreduce)
    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        if not isinstance(opts, dist.AllreduceOptions):
            opts = _options(dist.AllreduceOptions(), timeout, op if opts is None else opts)
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) != 1 or self._stays_plain("all_reduce", tensors[0], tensors[0]):
            return self.plain_group.allreduce(tensors, opts)
        plain = functools.partial(self.plain_group.allreduce, tensors, opts)
        return self._send("all_reduce", tensors[0], tensors[0], opts, plain)

    @_unless_off(dist.ProcessGroup.allreduce_coalesced)
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceCoalescedOptions()

        def plain(pairs: Pairs) -> Any:
            return self.plain_group.allreduce_coalesced([output for _, output in pairs], opts)

        return self._send_all("all_reduce", [(t, t) for t in tensors], opts, plain)

    @_unless_off(_reduce_scatter)
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        if self._stays_plain("reduce_scatter", input, output):
            return _reduce_scatter(self.plain_group, output, input, opts)
        plain = functools.partial(_reduce_scatter, self.plain_group, output, input, opts)
        return self._send("reduce_scatter", input, output, opts, plain)

    @_unless_off(_reduce_scatters)
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()

        def plain(pairs: Pairs) -> Any:
            return _reduce_scatters(self.plain_group, *_unzipped(pairs), opts)

        pairs = list(zip(inputs, outputs, strict=True))
        return self._send_all("reduce_scatter", pairs, opts, plain)

    @_unless_off(dist.ProcessGroup.reduce_scatter)
    def reduce_scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Any:
        if not isinstance(opts, dist.ReduceScatterOptions):
            opts = _options(dist.ReduceScatterOptions(), timeout, op if opts is None else opts)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        plain = functools.partial(self.plain_group.reduce_scatter, outputs, inputs, opts)
        output, parts = outputs[0], inputs[0]
        if len(outputs) != 1 or any(part.shape != output.shape for part in parts):
            return plain()
        if self._stays_plain("reduce_scatter", parts[0], output, self.size()):
            return plain()
        joined = torch.cat([part.reshape(-1) for part in parts])
        return self._send("reduce_scatter", joined, output, opts, plain)

    @_unless_off(_all_gather)
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if self._stays_plain("all_gather", input, output):
            return _all_gather(self.plain_group, output, input, opts)
        plain = functools.partial(_all_gather, self.plain_group, output, input, opts)
        return self._send("all_gather", input, output, opts, plain)

    @_unless_off(_all_gathers)
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllgatherOptions()

        def plain(pairs: Pairs) -> Any:
            return _all_gathers(self.plain_group, *_unzipped(pairs), opts)

        pairs = list(zip(inputs, outputs, strict=True))
        return self._send_all("all_gather", pairs, opts, plain)

    @_unless_off(dist.ProcessGroup.allgather)
    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        one = inputs if isinstance(inputs, torch.Tensor) else inputs[0]
        if not self._stays_plain("all_gather", one, one, self.size()):
            reason = "into a list of tensors; all_gather_into_tensor is compressed"
            if self._settings.strict:
                raise NotCompressedError(f"all_gather {_LABEL!r}: {reason}")
            self._count("all_gather", one, reason)
        return self.plain_group.allgather(outputs, inputs, *args, **kwargs)

    @_unless_off(dist.ProcessGroup.broadcast)
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> Any:
        if not isinstance(opts, dist.BroadcastOptions):
            root = root if opts is None else opts
            opts = _options(dist.BroadcastOptions(), timeout)
            opts.rootRank = root
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) != 1 or self._stays_plain("broadcast", tensors[0], tensors[0]):
            return self.plain_group.broadcast(tensors, opts)
        plain = functools.partial(self.plain_group.broadcast, tensors, opts)
        return self._send("broadcast", tensors[0], tensors[0], opts, plain)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # Of the group itself.

    def reconfigure(self, opts: Any) -> Any:
        """Refused: what this group has agreed on holds for the ranks that it was made of."""
        raise UnsupportedError(
            "a group of backend 'cccl' keeps its ranks: make another one, by new_group()"
        )

    def getBackendName(self) -> str:  # C++ asks for it by this name
        return "cccl"

    name = getBackendName

    def get_group_store(self) -> dist.Store:
        return self.plain_group.get_group_store()

    def split_group(self, ranks: list[int], *args: Any, **kwargs: Any) -> CompressedGroup | None:
        """As the plain group's; what it gives is compressed too."""
        plain = self.plain_group.split_group(ranks, *args, **kwargs)
        if plain is None:
            return None
        members = [self._ranks[rank] for rank in sorted(ranks)]
        group = CompressedGroup(plain, members, self._devices, self.config)
        group._set_group_name(plain.group_name)
        group._set_group_desc(plain.group_desc)
        return group

    def shutdown(self) -> None:
        c10d._world.pg_group_ranks.pop(self.plain_group, None)
        self.plain_group.shutdown()

    def abort(self) -> None:
        c10d._world.pg_group_ranks.pop(self.plain_group, None)
        self.plain_group.abort()

    # The decision.

    @property
    def _settings(self) -> Config:
        return self.config or current_config()

    def _send(
        self,
        collective: str,
        input: torch.Tensor,
        output: torch.Tensor,
        opts: Any,
        plain: Callable[[], Any],
    ) -> Any:
        """Sends it compressed or, for a reason that is counted, plain; returns a work."""
        found = self._call(collective, input, output, opts)
        if isinstance(found, Call):
            if opts.asyncOp:
                return GroupWork([found.submit()], [output])
            found.perform()
            return finished([output])
        clock, begun, work = found.clock(input), time.perf_counter(), plain()
        if work is not None and not opts.asyncOp:  # NCCL has made the current stream wait already
            work.wait()
        later = opts.asyncOp
        found.record(time.perf_counter() - begun, whole=not (later or input.is_cuda), clock=clock,
                     work=work if later else None)  # fmt: skip
        return work

    def _send_all(
        self, collective: str, pairs: Pairs, opts: Any, plain: Callable[[Pairs], Any]
    ) -> Any:
        """Sends each pair compressed, and all others in one plain call; returns one work."""
        works: list[Any] = []
        left = []
        for pair in pairs:
            if not self._stays_plain(collective, *pair):
                found = self._call(collective, *pair, opts)
                if isinstance(found, Call):
                    works.append(found.submit())
                    continue
                found.record(0.0, whole=False)
            left.append(pair)
        if not works:
            return plain(pairs)
        if left and (work := plain(left)) is not None:
            works.append(work)
        return GroupWork(works, [output for _, output in pairs])

    def _call(
        self, collective: str, input: torch.Tensor, output: torch.Tensor, opts: Any
    ) -> Call | PlainCall:
        """What goes compressed, or how it is counted as plain."""
        if input.device != output.device:
            raise UnsupportedError(
                f"{collective} {_LABEL!r}: input on {input.device}, output on "
                f"{output.device}; they must be on the same device"
            )
        config, op, source = self._settings, dist.ReduceOp.SUM, 0
        if opts.timeout > _NO_TIMEOUT:
            config = _with_deadline(config, opts.timeout.total_seconds())
        if collective == "broadcast":
            source = self._ranks[opts.rootRank]
        elif collective != "all_gather":
            op = opts.reduceOp.op  # the enum's member, of which all are one object
        call = Call(collective, input, output, op, self.plain_group, config, _LABEL, source)
        reason = call.decide()
        return call.plainly(reason) if reason else call

    def _stays_plain(
        self, collective: str, input: torch.Tensor, output: torch.Tensor, parts: int = 1
    ) -> bool:
        """Whether it goes plain as it should; counted, if this collective may go compressed.
        `parts`: there are so many such tensors."""
        config = self._settings.of(collective)
        if not config.compresses:
            return True
        reason = why_plain(config, collective, self.size())
        if not reason:
            if not (input.is_floating_point() or input.is_complex()):
                reason = "integers are never lossy"
            elif input.device.type not in self._devices:
                reason = "its device has a plain backend"
            elif parts * max(_nbytes(input), _nbytes(output)) < config.min_bytes:
                reason = "below min_size"
        if reason:
            self._count(collective, input, reason)
        return bool(reason)

    def _count(self, collective: str, input: torch.Tensor, reason: str) -> None:
        numel, size = input.numel(), self.size()
        key = collective, input.dtype, numel, reason
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) == _MOST_ROWS:
                self._rows.clear()
            nbytes, dtype = _nbytes(input), str(input.dtype).removeprefix("torch.")
            row = self._rows[key] = PlainRow(_LABEL, collective, dtype, reason, size, numel, nbytes)
        row.record(0.0, whole=False)


def _nbytes(tensor: torch.Tensor) -> int:
    """Of all its values; a sparse tensor does not tell."""
    count: int = tensor.numel() * tensor.element_size()
    return count


def _options(options: Any, timeout: timedelta | None, op: Any = None) -> Any:
    """c10d's options, from what the other signatures take instead."""
    if op is not None:
        options.reduceOp = op
    if timeout is not None:
        options.timeout = timeout
    return options


@functools.lru_cache(maxsize=64)
def _with_deadline(config: Config, seconds: float) -> Config:
    return dataclasses.replace(config, deadline=seconds)


def _unzipped(pairs: Pairs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs, then inputs: c10d's order."""
    return [output for _, output in pairs], [input for input, _ in pairs]


def _forward(name: str) -> Callable[..., Any]:
    method = getattr(dist.ProcessGroup, name)

    def call(self: CompressedGroup, *args: Any, **kwargs: Any) -> Any:
        return method(self.plain_group, *args, **kwargs)

    call.__name__ = name
    return call


for _name in (
    "all_to_all_single", "allgather_coalesced", "alltoall", "alltoall_base", "barrier", "gather",
    "gather_into_tensor", "gather_single", "monitored_barrier", "recv", "recv_anysource",
    "reduce", "scatter", "send", "set_timeout",
    "_start_coalescing", "_end_coalescing", "_get_sequence_number_for_group",
    "_set_sequence_number_for_group", "_has_hooks", "_register_on_completion_hook",
    "_wait_for_pending_works", "_enable_collectives_timing",
):  # fmt: skip
    if hasattr(dist.ProcessGroup, _name):
        setattr(CompressedGroup, _name, _forward(_name))
untraced(CompressedGroup)
