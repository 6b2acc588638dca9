"""CCCL for CuPy: compressed collectives of CuPy arrays over NCCL, and of NumPy arrays over sockets.

Neither torch nor, for NumPy arrays, CuPy is needed. docs/cupy.md is the guide.
"""

from ._communicator import Communicator

__all__ = ["Communicator"]
