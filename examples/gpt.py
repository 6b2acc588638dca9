"""A small byte-level GPT: pre-norm transformer blocks over learned positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


class Size(NamedTuple):
    """Shape of a model, and of the batches that each rank trains it on."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, context=64, batch=4),
    "small": Size(layers=2, width=384, heads=6, context=64, batch=6),
    "medium": Size(layers=4, width=512, heads=8, context=128, batch=4),
    "large": Size(layers=12, width=768, heads=12, context=256, batch=4),
}


def device_of_group() -> torch.device:
    """A GPU where the process group is NCCL's, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """Predicts each next byte."""

    def __init__(self, size: Size):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.head = nn.Sequential(
            nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)
        )
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte; both int64 of shape (batch, length)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = self.head(self.blocks(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
