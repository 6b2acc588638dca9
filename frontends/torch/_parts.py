"""Sends DDP buckets whose parameters go different ways, in as few collectives as that allows.

Large stretches go where they lie, as soon as DDP hands their bucket over. Small parameters of all
buckets go together behind the last: DDP needs no result before that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from .._bucket_plan import Part, Plan, Together, Values, joined
from .._budget import Key, Sample, noise_of, pieces_of
from ._call import DTYPES_OF_TORCH
from ._streams import current_stream
from ._tensors import real
from ._work import is_capturing

if TYPE_CHECKING:
    from ._ddp import CompressionState

Future: TypeAlias = "torch.futures.Future[torch.Tensor]"
Kind: TypeAlias = tuple[int, torch.dtype, torch.device]  # of small ones: configuration's id, ...


class _Bucket(NamedTuple):
    """One that is under way."""

    plan: Plan
    buffer: torch.Tensor
    small: dict[Kind, list[torch.Tensor]]  # of each kind: places in the bucket
    copies: dict[Kind, torch.Tensor]  # and their values
    futures: list[Future]  # of its stretches
    result: Future
    stream: torch.cuda.Stream | None  # that its copies are made on


class _Seen(NamedTuple):
    """A few values of a result, on whatever stream they were made."""

    values: torch.Tensor
    ready: torch.cuda.Event | None

    @classmethod
    def of(cls, values: torch.Tensor) -> _Seen:
        event = current_stream(values.device).record_event() if values.is_cuda else None
        return cls(values, event)

    def on_host(self) -> torch.Tensor:
        if self.ready is not None:
            self.ready.synchronize()
        return self.values.cpu()


class Parts:
    """Of a model's backward."""

    def __init__(self) -> None:
        self._waiting: list[_Bucket] = []
        self._largest: list[_Seen] = []
        self._samples: dict[Key, tuple[int, _Seen]] = {}
        self.noisy: dict[Key, tuple[Any, int]] = {}  # the core's work, among how many ranks
        self._plans: list[Plan] = []  # that `_together` is of
        self._together: dict[Kind, Together] = {}

    def begin(self) -> tuple[list[float], dict[Key, Sample]]:
        """At a backward: one that ended early leaves nothing behind. The largest values of the last
        one's buckets, and samples of them, as far as they were looked at; nothing where a CUDA
        graph is captured, for which the host cannot wait."""
        self._waiting.clear()
        largest, samples, self._largest, self._samples = self._largest, self._samples, [], {}
        noisy, self.noisy = self.noisy, {}
        seen = [*largest, *(sample for _, sample in samples.values())]
        if seen and is_capturing(seen[0].values):
            return [], {}
        noises = {key: noise_of(*noisy[key]) for key in samples if key in noisy}
        return [one.on_host().item() for one in largest], {
            key: Sample(total, one.on_host().numpy(), noises.get(key))
            for key, (total, one) in samples.items()
        }

    def look_at(self, future: Future) -> Future:
        """The same bucket, once it is known how large its values are."""

        def look(done: Future) -> torch.Tensor:
            bucket = done.value()
            self._largest.append(_Seen.of(torch.linalg.vector_norm(real(bucket), math.inf)))
            return bucket

        return future.then(look)

    def sample(self, future: Future, part: Part, key: Key) -> Future:
        """The same bucket, once some values of a part of it are kept."""

        def keep(done: Future) -> torch.Tensor:
            bucket = done.value()
            values = real(bucket[part.begin : part.end]).view(-1)
            pieces, size, stride = pieces_of(values.numel())
            chosen = values.as_strided((pieces, size), (stride, 1))
            kept = chosen.new_empty((pieces, size), dtype=torch.float32).copy_(chosen)
            self._samples[key] = values.numel(), _Seen.of(kept)
            return bucket

        return future.then(keep)

    def send(
        self, state: CompressionState, plan: Plan, buffer: torch.Tensor, measured: Key | None
    ) -> Future:
        """Sends the stretches of a bucket. The future is done when all of it is back."""
        places = buffer.split(plan.counts)
        small: dict[Kind, list[torch.Tensor]] = {}
        for i in plan.small:
            small.setdefault(_kind(plan, i, buffer), []).append(places[i])
        copies = {kind: torch.cat(chosen) for kind, chosen in small.items()}
        apart = [places[i] for part in plan.parts for i in part.apart]
        if apart:
            torch._foreach_zero_(apart)
        futures = [
            state.send(buffer[p.begin : p.end], p, measured if p is plan.free else None)
            for p in plan.parts
        ]
        result: Future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        stream = current_stream(buffer.device) if buffer.is_cuda else None
        bucket = _Bucket(plan, buffer, small, copies, futures, result, stream)
        if small:
            self._waiting.append(bucket)
        else:
            _finish(state, bucket, {}, [])
        return result

    def send_small(self, state: CompressionState) -> None:
        """Behind the last bucket: the small parameters of all."""
        buckets, self._waiting = self._waiting, []
        if not buckets:
            return
        if self._plans != [bucket.plan for bucket in buckets]:
            self._plan(buckets)
        for bucket in buckets:
            if bucket.stream is not None:
                _be_behind(bucket.stream, bucket.copies)
        sent, futures = {}, []
        for kind, together in self._together.items():
            copies = [b.copies[kind] for b in buckets if kind in b.copies]
            sent[kind] = torch.cat(copies) if len(copies) > 1 else copies[0]
            futures.append(state.send(sent[kind], together))
        first = dict.fromkeys(sent, 0)
        for bucket in buckets:
            results = {}
            for kind, copy in bucket.copies.items():
                results[kind] = sent[kind].narrow(0, first[kind], copy.numel())
                first[kind] += copy.numel()
            _finish(state, bucket, results, futures)

    def _plan(self, buckets: list[_Bucket]) -> None:
        self._plans = [bucket.plan for bucket in buckets]
        self._together = joined(
            (bucket.plan, i, _kind(bucket.plan, i, bucket.buffer), reals_of(bucket.buffer))
            for bucket in buckets
            for i in bucket.plan.small
        )


