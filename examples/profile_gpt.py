"""The demo's GPT for `python -m cccl profile examples/profile_gpt.py:make_step`."""

from __future__ import annotations

from collections.abc import Callable

import corpus
import torch
import torch.distributed as dist
from gpt import GPT, SIZES, device_of_group
from torch.nn.parallel import DistributedDataParallel


def make_step() -> Callable[[], None]:
    """A step of training, with whatever compression is configured."""
    size, device = SIZES["small"], device_of_group()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(GPT(size).to(device), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    text, _ = corpus.load()
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        batch = corpus.sample(text, size.batch, size.context, generator)
        loss = ddp(*(part.to(device) for part in batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
