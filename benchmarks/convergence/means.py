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
from cccl._budget import Budget, Key, Noise, Sample, pieces_of
from cccl._by_parameter import Way
from cccl._ways import with_way

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


class _Budget:
    """Codecs for each bucket and step, by the code that decides in DDP."""

    def __init__(self, config: cccl.Config, layout: Layout, gradients: Tensor):
        self._config, self._layout = config, layout
        self._budget, self._samples = Budget(), dict[Key, Sample]()
        self._legs: dict[tuple[int, Way], Legs] = {}

    def __call__(self, step: int, gradients: Tensor, out: Tensor) -> float:
        measures = self._budget.begin(self._samples, step, self._config)
        own = Way(self._config.compression_type, self._config.result_type)
        self._samples, bits, count = {}, 0.0, len(self._layout.buckets)
        for i, bucket in enumerate(self._layout.buckets):
            rows, mean = gradients[:, bucket], out[bucket]
            key = i, self._layout.name_of(i), mean.numel()
            way = (None if measures else self._budget.choice(key)) or own
            if (i, way) not in self._legs:
                self._legs[i, way] = legs_of(with_way(self._config, way), rows)
            bits += self._legs[i, way](rows, mean, step * count + i)
            if measures:
                self._samples[key] = self._sample(rows, mean)
        return bits / self._layout.numel

    def _sample(self, rows: Tensor, mean: Tensor) -> Sample:
        """What ranks keep of a mean. Owners of shards measure its noise on a part of the values,
        decoded; here it is that of all."""
        pieces, size, stride = pieces_of(mean.numel())
        values = mean.as_strided((pieces, size), (stride, 1), mean.storage_offset())
        noise = None
        if self._config.max_noise_share is not None:
            exact = rows.mean(0)
            found = (rows.var(0).mean(), exact.square().mean(), (exact == 0).float().mean())
            noise = Noise(*(float(value) for value in found), len(rows))
        return Sample(mean.numel(), values.cpu().numpy(), noise)


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