def values_of(buffer: torch.Tensor) -> Values:
    """What its values are."""
    dtype = DTYPES_OF_TORCH.get(buffer.dtype, DTYPES_OF_TORCH[torch.float32]).number
    name = str(buffer.dtype).removeprefix("torch.")
    return Values(name, dtype, buffer.element_size(), reals_of(buffer))


def reals_of(buffer: torch.Tensor) -> int:
    """Values of the core in each of its values."""
    return 2 if buffer.is_complex() else 1


def _be_behind(stream: torch.cuda.Stream, tensors: dict[Kind, torch.Tensor]) -> None:
    """Has the current stream wait for tensors of another one: DDP may call hooks on several."""
    current = current_stream(stream.device)
    if current != stream:
        current.wait_stream(stream)
        for tensor in tensors.values():
            tensor.record_stream(current)


def _kind(plan: Plan, number: int, buffer: torch.Tensor) -> Kind:
    return id(plan.configs[number]), buffer.dtype, buffer.device


def _finish(
    state: CompressionState,
    bucket: _Bucket,
    results: dict[Kind, torch.Tensor],
    futures: list[Future],
) -> None:
    """Puts the results of a bucket's small parameters back once all that it needs is there."""
    needed = [*bucket.futures, *futures]

    def put_back() -> torch.Tensor:
        for kind, result in results.items():
            places = bucket.small[kind]
            torch._foreach_copy_(places, result.split([place.numel() for place in places]))
        return bucket.buffer

    if bucket.buffer.is_cuda:
        _finish_on_stream(state, bucket, results, needed, put_back)
        return

    def done(all_done: torch.futures.Future[list[Any]]) -> None:
        try:
            all_done.value()
            bucket.result.set_result(put_back())
        except Exception as error:
            bucket.result.set_exception(error)

    torch.futures.collect_all(needed).add_done_callback(done)


def _finish_on_stream(
    state: CompressionState,
    bucket: _Bucket,
    results: dict[Kind, torch.Tensor],
    needed: list[Future],
    put_back: Callable[[], torch.Tensor],
) -> None:
    """Where the last collective ends, behind the others: the caller's stream goes on meanwhile."""
    buffer = bucket.buffer
    stream = current_stream(buffer.device)
    if not is_capturing(buffer):
        stream = state.last_stream(buffer)
        for tensor in (buffer, *results.values()):
            tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        for future in needed:
            future.wait()
        bucket.result.set_result(put_back())
