"""CCCL for CuPy: not in this version."""

raise ImportError(
    "cccl.cupy is not in this version, which compresses CPU arrays only; cccl.codec(...) takes "
    "NumPy arrays and anything with DLPack on a CPU"
)
