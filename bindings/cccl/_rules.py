"""What each setting may be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

from . import _core
from .errors import ConfigError

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_FILTERED = (*COLLECTIVES, "send")
OF_WEIGHTS = ("all_gather", "broadcast")
PLAIN = "none"
AUTO = "auto"
OFF = "off"
_UNITS = {"": 1, "B": 1, "KB": 1000, "KIB": 1 << 10, "MB": 10**6, "MIB": 1 << 20,
          "GB": 10**9, "GIB": 1 << 30}  # fmt: skip
SCHEDULE = "a list of [step, codec] or [step, codec, codec of the second leg], steps rising from 0"


def parse_bytes(value: int | str, key: str = "chunk_size") -> int:
    """1048576, "1MiB" or "1 MB" in bytes; `key` is named in errors."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in _UNITS:
        auto = "'auto', " if key == "chunk_size" else ""
        raise ConfigError(f"{key} = {value!r}; allowed: {auto}bytes, or a size as '2MiB'")
    return int(match[1]) * _UNITS[match[2].upper()]


def is_int(low: int) -> Callable[[Any], bool]:
    """A check for integers from `low`."""
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _one_of(*names: str) -> tuple[str, Callable[[Any], bool]]:
    return " or ".join(map(repr, names)), lambda v: isinstance(v, str) and v in names


def is_codec(value: Any) -> bool:
    """Whether a codec, or one within another, has that name or alias."""
    names = re.fullmatch(r"(\w+)(?:\((\w+)\))?", value) if isinstance(value, str) else None
    return names is not None and all(n in _codec_names() for n in names.groups() if n)


def _codec_names() -> list[str]:
    return [n for name, aliases in _core.codec_names().items() for n in (name, *aliases)]


def is_schedule(value: Any) -> bool:
    """Whether it is what `schedule` may be."""
    if not isinstance(value, tuple):
        return False
    for entry in value:
        if not isinstance(entry, tuple) or len(entry) not in (2, 3) or not is_int(0)(entry[0]):
            return False
        if not (entry[1] == PLAIN or is_codec(entry[1])):
            return False
        if len(entry) == 3 and (entry[1] == PLAIN or not is_codec(entry[2])):
            return False
    steps = [entry[0] for entry in value]
    return all(a < b for a, b in itertools.pairwise(steps))


def _are_hosts(value: Any) -> bool:
    """Lists of ranks, each in one."""
    if not isinstance(value, tuple) or not all(isinstance(host, tuple) and host for host in value):
        return False
    ranks = [rank for host in value for rank in host]
    return bool(ranks) and all(map(is_int(0), ranks)) and len({*ranks}) == len(ranks)


_CODECS = ", ".join([*_codec_names(), "sparse(<codec>)", "diff(<codec>)"])

