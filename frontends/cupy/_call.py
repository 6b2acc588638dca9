"""One collective on arrays: checked, then given to the core by address."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from .. import _core
from .._calls import GATHERED, REDUCING, check_pair, check_parts, settings_of
from .._config import Config
from .._policy import Choice, Policy
from .._rules import AUTO, PLAIN
from ..errors import ConfigError, NotCompressedError, UnsupportedError
from ._arrays import Memory, memory_of, stream_of
from ._auto import policy_of
from ._connections import Connection, Way

OPS = ("sum", "avg")
_IDENTITY = _core.make_codec("identity", {})


@dataclasses.dataclass
class Call:
    """What one rank does in a collective, a send or a receive."""

    collective: str
    array: Any
    out: Any  # None where a send begins
    config: Config
    label: str
    op: str = "sum"
    root: int = 0
    way: Way = None
    exact: bool = False  # whatever the configuration says

    def __post_init__(self) -> None:
        """Refuses before anything is sent what could not be sent right."""
        self.config = self.config.of(self.collective)
        self.where = f"{self.collective} {self.label!r}"
        self.source = memory_of(self.array, self.where, written=self.out is self.array)
        if self.out is None:
            self.target = Memory(0, 0, self.source.dtype, 0, self.source.device)
        elif self.out is self.array:
            self.target = self.source
        else:
            self.target = memory_of(self.out, self.where, written=True)
            self._check_pair()
        if self.op not in OPS:
            raise ConfigError(f"{self.where}: op = {self.op!r}; allowed: 'sum' or 'avg'")
        if self.reduces_integers and self.op == "avg":
            raise UnsupportedError(
                f"{self.where}: the mean of {self.source.dtype.name} would be rounded, and "
                "integers are never lossy; use op='sum', or pass array.astype(float)"
            )
        if self.reduces_integers and self.source.dtype.name == "bool":
            raise UnsupportedError(f"{self.where}: bools have no sum; pass array.astype(int)")

    @property
    def device(self) -> int | None:
        """Number of the GPU; None for the CPU."""
        return self.source.device

    @property
    def reduces(self) -> bool:
        """Whether it adds values up, and does not only move them."""
        return self.collective in REDUCING

    @property
    def reduces_integers(self) -> bool:
        """Which the core does not: its sums are of floats."""
        return self.reduces and not self.source.dtype.floating

    def check_parts(self, size: int, rank: int) -> None:
        """Whether input and output fit a group of that size."""
        whole, part = self.source, self.target
        if self.collective == "all_gather":
            whole, part = part, whole
        check_parts(self.where, self.collective, size, whole.numel, part.numel)
        if whole is not part and whole.meets(part):
            own = whole.address + (rank * part.nbytes if self.collective in GATHERED else 0)
            if part.address != own:
                raise UnsupportedError(
                    f"{self.where}: input and output share memory other than this rank's own part; "
                    "pass a copy of the input"
                )

    def start(self, found: Connection) -> Running:
        """Submits it, on a GPU behind the current stream's work."""
        codecs, choice, policy = self._decide(found)
        config, source, target = self.config, self.source, self.target
        part = min(source.numel, target.numel)
        stream = stream_of(self.device)
        begun = time.perf_counter()
        work = found.core.submit(
            self.collective, source.address, source.numel, target.address, target.numel,
            source.dtype.number, *codecs, average=self.op == "avg", root=self.root,
            counts=[part] * found.core.size if self.collective in GATHERED else [],
            raise_non_finite=config.non_finite == "raise", label=self.label,
            predicted=choice.predicted if choice else 0.0,
            alternative=choice.alternative if choice else 0.0,
            stream=stream.ptr if stream else 0, debug=config.debug, **settings_of(config),
        )  # fmt: skip
        if (
            policy is not None
            and choice is not None
            and stream is not None
            and policy.watches
            and not stream.is_capturing()
        ):
            policy.follow(choice, work, time.perf_counter() - begun)
        return Running(self, work, stream, choice, policy, begun)

    def _check_pair(self) -> None:
        source, target = self.source, self.target
        devices = [
            "the CPU" if memory.device is None else f"GPU {memory.device}"
            for memory in (source, target)
        ]
        check_pair(self.where, (devices[0], devices[1]), (self.array.dtype, self.out.dtype))
        if self.collective == "all_reduce" and source.numel != target.numel:
            raise ConfigError(
                f"{self.where}: the input has {self.array.size} values, the output "
                f"{self.out.size}; they must be equal"
            )

    def _decide(self, found: Connection) -> tuple[tuple[Any, Any], Choice | None, Policy | None]:
        """The codecs of both legs, and what chose them. What goes plain goes through the exact
        codec."""
        plain = _IDENTITY, _IDENTITY
        config, choice, policy = self.config, None, None
        if (
            self.exact
            or not config.compresses
            or self.collective not in config.collective_filter
            or not self.source.dtype.floating
        ):
            return plain, None, None
        if config.compression_type == AUTO:
            policy = policy_of(self, found)
            choice = policy.choose(max(self.source.nbytes, self.target.nbytes))
            if choice.codec == PLAIN:
                return plain, choice, policy
            config = config.candidates[choice.codec]
        assert config.codecs is not None
        for codec in config.codecs:
            if not codec.supports(self.source.dtype.number):
                if config.strict:
                    raise NotCompressedError(
                        f"{self.where}: codec {codec.name!r} does not take {self.source.dtype.name}"
                    )
                return plain, choice, policy
        return config.codecs, choice, policy


class Running:
    """A call that was submitted."""

    def __init__(
        self,
        call: Call,
        work: Any,
        stream: Any,
        choice: Choice | None,
        policy: Policy | None,
        begun: float,
    ):
        self.call, self._work, self._stream = call, work, stream
        self._choice, self._policy, self._begun = choice, policy, begun

    def wait(self) -> None:
        """The host waits on a CPU, the current stream on a GPU; raises what went wrong by then."""
        if self._stream is None:
            self._wait_on_host()
            return
        self._work.precede(self.call.device, self._stream.ptr)
        if self.call.config.non_finite == "raise" and not self._stream.is_capturing():
            self._wait_on_host()
        elif (known := self._work.error()) is not None:
            raise known

    def _wait_on_host(self) -> None:
        self._work.wait()
        if self._choice is not None and self._policy is not None and self._stream is None:
            self._policy.observe(self._choice, time.perf_counter() - self._begun)
