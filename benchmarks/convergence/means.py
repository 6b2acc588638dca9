"""From all ranks' gradients to the mean that each of them would hold, by variant."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from legs import Legs, legs_of
from torch import Tensor, nn
from variants import Variant

import cccl
from cccl._budget import Budget, Key, Sample, bits_of, pieces_of
from cccl._ways import Way, with_way

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, as DDP has them
_ALIGNED = 64  # values between buckets


class Place(NamedTuple):
    """Of a parameter's gradient among all."""

    name: str
    parameter: nn.Parameter
    first: int

    def within(self, flat: Tensor) -> Tensor:
        """Its part of a flat tensor, in its shape."""
        part = flat[self.first : self.first + self.parameter.numel()]
        return part.view(self.parameter.shape)


class Layout:
    """Where gradients lie: in DDP's buckets, which begin with the last parameters."""

    def __init__(self, model: nn.Module, bucket_bytes: int = BUCKET):
        named = list(model.named_parameters())[::-1]
        limits = [min(FIRST_BUCKET, bucket_bytes), bucket_bytes]
        cut, _ = dist._compute_bucket_assignment_by_size([p for _, p in named], limits)
        self.places: list[Place] = []
        self.buckets: list[slice] = []
        self.size, self.numel = 0, sum(p.numel() for _, p in named)
        for bucket in cut:
            begin = end = self.size
            for i in bucket:
                self.places.append(Place(*named[i], end))
                end += named[i][1].numel()
            self.buckets.append(slice(begin, end))
            self.size = -(-end // _ALIGNED) * _ALIGNED

    def name_of(self, bucket: int) -> str:
        """Its first parameter's."""
        begin = self.buckets[bucket].start
        return next(place.name for place in self.places if place.first == begin)


class Mean(Protocol):
    """Between the ranks' gradients (a row each) and the optimizer."""

    def __call__(self, step: int, gradients: Tensor, out: Tensor) -> float:
        """Writes the mean of a step; bits per value sent, as the mean of both legs."""


def mean_of(variant: Variant, layout: Layout, gradients: Tensor) -> Mean:
    """For gradients like these."""
    if variant.kind == "plain":
        return _plain
    if variant.kind == "bf16":
        return _bf16
    if variant.kind == "powersgd":
        return PowerSGD(layout, gradients)
    config = cccl.Config(**variant.settings)
    if variant.kind == "noise":
        return NoiseBudget(config, variant.share, layout, gradients)
    if config.is_adaptive:
        return _Budget(config, layout, gradients)
    return _Coded(config, layout, gradients)


def _plain(step: int, gradients: Tensor, out: Tensor) -> float:
    """In the order of the ranks, divided once: as codec `identity`."""
    torch.add(gradients[0], gradients[1], out=out)
    for row in gradients[2:]:
        out.add_(row)
    out.div_(len(gradients))
    return 32.0


def _bf16(step: int, gradients: Tensor, out: Tensor) -> float:
    """torch's bf16_compress_hook: cast, divided, added in bfloat16."""
    parts = gradients.to(torch.bfloat16).div_(len(gradients))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    out.copy_(total)
    return 16.0


class _Coded:
    """The same codecs for all buckets and steps."""

    def __init__(self, config: cccl.Config, layout: Layout, gradients: Tensor):
        self._layout = layout
        self._legs = [legs_of(config, gradients[:, bucket]) for bucket in layout.buckets]

    def __call__(self, step: int, gradients: Tensor, out: Tensor) -> float:
        count, bits = len(self._legs), 0.0
        for i, (bucket, legs) in enumerate(zip(self._layout.buckets, self._legs, strict=True)):
            bits += legs(gradients[:, bucket], out[bucket], step * count + i)
        return bits / self._layout.numel


class _Choosing:
    """A codec for each bucket and step."""

    def __init__(self, config: cccl.Config, layout: Layout, gradients: Tensor):
        self._config, self._layout, self._gradients = config, layout, gradients
        self._legs: dict[tuple[int, str], Legs] = {}

    def _send(self, step: int, bucket: int, codec: str, gradients: Tensor, out: Tensor) -> float:
        if (bucket, codec) not in self._legs:
            config = with_way(self._config, Way(codec, self._config.result_type))
            self._legs[bucket, codec] = legs_of(config, gradients)
        sequence = step * len(self._layout.buckets) + bucket
        return self._legs[bucket, codec](gradients, out, sequence)


class _Budget(_Choosing):
    """`max_relative_error` and `target_bits`, by the code that decides in DDP."""

    def __init__(self, config: cccl.Config, layout: Layout, gradients: Tensor):
        super().__init__(config, layout, gradients)
        self._budget, self._samples = Budget(), dict[Key, Sample]()

    def __call__(self, step: int, gradients: Tensor, out: Tensor) -> float:
        measures = self._budget.begin(self._samples, step, self._config)
        self._samples, bits = {}, 0.0
        for i, bucket in enumerate(self._layout.buckets):
            mean = out[bucket]
            key = i, self._layout.name_of(i), mean.numel()
            chosen = None if measures else self._budget.choice(key)
            codec = chosen or self._config.compression_type
            bits += self._send(step, i, codec, gradients[:, bucket], mean)
            if measures:
                pieces, size, stride = pieces_of(mean.numel())
                values = mean.as_strided((pieces, size), (stride, 1), mean.storage_offset())
                self._samples[key] = Sample(mean.numel(), values.cpu().numpy())
        return bits / self._layout.numel


class NoiseBudget(_Choosing):
    """Each bucket through the narrowest codec whose result errs, as a sum of squares over the
    bucket, by at most `share` of the mean's noise: the variance between ranks over their number.

    Both are measured on all values of the simulated ranks, when and as often as a budget measures;
    in these steps the buckets go as `compression_type`.
    """

    def __init__(self, config: cccl.Config, share: float, layout: Layout, gradients: Tensor):
        super().__init__(config, layout, gradients)
        self._share = share
        # What bits_of needs beside the codecs is a budget of any kind.
        budget = cccl.Config(
            compression_type=config.compression_type, adaptive_codecs=config.adaptive_codecs,
            target_bits=8.0,
        )  # fmt: skip
        self._codecs = list(bits_of(budget))
        self._choices: list[str] = [config.compression_type] * len(layout.buckets)

    def __call__(self, step: int, gradients: Tensor, out: Tensor) -> float:
        every = self._config.measure_every
        measures = step % every == 0 or (step < every and step & (step - 1) == 0)
        bits = 0.0
        for i, bucket in enumerate(self._layout.buckets):
            rows = gradients[:, bucket]
            if measures:
                self._choices[i] = self._narrowest(step, i, rows)
            codec = self._config.compression_type if measures else self._choices[i]
            bits += self._send(step, i, codec, rows, out[bucket])
        return bits / self._layout.numel

    def _narrowest(self, step: int, bucket: int, rows: Tensor) -> str:
        exact = rows.mean(0)
        # In float64 and in one pass: a codec is found by the quotient of two sums.
        noise = rows.var(0).sum(dtype=torch.float64) / len(rows)
        tried = torch.empty_like(exact)
        for codec in self._codecs[:-1]:
            self._send(step, bucket, codec, rows, tried)
            error = (tried - exact).square().sum(dtype=torch.float64)
            if float(error) <= self._share * float(noise):
                return codec
        return self._codecs[-1]


class PowerSGD:
    """torch's powerSGD_hook with its defaults, but for the rank and the step that it begins at.

    All that ranks exchange is linear in their values: it is enough to know the mean of what they
    send and the mean of what each keeps.
    """

    def __init__(
        self, layout: Layout, gradients: Tensor, rank: int = 4, begin: int = 10, rate: float = 2.0
    ):
        self._layout, self._begin = layout, begin
        self._error = gradients.new_zeros(layout.size)
        self._shapes: list[list[Place]] = []  # matrices of one bucket and shape
        self._qs: list[Tensor] = []
        sent, random = 0, np.random.RandomState(0)
        for bucket in layout.buckets:
            of_shape: dict[torch.Size, list[Place]] = {}
            for place in layout.places:
                if not bucket.start <= place.first < bucket.stop:
                    continue
                n, m = place.parameter.flatten(1).shape if place.parameter.dim() > 1 else (1, 1)
                most = min(n, m, rank)
                if place.parameter.dim() > 1 and (n + m) * most * rate < n * m:
                    of_shape.setdefault(torch.Size((n, m)), []).append(place)
                    sent += (n + m) * most
                else:
                    sent += place.parameter.numel()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(random.randint(1_000_000_000))
                for (n, m), places in of_shape.items():
                    first = [torch.randn(1, m, min(n, m, rank)) for _ in places]
                    self._qs.append(torch.cat(first).to(gradients.device))
                    self._shapes.append(places)
        self._bits = 32.0 * sent / layout.numel

    def __call__(self, step: int, gradients: Tensor, out: Tensor) -> float:
        _plain(step, gradients, out)
        if step < self._begin:
            return 32.0
        wanted = out.add_(self._error).clone()
        for i, places in enumerate(self._shapes):
            matrices = torch.stack([place.within(wanted).flatten(1) for place in places])
            p = torch.linalg.qr(matrices @ torch.linalg.qr(self._qs[i])[0])[0]
            self._qs[i] = matrices.transpose(1, 2) @ p
            found = p @ self._qs[i].transpose(1, 2)
            for place, matrix in zip(places, found, strict=True):
                place.within(out).copy_(matrix.view(place.parameter.shape))
        torch.sub(wanted, out, out=self._error)
        return self._bits