# Of each field: what an error says is allowed, and the check.
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "compression_type": (f"{PLAIN}, {AUTO}, {_CODECS}",
                         lambda v: v in (PLAIN, AUTO) or is_codec(v)),
    "auto_codecs": (f"a list of {_CODECS.replace(', identity', '')}",
                    lambda v: isinstance(v, tuple) and len(v) > 0
                    and all(is_codec(c) and c != "identity" for c in v)),
    "weights_type": (f"{PLAIN}, {AUTO}, lossless, or another codec that loses nothing",
                     lambda v: v in (None, PLAIN, AUTO) or is_codec(v)),
    "result_type": (f"{_CODECS} (or leave it out)", lambda v: v is None or is_codec(v)),
    "block_size": ("a power of two from 32 to 1024",
                   lambda v: is_int(32)(v) and v <= 1024 and v & (v - 1) == 0),
    "rounding": _one_of("nearest", "stochastic"),
    "level": _one_of("fast", "best"),
    "rotation": _one_of("none", "hadamard"),
    "seed": ("an integer from 0 to 2^64 - 1", lambda v: is_int(0)(v) and v < 1 << 64),
    "collective_filter": (f"a list of {', '.join(_FILTERED)}",
                          lambda v: isinstance(v, tuple) and all(c in _FILTERED for c in v)),
    "sparsity_threshold": ("a number from 0 to 1", lambda v: isinstance(v, float) and 0 <= v <= 1),
    "top_k": ("a share of the values, more than 0 and at most 1",
              lambda v: v is None or (isinstance(v, float) and 0 < v <= 1)),
    "threshold": ("a finite magnitude, more than 0",
                  lambda v: v is None or (isinstance(v, float) and 0 < v < float("inf"))),
    "error_feedback": _one_of("none", "sender", "both"),
    "residual_type": _one_of("float32", "bfloat16", "block_float8"),
    "residual_decay": ("a number, more than 0 and at most 1",
                       lambda v: isinstance(v, float) and 0 < v <= 1),
    "rules": ("a list of tables, each with compression_type and conditions",
              lambda v: isinstance(v, tuple)),
    "start_step": ("an integer from 0", is_int(0)),
    "schedule": (SCHEDULE, is_schedule),
    "max_relative_error": ("a number, more than 0 and less than 1",
                           lambda v: v is None or (isinstance(v, float) and 0 < v < 1)),
    "target_bits": ("bits per value, more than 0 and at most 64",
                    lambda v: v is None or (isinstance(v, float) and 0 < v <= 64)),
    "max_noise_share": ("a number, more than 0 and at most 1",
                        lambda v: v is None or (isinstance(v, float) and 0 < v <= 1)),
    "adaptive_codecs": (f"a list of {_CODECS}",
                        lambda v: isinstance(v, tuple) and len(v) > 0 and all(map(is_codec, v))),
    "measure_every": ("an integer from 2", is_int(2)),
    "spike_factor": ("a number, more than 1",
                     lambda v: v is None or (isinstance(v, float) and 1 < v < float("inf"))),
    "spike_type": (f"{PLAIN}, {_CODECS}", lambda v: v == PLAIN or is_codec(v)),
    "spike_steps": ("an integer from 1", is_int(1)),
    "chunk_size": ("'auto', or 4096 bytes to 1024 GiB, as an integer or as '2MiB'",
                   lambda v: v == "auto" or (isinstance(v, int | str) and not isinstance(v, bool)
                                             and 4096 <= parse_bytes(v) <= 1 << 40)),
    "window": ("'auto', or an integer from 1 to 64",
               lambda v: v == "auto" or (is_int(1)(v) and v <= 64)),
    "algorithm": _one_of("auto", "two_shot", "one_shot"),
    "hierarchy": ("'off', 'auto', ranks per host, or a list of each host's ranks",
                  lambda v: v in (OFF, AUTO) or is_int(1)(v) or _are_hosts(v)),
    "checksum": ("true or false", _is_bool),
    "non_finite": _one_of("propagate", "raise"),
    "strict": ("true or false", _is_bool),
    "deadline": ("seconds, more than 0 and at most 31 days",
                 lambda v: v is None or (isinstance(v, float) and 0 < v <= 31 * 24 * 3600)),
    "min_size": ("bytes, as an integer from 0 or as '16KiB'",
                 lambda v: isinstance(v, int | str) and not isinstance(v, bool)
                 and parse_bytes(v, "min_size") >= 0),
    "nccl_lanes": ("an integer from 1 to 8", lambda v: is_int(1)(v) and v <= 8),
    "nccl_max_ctas": ("an integer from 0 to 64", lambda v: is_int(0)(v) and v <= 64),
    "peer_memory": _one_of("auto", "off"),
    "debug": ("true or false", _is_bool),
    "attach_ddp": ("true or false", _is_bool),
}  # fmt: skip


def _to_float(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else value


def to_tuples(value: Any) -> Any:
    """Lists, and those within them, as tuples, which can be hashed."""
    return tuple(map(_to_tuple, value)) if isinstance(value, list | tuple) else value


def _to_tuple(value: Any) -> Any:
    if isinstance(value, set):
        return tuple(sorted(value))  # a set's order differs from rank to rank
    return tuple(value) if isinstance(value, list) else value


CONVERT: dict[str, Callable[[Any], Any]] = {
    "auto_codecs": _to_tuple,
    "collective_filter": _to_tuple,
    "hierarchy": to_tuples,
    "sparsity_threshold": _to_float,
    "top_k": _to_float,
    "threshold": _to_float,
    "residual_decay": _to_float,
    "spike_factor": _to_float,
    "max_relative_error": _to_float,
    "target_bits": _to_float,
    "max_noise_share": _to_float,
    "adaptive_codecs": _to_tuple,
    "schedule": to_tuples,
    "deadline": _to_float,
}
