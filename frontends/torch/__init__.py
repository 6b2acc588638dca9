"""CCCL for PyTorch: a DDP communication hook and collectives on tensors."""

from ._collectives import all_gather, all_reduce, broadcast, reduce_scatter
from ._ddp import CompressionState, attach, compress, compression_hook
from ._work import Work

__all__ = [
    "CompressionState",
    "Work",
    "all_gather",
    "all_reduce",
    "attach",
    "broadcast",
    "compress",
    "compression_hook",
    "reduce_scatter",
]
