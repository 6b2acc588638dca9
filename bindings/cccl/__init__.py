"""CCCL: compressed gradients on their way through collectives.

`cccl.configure` sets what is compressed and how; `cccl.torch` brings it to PyTorch;
`cccl.codec` gives the codecs to anyone; `cccl.stats` and `cccl.report` say what happened.
"""

from . import _core, errors
from ._codec import Codec, Payload, codec, codec_names, decode
from ._config import Config, configure, current_config
from ._stats import report, reset_stats, stats
from .errors import (
    ClosedError,
    ConfigError,
    CorruptPayloadError,
    DeadlineError,
    DeviceError,
    Error,
    MismatchError,
    NonFiniteError,
    NotCompressedError,
    PeerAbortedError,
    TransportError,
    UnsupportedError,
)

__version__: str = _core.version

__all__ = [
    "ClosedError",
    "Codec",
    "Config",
    "ConfigError",
    "CorruptPayloadError",
    "DeadlineError",
    "DeviceError",
    "Error",
    "MismatchError",
    "NonFiniteError",
    "NotCompressedError",
    "Payload",
    "PeerAbortedError",
    "TransportError",
    "UnsupportedError",
    "codec",
    "codec_names",
    "configure",
    "current_config",
    "decode",
    "errors",
    "report",
    "reset_stats",
    "stats",
]
