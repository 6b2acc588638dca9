"""DistributedDataParallel: gradients go compressed while the backward goes on."""

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from .. import _core
from .._config import Config, current_config
from ..errors import ClosedError, ConfigError
from ._call import Call
from ._groups import resolve
from ._state import Memory, StateStore, keep_for
from ._work import Work

_log = logging.getLogger("cccl")
_MOST_KNOWN = 1024  # kinds of buckets


class CompressionState:
    """State of the hook: the group and the configuration (None: that of `cccl.configure`)."""

    # Looks at each bucket before it is sent; what it returns is called with the result.
    observer: ClassVar[Callable[[dist.GradBucket], Callable[[], None]] | None] = None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        config: Config | Mapping[str, Any] | None = None,
    ):
        self._group = None if group is None else weakref.ref(group)
        self.config = None if config is None else Config.load(config)
        self.attached = False  # by `cccl.configure`, not by the user
        self.store = StateStore(lambda: self.group)  # of error feedback
        self.names: Any = WeakIdKeyDictionary()  # of parameters
        self._layouts: dict[int, tuple[list[str], Any]] = {}  # of buckets
        self._step = 0
        self._works: list[Work] = []
        self._known: dict[Any, Call] = {}
        self._in_backward = False

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: the default group."""
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise ClosedError("the process group of this communication hook was destroyed")
        return group

    def settings(self) -> Config:
        """The configuration in force now."""
        return self.config or current_config()

    def begin(self) -> None:
        """At a model's first bucket: has this backward's errors raised from `loss.backward()`."""
        self._step += 1
        works = self._works = []  # of this backward: one that ended early leaves nothing behind
        queue = Variable._execution_engine.queue_callback
        try:
            # Queued from a callback, so that it runs behind DDP's own at the end of the backward.
            queue(lambda: queue(lambda: _raise_errors(works)))
            self._in_backward = True
        except RuntimeError:  # DDP's join() shadows the others' collectives without a backward
            self._in_backward = False

    def memory(self, bucket: dist.GradBucket) -> Memory:
        """Of a bucket's residual: it belongs to the parameters, however buckets are built."""
        parameters = bucket.parameters()
        for parameter in parameters:  # without a model, names are numbers in order of appearance
            self.names.setdefault(parameter, f"parameter {len(self.names)}")
        names = [self.names[parameter] for parameter in parameters]
        known = self._layouts.get(bucket.index())
        if known is None or known[0] != names:
            counts = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
            layout = _core.Layout(list(zip(names, counts, strict=True)))
            known = self._layouts[bucket.index()] = names, layout
        return Memory(self.store, known[1], self._step)

    def call_for(self, buffer: torch.Tensor, label: str) -> tuple[Call, str]:
        """The collective of a bucket, and why it goes plain ("" if it does not). One like an
        earlier one, which DDP sends at every step, is not looked at again."""
        group, config = resolve(self.group), self.settings()
        key = label, buffer.dtype, buffer.numel(), buffer.device, id(config), id(group)
        known = self._known.get(key)
        if known is not None:
            return known.again(buffer, group), ""
        call = Call("all_reduce", buffer, buffer, "avg", group, config, label)
        reason = call.decide()
        if not reason and call.choice is None:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[key] = call.again(None, None)  # of no tensor's memory, and of no group
        return call, reason

    def submit(self, call: Call) -> torch.futures.Future[torch.Tensor]:
        """Sends a bucket. In a backward a failed future holds NaN: DDP would lose its error."""
        work = call.submit(future_raises=not self._in_backward)
        self._works.append(work)
        return work.get_future()


def _raise_errors(works: list[Work]) -> None:
    for work in works:
        work.wait()


_default_states: weakref.WeakKeyDictionary[Any, CompressionState] = weakref.WeakKeyDictionary()


def compression_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: `ddp.register_comm_hook(None, cccl.torch.compression_hook)`.

    Averages the bucket over the group with the configured codecs and returns a future at once.
    `state` is None (default group, `cccl.configure`'s settings), a process group (as for PyTorch's
    own hooks), or a `CompressionState`. A failed collective raises its error from
    `loss.backward()`, and the gradients are NaN.
    """
    state = _state_of(state)
    if not state.attached:
        _stop_watching()
    if bucket.index() == 0:  # DDP sends buckets in this order
        state.begin()
    buffer = bucket.buffer()
    call, reason = state.call_for(buffer, f"bucket {bucket.index()}")
    if not reason:
        if call.config.remembers:
            call.memory = state.memory(bucket)
        observer = CompressionState.observer
        if observer is None:
            return state.submit(call)
        sent = observer(bucket)  # before it is overwritten
        return state.submit(call).then(lambda future: _observed(future, sent))
    plain = call.plainly(reason)
    if call.size == 1:
        plain.record(0.0)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
    begun = time.perf_counter()

    def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        plain.record(time.perf_counter() - begun)
        return future.value()[0]

    # As DDP without a hook, bit by bit: scaled first, so that half precision does not overflow.
    work = dist.all_reduce(buffer.mul_(1.0 / call.size), dist.ReduceOp.SUM, call.group, True)
    return work.get_future().then(finish)


def compress(
    model: DistributedDataParallel, config: Config | Mapping[str, Any] | None = None
) -> CompressionState:
    """Registers the hook on `model` for its own process group; returns the hook's state.

    Raises `ConfigError` if `model` is no DDP model or has a communication hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"compress() takes a DistributedDataParallel model, not {type(model).__name__}: "
            "wrap it first"
        )
    state = CompressionState(model.process_group, config)
    for name, parameter in model.module.named_parameters():
        state.names[parameter] = name
    try:
        model.register_comm_hook(state, compression_hook)
    except RuntimeError as error:
        raise ConfigError(
            "this model has a communication hook already, which stays in place: register only "
            f"one. ({error})"
        ) from error
    keep_for(model, state.store)
    return state


def _state_of(state: Any) -> CompressionState:
    if isinstance(state, CompressionState):
        return state
    if state is not None and not isinstance(state, dist.ProcessGroup):
        raise ConfigError(
            f"the hook's state is a {type(state).__name__}; allowed: None, a process group, or "
            "cccl.torch.CompressionState"
        )
    return _default_states.setdefault(resolve(state), CompressionState(state))


def _observed(future: torch.futures.Future[torch.Tensor], sent: Callable[[], None]) -> torch.Tensor:
    result = future.value()
    sent()
    return result


_watcher: Any = None


def attach(config: Config) -> None:
    """From `cccl.configure` on: DDP models without a hook get ours in their first forward pass."""
    global _watcher
    _stop_watching()
    if config.attach_ddp and config.compresses and "all_reduce" in config.collective_filter:
        _watcher = register_module_forward_pre_hook(_attach_to)


def _attach_to(module: torch.nn.Module, _inputs: Any) -> None:
    if not isinstance(module, DistributedDataParallel) or getattr(module, "_comm_hooks", None):
        return
    devices = {parameter.device.type for parameter in module.parameters()}
    if devices not in ({"cpu"}, {"cuda"}):
        kinds = ", ".join(sorted(devices))
        _log.warning("not compressing a DDP model on %s: CPU or CUDA only", kinds)
        return
    try:
        compress(module).attached = True
    except ConfigError:  # a hook of PyTorch's own, registered in C++
        return
    _log.info("DDP gradients go compressed with %s", current_config().compression_type)


def _stop_watching() -> None:
    """Who registers the hook needs no watching, which costs a little in every module's forward."""
    global _watcher
    if _watcher is not None:
        _watcher.remove()
        _watcher = None
