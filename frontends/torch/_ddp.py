"""DistributedDataParallel: gradients go compressed while the backward goes on."""

import functools
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

from .._bucket_plan import Decision, Layouts, Part, Plans, Together
from .._budget import Key
from .._config import Config, current_config
from .._history import History
from .._names import Names
from .._state import Memory
from .._steps import Steps
from ..errors import ClosedError, ConfigError
from ._call import Call
from ._groups import communicator, existing, generation_of, resolve
from ._parts import Parts, reals_of, values_of
from ._state import StateStore, keep_for
from ._work import Work, is_capturing

_log = logging.getLogger("cccl")
_MOST_KNOWN = 1024  # kinds of buckets


class CompressionState:
    """State of the hook: the group and the configuration (None: that of `cccl.configure`).

    `model`: the DDP model, or the one within, where rules go by name. `step`: how many steps are
    done already, where training goes on from a checkpoint; the same on all ranks.
    """

    # Looks at each bucket before it is sent; what it gives takes the result, and returns it.
    observer: ClassVar[Callable[[dist.GradBucket], Callable[[Any], Any]] | None] = None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        config: Config | Mapping[str, Any] | None = None,
        *,
        model: torch.nn.Module | None = None,
        step: int = 0,
    ):
        self._group = None if group is None else weakref.ref(group)
        self.config = None if config is None else Config.load(config)
        self.attached = False  # by `cccl.configure`, not by the user
        self.store = StateStore(functools.partial(_alive, self._group))  # of error feedback
        self.names = Names(WeakIdKeyDictionary)
        self._layouts = Layouts()
        self._steps = Steps(step)
        self._works: list[Work] = []
        self._known: dict[Any, Call] = {}
        self._plans = Plans(self.names)
        self._parts = Parts()
        self._in_backward = False
        if model is not None:
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            self.names.add(inner.named_parameters(remove_duplicate=False))
            if ways := self.settings().of("all_reduce").ways:
                self.names.check(ways)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: the default group."""
        return _alive(self._group)

    @property
    def step(self) -> int:
        """Steps begun: backward passes that sent gradients. Save it with the model, and set it, or
        give it to `compress` or `CompressionState`, where training goes on from there."""
        return self._steps.next

    @step.setter
    def step(self, step: int) -> None:
        self._steps.next = step

    def settings(self) -> Config:
        """The configuration in force now."""
        return self.config or current_config()

    def decisions(self) -> list[Decision]:
        """How each parameter goes since the last step; empty where neither rules nor steps decide
        on that."""
        return self._plans.decisions(self._steps)

    @property
    def history(self) -> History:
        """What a budget chose for each bucket, measurement by measurement."""
        return self._steps.history

    def begin(self) -> None:
        """At a model's first bucket: has this backward's errors raised from `loss.backward()`."""
        config = self.settings().of("all_reduce")
        if self._steps.begin(*self._parts.begin(), generation_of(self.group), config):
            self.store.reset()
        works = self._works = []  # of this backward: one that ended early leaves nothing behind
        queue = Variable._execution_engine.queue_callback
        try:
            # Queued from a callback, so that it runs behind DDP's own at the end of the backward.
            queue(lambda: queue(lambda: _raise_errors(works)))
            self._in_backward = True
        except RuntimeError:  # DDP's join() shadows the others' collectives without a backward
            self._in_backward = False

    def send_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sends a bucket, in parts where its parameters go different ways."""
        buffer, config = bucket.buffer(), self.settings().of("all_reduce")
        if config.ways is None:
            layout = self._layout(bucket) if config.remembers else None
            return self.send(buffer, Together(config, f"bucket {bucket.index()}", layout))
        group = resolve(self.group)
        if group is None or group.size() == 1:
            return self.send(buffer, Together(config, f"bucket {bucket.index()}", None))
        key = bucket.index(), self.names.of(bucket.parameters()[0]), buffer.numel()

        def agree(fields: dict[str, str]) -> None:
            communicator(group, buffer.device, self.settings()).agree(fields)

        plan = self._plans.of(
            bucket.index(), bucket.parameters(), values_of(buffer), config.ways, self._steps,
            (id(group), buffer.device), self._steps.choice(key), agree,
        )  # fmt: skip
        noisy = config.max_noise_share and self._steps.measures and not is_capturing(buffer)
        measured = key if noisy else None
        if len(plan.parts) == 1 and not plan.small:
            (part,) = plan.parts
            future = self.send(buffer, part, measured if part is plan.free else None)
        else:
            future = self._parts.send(self, plan, buffer, measured)
        if bucket.is_last():
            self._parts.send_small(self)
        if is_capturing(buffer) or buffer.layout is not torch.strided:
            return future
        if plan.free is not None and self._steps.measures:
            future = self._parts.sample(future, plan.free, key)
        return self._parts.look_at(future) if config.spike_factor else future

    def _layout(self, bucket: dist.GradBucket) -> Any:
        """Of a bucket's residual."""
        named = [(self.names.of(p), p.numel() * reals_of(p)) for p in bucket.parameters()]
        return self._layouts.of(bucket.index(), named)

    def send(
        self, tensor: torch.Tensor, part: Part | Together, measured: Key | None = None
    ) -> torch.futures.Future[torch.Tensor]:
        """Averages a bucket or a part of one, in place: compressed, or plain for a reason.
        `measured`: the bucket whose noise is to be that of this."""
        call, reason = self._call_for(tensor, part.label, part.config)
        if not reason:
            if call.config.remembers:
                call.memory = Memory(self.store, part.layout, self._steps.now + 1)
            call.measures_noise = measured is not None
            future = self._submit(call)
            if measured is not None:
                self._parts.noisy[measured] = self._works[-1]._core, call.size
            return future
        plain = call.plainly(reason)
        if call.size == 1:
            plain.record(0.0)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(tensor)
            return done
        on_host, clock, begun = not tensor.is_cuda, plain.clock(tensor), time.perf_counter()

        def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            # On a GPU at once, on a stream that waits for the work.
            plain.record(time.perf_counter() - begun, whole=on_host, clock=clock)
            return future.value()[0]

        # As DDP without a hook, bit by bit: scaled first, so that half precision does not overflow.
        work = dist.all_reduce(tensor.mul_(1.0 / call.size), dist.ReduceOp.SUM, call.group, True)
        return work.get_future().then(finish)

    def last_stream(self, buffer: torch.Tensor) -> torch.cuda.Stream:
        """Of the collectives on a GPU: the one where the last of this backward ends."""
        group = resolve(self.group)
        assert group is not None
        streams = communicator(group, buffer.device, self.settings()).streams
        last = self._works[-1]._core.stream if self._works else 0
        return streams.get(last) or next(iter(streams.values()))

    def _call_for(self, buffer: torch.Tensor, label: str, config: Config) -> tuple[Call, str]:
        """The collective, and why it goes plain ("" if it does not). One like an earlier one,
        which DDP sends at every step, is not looked at again."""
        found, group = existing(self.group, buffer.device)
        if found is None:
            group = resolve(self.group)
        size = 0 if group is None else group.size()
        key = label, buffer.dtype, buffer.numel(), buffer.device, id(config), id(group), size
        known = self._known.get(key) if found is not None else None
        if known is not None:
            return known.again(buffer, group), ""
        call = Call("all_reduce", buffer, buffer, "avg", group, config, label)
        reason = call.decide()
        if not reason and call.choice is None:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[key] = call.again(None, None)  # of no tensor's memory, and of no group
        return call, reason

    def _submit(self, call: Call) -> torch.futures.Future[torch.Tensor]:
        """Sends it. In a backward a failed future holds NaN: DDP would lose its error."""
        work = call.submit(future_raises=not self._in_backward)
        self._works.append(work)
        return work.get_future()


