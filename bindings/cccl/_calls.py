"""What is the same of one collective in every frontend. Knows no framework."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _core
from ._policy import Choice, Policy
from ._stats import plain_bytes
from .errors import ConfigError, Error, TransportError, UnsupportedError

if TYPE_CHECKING:
    from ._config import Config

REDUCING = ("all_reduce", "reduce_scatter")
GATHERED = ("reduce_scatter", "all_gather")


def why_plain(config: Config, collective: str, size: int) -> str:
    """Why a collective goes plain whatever its values are; "" if it may go compressed."""
    if size == 1:
        return "world size 1"
    if not config.compresses:
        return "compression_type none"
    if config.codecs and all(codec.name == "identity" for codec in config.codecs):
        return "identity"
    return "" if collective in config.collective_filter else "not in collective_filter"


def check_parts(where: str, collective: str, size: int, whole: int, part: int) -> None:
    """Whether the values of input and output, `whole` being the larger, fit a group of that size.
    Raises `ConfigError`."""
    if collective in GATHERED and whole != size * part:
        name = "input" if collective == "reduce_scatter" else "output"
        raise ConfigError(
            f"{where}: the {name} has {whole} values; for {size} ranks with {part} each it must "
            f"have {size * part}"
        )


def check_pair(where: str, devices: tuple[Any, Any], dtypes: tuple[Any, Any]) -> None:
    """Whether input and output are alike; raises `UnsupportedError`."""
    if devices[0] != devices[1]:
        raise UnsupportedError(
            f"{where}: input is on {devices[0]}, output on {devices[1]}; they must be on the same "
            "device"
        )
    if dtypes[0] != dtypes[1]:
        raise UnsupportedError(
            f"{where}: input is {dtypes[0]}, output {dtypes[1]}; they must be the same"
        )


def check_built_for_gpu(where: str) -> None:
    """Raises `UnsupportedError` in a build without CUDA code. `where`: what is on which GPU."""
    if not _core.cuda_built():
        raise UnsupportedError(
            f"{where}, and this build of cccl has no CUDA code. Install one that has (python -m "
            "cccl doctor says what this one is), or build with CCCLIB_CUDA=ON"
        )


def settings_of(config: Config) -> dict[str, Any]:
    """What the core's `submit` takes of a configuration, whatever is sent."""
    return {
        "chunk_bytes": config.chunk_bytes, "window": config.window_chunks,
        "algorithm": config.algorithm, "seed": config.seed, "checksum": config.checksum,
        "deadline": config.deadline,
    }  # fmt: skip


def fields_of_plain(collective: str, dtype: str, count: int, op: str, root: int) -> dict[str, str]:
    """What ranks compare of a call that goes plain."""
    return {
        "collective": collective,
        "dtype": dtype,
        "count": str(count),
        "op": op if collective in REDUCING else "none",
        "root": str(root),
        "codecs": "plain",
    }


class PlainRow:
    """Counts calls that go plain for one reason, and tells whether a like one is decided alike."""

    def __init__(
        self, label: str, collective: str, dtype: str, reason: str, size: int, count: int,
        nbytes: int, choice: Choice | None = None, policy: Policy | None = None,
    ):  # fmt: skip
        """Of a call of `count` values, on one of `size` ranks; `choice`: of compression_type
        "auto"."""
        self._choice, self._policy = choice, policy
        # Whether a like call is decided alike.
        self.again: Callable[[], bool] = lambda: True
        if policy is not None and choice is not None:
            self.again = functools.partial(policy.again, choice, policy.table)
        self._names = label, collective, reason
        times = (choice.predicted, choice.alternative) if choice else (0.0, 0.0)
        self._stats = _core.PlainStats(
            label, collective, dtype, reason, size, count, nbytes,
            plain_bytes(collective, nbytes, size), *times,
        )  # fmt: skip

    def record(
        self, seconds: float, *, whole: bool = True, clock: Any = None, work: Any = None
    ) -> None:
        """Counts a call; `whole`: it has ended, and did not just begin. `clock`: a frontend's
        `Timed` that ends behind it or, if that is still under way, behind its `work`."""
        self._stats.record(seconds)
        if self._policy is None or self._choice is None:
            return
        if clock is not None:
            clock.end(work)
            self._policy.follow(self._choice, clock, seconds)
        elif whole:
            self._policy.observe(self._choice, seconds)

    def refusal(self, error: Exception, what: str) -> Error:
        """To raise where the backend refused `what`: a dtype and an operation."""
        lost = ("gloo/transport", "onnection", "NCCL")
        kind = TransportError if any(word in str(error) for word in lost) else UnsupportedError
        label, collective, reason = self._names
        return kind(
            f"{collective} {label!r} went plain ({reason}), and the backend refused {what}: {error}"
        )


class Ended:
    """Stands in for the core's work where there was nothing to do, or it did not begin."""

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def wait(self, timeout: float | None = None) -> bool:
        if self._failure is not None:
            raise self._failure
        return True

    def done(self) -> bool:
        return True

    def error(self) -> Exception | None:
        return self._failure
