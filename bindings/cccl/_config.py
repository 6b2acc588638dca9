"""What the user may set, checked when it is set."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _core
from ._by_parameter import Rule, rules_of
from ._checks import check
from ._rules import (
    AUTO,
    COLLECTIVES,
    CONVERT,
    OF_WEIGHTS,
    OFF,
    PLAIN,
    RULES,
    parse_bytes,
    to_tuples,
)
from ._sources import environment, nearest, read_toml
from ._ways import Ways, ways_of, with_rule
from .errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of compressed collectives. `configure` and `Config.load` take what is left out from
    `CCCL_<FIELD>` in the environment, then from the defaults here.

    Raises `ConfigError` that names the key, the value and what is allowed.
    """

    compression_type: str = "block_float8"
    """Codec, by name or alias, also within another as in "sparse(block_float8)"; "none" to send
    everything plain; or "auto": whichever is faster for each collective, dtype and size, plain or
    one of `auto_codecs`, measured at first use."""

    result_type: str | None = None
    """Codec of the second leg, from a shard's owner to everyone; None: the same."""

    auto_codecs: tuple[str, ...] = ("block_float8",)
    """What "auto" may choose beside plain. No 4-bit codec unless it is named here."""

    block_size: int = 128
    """Values that share a scale in block_float codecs: a power of two from 32 to 1024."""

    rounding: str = "nearest"
    """"nearest", or "stochastic": unbiased, keyed by seed and element position."""

    level: str = "fast"
    """Encoder effort: "fast", or "best" (searches scales at 4 bits and fewer; `lossless` counts
    all exponents; same format and decoder)."""

    rotation: str = "none"
    """"none", or "hadamard": block_float codecs spread each block's outliers over the block before
    they round, with random signs drawn from the seed. On CPUs."""

    seed: int = 0
    """Of stochastic rounding and rotation in the first leg; the second is keyed by the
    collective's number."""

    collective_filter: tuple[str, ...] = ("all_reduce", "reduce_scatter")
    """Collectives that go as `compression_type` says; the others as `weights_type`, or plain.
    "send" is `cccl.cupy`'s send, recv and exchange."""

    weights_type: str | None = None
    """How all_gather and broadcast go where `collective_filter` does not name them: "none", plain;
    "lossless", or another codec that loses nothing; "auto", whichever is faster, plain or lossless,
    measured at first use. None: "auto" if `compression_type` is, else plain."""

    rules: tuple[Rule, ...] = ()
    """Other codecs for some parameters of DDP models, by name, dimensions or size, or for one
    collective. A list of tables; the first that matches holds. docs/policy.md explains them."""

    start_step: int = 0
    """Steps of a DDP or FSDP2 model before this one go plain."""

    schedule: tuple[Any, ...] = ()
    """From each step on, another `compression_type` of what no rule is of: a list of [step, codec]
    or [step, codec, codec of the second leg]. Of DDP and FSDP2 models."""

    max_relative_error: float | None = None
    """More than 0 and less than 1: a DDP bucket goes through the narrowest of `adaptive_codecs`
    whose relative error (norm of the error over norm of the values) was at most this where it was
    measured last, else as `compression_type`. None: all go as `compression_type`."""

    target_bits: float | None = None
    """In its place: codecs such that all buckets together take at most so many bits per value, with
    the smallest error."""

    max_noise_share: float | None = None
    """In their place, more than 0 and at most 1: each bucket takes, leg by leg, as few bits as keep
    the squared error of the result within this share of the mean's noise: the variance between
    ranks over their number, as the owners of its shards measure it. Without noise:
    `compression_type`."""

    adaptive_codecs: tuple[str, ...] = (
        "block_float3", "block_float4", "block_float5", "block_float6",
    )  # fmt: skip
    """What these may choose beside `compression_type`, which must be wider than all of them."""

    measure_every: int = 32
    """Steps from one measurement to the next. Buckets then go as `compression_type`."""

    spike_factor: float | None = None
    """More than 1: after a step of a DDP model whose largest mean gradient is not finite, or so
    many times the usual, `spike_steps` steps go as `spike_type`, and residuals are forgotten. None:
    no step is looked at."""

    spike_type: str = "none"
    """Codec of the steps after a spike; "none" for plain."""

    spike_steps: int = 10
    """How many these are."""

    sparsity_threshold: float = 0.5
    """Share of zeros, from 0 to 1, above which `sparse` leaves zeros out if that saves bytes."""

    top_k: float | None = None
    """Share of the values, more than 0 and at most 1, that `sparse` keeps: the largest of every
    2048. None: all."""

    threshold: float | None = None
    """Magnitude below which `sparse` drops values, more than 0. None: it drops none."""

    error_feedback: str = "none"
    """What a codec loses is kept and added to the same tensor's next values: "sender" of what each
    rank loses, "both" of what the owner of a shard loses of the mean too, or "none". Of DDP's and
    FSDP2's hooks and of collectives with a label, in all_reduce and reduce_scatter, on CPUs.
    docs/feedback.md says when it helps."""

    residual_type: str = "bfloat16"
    """How that is kept: "float32", "bfloat16" or "block_float8". Two of each value: the one that a
    step begins with lasts until the step is known to be sound."""

    residual_decay: float = 1.0
    """Factor of what is kept before it is added: more than 0 and at most 1."""

    chunk_size: int | str = "auto"
    """Bytes of values per pipeline chunk, all ranks' shards together ("2MiB"), or "auto". Never
    changes a result."""

    window: int | str = "auto"
    """Chunks between posting a transfer and waiting for it, or "auto"."""

    algorithm: str = "auto"
    """"two_shot", "one_shot" (small tensors) or "auto". Never changes a result."""

    hierarchy: str | int | tuple[tuple[int, ...], ...] = OFF
    """"off"; or how `cccl.torch` knows which ranks share a host, to go plain inside and compressed
    between hosts: "auto" by the launcher's variables, then by host names; a number of ranks per
    host; or a list of each host's ranks, [[0, 1], [2, 3]]. docs/hierarchy.md has more."""

    checksum: bool = True
    """Checksums over payloads on the wire."""

    non_finite: str = "propagate"
    """What an Inf or NaN in a gradient does: "propagate" as NaN, or "raise" `NonFiniteError`, on
    every rank (in reduce_scatter on the one whose part it is)."""

    strict: bool = False
    """Raise `NotCompressedError` where something that should be compressed would go plain."""

    deadline: float | None = None
    """Seconds that a wait for a peer may take; None: the process group's timeout, or
    the communicator's `deadline`."""

    min_size: int | str = "16KiB"
    """Tensors of fewer bytes go plain where the process-group backend cannot tell a gradient from a
    loss or a count. Hooks and `cccl.torch`'s collectives take any size."""

    nccl_lanes: int = 2
    """NCCL communicators that carry a group's transfers in turn, so that one's begin while
    another's end; equal on all ranks. Those of a group's first use count."""

    nccl_max_ctas: int = 0
    """Thread blocks (multiprocessors) that each of these may take; 0: NCCL's own choice."""

    peer_memory: str = "auto"
    """Where all GPUs of a group reach each other's memory by NVLink, "auto" has kernels read
    payloads there, without NCCL; "off": never. Of codecs whose payloads have a fixed size, in
    all_reduce, reduce_scatter and all_gather. What a group's first use says counts."""

    debug: bool = False
    """On a GPU, wait for and check each step of the pipeline: an error then names it. Slow."""

    attach_ddp: bool = True
    """Compress DistributedDataParallel models that register no hook of their own. Looking for them
    makes every module's forward pass about a microsecond longer."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            value = rules_of(value) if field.name == "rules" else value
            value = CONVERT.get(field.name, lambda v: v)(value)
            object.__setattr__(self, field.name, value)
            allowed, accepts = RULES[field.name]
            if not accepts(value):
                raise ConfigError(f"{field.name} = {value!r}; allowed: {allowed}")
        named = [name for way in ways_of(self) for name in way]
        for name in (*self.auto_codecs, self.spike_type, *named):
            self.codec(name)
        check(self)

    @property
    def is_adaptive(self) -> bool:
        """Whether a budget chooses codecs."""
        budgets = self.max_relative_error, self.target_bits, self.max_noise_share
        return any(budget is not None for budget in budgets)

    @functools.cached_property
    def feedback(self) -> _core.FeedbackSettings | None:
        """Settings of error feedback; None where there is none."""
        if self.codecs is None or self.error_feedback == "none":
            return None
        first, second = self.codecs
        owner = self.error_feedback == "both" and not second.lossless
        return _core.FeedbackSettings(
            not first.lossless, owner, self.residual_type, self.residual_decay
        )

    def codec(self, name: str | None) -> _core.Codec | None:
        """The core's codec of that name with this configuration's options; None for plain."""
        if name in (None, PLAIN, AUTO):
            return None
        codec = _core.make_codec(name, {})
        options: dict[str, float | int | str] = {}
        if "block_size" in codec.spec:
            options["block_size"] = self.block_size
            options["rounding"] = self.rounding
        if "level" in codec.spec or "block_size" in codec.spec:
            options["level"] = self.level
        if codec.name == "sparse":
            options["sparsity_threshold"] = self.sparsity_threshold
            options |= {} if self.top_k is None else {"top_k": self.top_k}
            options |= {} if self.threshold is None else {"threshold": self.threshold}
        if "block_size" in codec.spec or codec.name in ("sparse", "diff"):
            options["rotation"] = self.rotation
        return _core.make_codec(name, options) if options else codec

    def of(self, collective: str) -> Config:
        """The settings of one collective. A rule gives it its own, `weights_type` those of
        weights."""
        if self._by_collective and (found := self._by_collective.get(collective)) is not None:
            return found
        if collective not in OF_WEIGHTS or collective in self.collective_filter:
            return self
        return self._of_weights

    @functools.cached_property
    def _by_collective(self) -> dict[str, Config]:
        own = {r.collective: r for r in reversed(self.rules) if r.collective}
        return {name: with_rule(self, rule) for name, rule in own.items()}

    @functools.cached_property
    def ways(self) -> Ways | None:
        """How parameters go at a step; None where that depends on neither."""
        return Ways(self) if Ways.needed(self) else None

    def reaches(self, collective: str) -> bool:
        """Whether anything of that collective may go compressed, at any step."""
        config = self.of(collective)
        ways = {way.compression_type for way in ways_of(config)}
        return collective in config.collective_filter and ways != {PLAIN}

    @functools.cached_property
    def _of_weights(self) -> Config:
        kind = self.weights_type or (AUTO if self.compression_type == AUTO else PLAIN)
        if kind == PLAIN:
            return self
        return dataclasses.replace(
            self, compression_type=kind, weights_type=kind, result_type=None,
            auto_codecs=("lossless",), collective_filter=OF_WEIGHTS, error_feedback="none",
            rules=(), start_step=0, schedule=(), spike_factor=None,
            max_relative_error=None, target_bits=None, max_noise_share=None,
            hierarchy=OFF if kind == AUTO else self.hierarchy,
        )  # fmt: skip

    @functools.cached_property
    def codecs(self) -> tuple[_core.Codec, _core.Codec] | None:
        """Of the two legs; None for "none" and "auto"."""
        first = self.codec(self.compression_type)
        if first is None:
            return None
        second = self.codec(self.result_type)
        return first, second or first

    @property
    def remembers(self) -> bool:
        """Whether ranks keep something of tensors between steps."""
        return self.feedback is not None or any(c.predicts for c in self.codecs or ())

    @functools.cached_property
    def candidates(self) -> dict[str, Config]:
        """What "auto" chooses from beside plain: of each codec, this configuration with it named;
        empty if the compression type is another."""
        if self.compression_type != AUTO:
            return {}
        names = self.auto_codecs
        return {name: dataclasses.replace(self, compression_type=name) for name in names}

    @functools.cached_property
    def candidate_specs(self) -> str:
        """What decides how long the candidates take; equal where they take equally long."""
        parts = [f"chunk {self.chunk_size}, window {self.window}, {self.algorithm}"]
        parts += [] if self.checksum else ["no checksum"]
        for config in self.candidates.values():
            parts.append(" -> ".join(dict.fromkeys(codec.spec for codec in config.codecs or ())))
        return "; ".join(parts)

    @functools.cached_property
    def compresses(self) -> bool:
        """Whether anything that no rule is of may go compressed."""
        return self.codecs is not None or bool(self.candidates)

    @functools.cached_property
    def is_off(self) -> bool:
        """Whether no collective goes compressed."""
        return not any(self.of(collective).compresses for collective in COLLECTIVES)

    @property
    def unused(self) -> list[str]:
        """Settings that were changed and that no codec named here takes."""
        named = f"{[*ways_of(self)]} {self.auto_codecs}"
        fields = [] if "sparse" in named else ["sparsity_threshold", "top_k", "threshold"]
        fields += [] if self.feedback else ["residual_type", "residual_decay"]
        defaults = type(self).__dataclass_fields__
        return [name for name in fields if getattr(self, name) != defaults[name].default]

    @property
    def chunk_bytes(self) -> int:
        """Bytes per chunk; 0 for "auto"."""
        return 0 if self.chunk_size == "auto" else parse_bytes(self.chunk_size)

    @functools.cached_property
    def min_bytes(self) -> int:
        """Bytes of `min_size`."""
        return parse_bytes(self.min_size, "min_size")

    @property
    def window_chunks(self) -> int:
        """Chunks; 0 for "auto"."""
        return 0 if self.window == "auto" else int(self.window)

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
        """From a dict, a Config, the path of a TOML file (keys at top level or in `[cccl]`), or
        the environment alone."""
        if isinstance(source, Config):
            return source
        if source is None:
            values: dict[str, Any] = {}
        elif isinstance(source, Mapping):
            values = dict(source)
        elif isinstance(source, str | os.PathLike):
            values = read_toml(Path(source))
        else:
            raise ConfigError(
                f"configuration of type {type(source).__name__}; allowed: dict, Config, TOML path"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown key {key!r}{nearest(key, known)}")
        _core.codec_threads()  # refuses what the environment may not say
        return cls(**{**environment(cls), **values})


def loaded(config: Any) -> Config:
    """`Config.load` for settings of one call: a dict like an earlier one is read only once."""
    if not isinstance(config, dict):
        return Config.load(config)
    values = {k: to_tuples(v) if isinstance(v, list) else v for k, v in config.items()}
    try:
        return _load_items(tuple((k, type(v), v) for k, v in values.items()))
    except TypeError:  # a value that cannot be hashed, which `load` may refuse
        return Config.load(config)


@functools.lru_cache(maxsize=256)
def _load_items(items: tuple[tuple[str, type, Any], ...]) -> Config:
    return Config.load({key: value for key, _, value in items})


_configured: Config | None = None
_default: Config | None = None


def configure(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, **settings: Any
) -> Config:
    """Sets the process's configuration: a dict, a `Config`, a TOML path, or keywords.

    A DistributedDataParallel model that registers no hook of its own is compressed from its first
    forward pass on (`attach_ddp`). Raises `ConfigError`, and then changes nothing.
    """
    from . import _attach

    global _configured
    if settings:
        base = {} if config is None else config
        if isinstance(base, Config):
            base = dataclasses.asdict(base)
        elif isinstance(base, str | os.PathLike):
            base = read_toml(Path(base))
        elif not isinstance(base, Mapping):
            base = dataclasses.asdict(Config.load(base))  # which refuses it
        config = {**base, **settings}
    _configured = Config.load(config)
    _attach.attach(_configured)
    return _configured


def current_config() -> Config:
    """What `configure` set last; before that, the defaults and the environment."""
    global _default
    if _configured is not None:
        return _configured
    if _default is None:
        _default = Config.load(None)
    return _default


def is_configured() -> bool:
    """Whether `configure` was called in this process."""
    return _configured is not None