def _alive(reference: Any) -> dist.ProcessGroup | None:
    """The group that a weak reference is to; None: the default group."""
    if reference is None:
        return None
    group: dist.ProcessGroup | None = reference()
    if group is None:
        raise ClosedError("the process group of this communication hook was destroyed")
    return group


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
    observer = CompressionState.observer
    if observer is None:
        return state.send_bucket(bucket)
    observed = observer(bucket)  # before it is overwritten
    return state.send_bucket(bucket).then(lambda future: observed(future.value()))


def compress(
    model: DistributedDataParallel,
    config: Config | Mapping[str, Any] | None = None,
    *,
    step: int = 0,
) -> CompressionState:
    """Registers the hook on `model` for its own process group; returns the hook's state.

    `step`: how many steps are done already, where training goes on from a checkpoint.

    Raises `ConfigError` if `model` is no DDP model or has a communication hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"compress() takes a DistributedDataParallel model, not {type(model).__name__}: "
            "wrap it first"
        )
    state = CompressionState(model.process_group, config, model=model, step=step)
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


_watcher: Any = None


def attach(config: Config) -> None:
    """From `cccl.configure` on: DDP models without a hook get ours in their first forward pass."""
    global _watcher
    _stop_watching()
    if config.attach_ddp and config.reaches("all_reduce"):
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
