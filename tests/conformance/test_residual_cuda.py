"""Error feedback on a CUDA device: the payloads, and the residuals, of a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from codec_cases import DTYPES, FLOATS, LOSSY, Case, encode, guarded, narrow, widen
from hypothesis import given
from hypothesis import strategies as st
from inputs import finite_values, make

from cccl import _core

pytestmark = pytest.mark.skipif(
    not _core.cuda_device_count(),
    reason="no CUDA device" if _core.cuda_built() else "a build without CUDA",
)
TYPES = ("float32", "bfloat16", "block_float8")
ON_CUDA = [case.on("cpu") for case in LOSSY if case.device == "cuda"]
ON_BOTH = ON_CUDA or LOSSY
each_codec = pytest.mark.parametrize("case", ON_BOTH, ids=str)
each_dtype = pytest.mark.parametrize("dtype", FLOATS)
each_type = pytest.mark.parametrize("type", TYPES)


def kept_bytes(type: str, count: int, seed: int, scale: float = 0.1) -> bytes:
    """A residual of that many values, as an earlier step may have left it."""
    values = (np.random.default_rng(seed).standard_t(3, count) * scale).astype(np.float32)
    if type == "float32":
        return values.tobytes()
    if type == "bfloat16":
        return narrow(values.astype(np.float64), "bfloat16").tobytes()
    return encode(_core.make_codec("block_float8", {}), values, "float32")[64:]


def run(
    core: Any, raw: np.ndarray, dtype: str, type: str, kept: bytes, *, count: int = 0,
    first: int = 0, decay: float = 1.0, seed: int = 0, offset: int = 0, payloads: Any = (),
    first_core: Any = None,
) -> tuple[bytes, bytes]:  # fmt: skip
    """The payload and the new residual, of `raw` or of the mean of payloads."""
    number, count = DTYPES[dtype][0], count or raw.size
    before = guarded(core, len(kept), 0, kept)
    after = guarded(core, len(kept), 0, bytes(len(kept)))
    memory = _core.Residual(type, before.address, after.address, count, first, decay)
    out = guarded(core, core.max_encoded_bytes(raw.size, number), offset)
    queue, codec = getattr(core, "queue", None), getattr(core, "codec", core)
    place = (out.address, out.nbytes, raw.size, number, seed, memory, queue)
    if payloads:
        sources = [guarded(core, len(payload), 0, payload) for payload in payloads]
        size = _core.reduce_encode_corrected(
            getattr(first_core, "codec", first_core), [s.address for s in sources],
            len(payloads[0]), float(len(payloads)), codec, *place,
        )  # fmt: skip
    else:
        source = guarded(core, raw.nbytes, offset, raw.tobytes())
        size = _core.encode_corrected(
            codec, source.address, raw.size, number, out.address, out.nbytes, seed, memory, queue
        )
    if queue is not None:
        queue.synchronize()
        if not core.fixed_size:
            size = _core.header_of(out.address, out.nbytes, queue)["bytes"]
    for part in (out, before, after):
        part.check()
    assert before.bytes.tobytes() == kept, "changed the former residual"
    return out.bytes[:size].tobytes(), after.bytes.tobytes()


def assert_same(case: Case, raw: np.ndarray, dtype: str, type: str, kept: bytes, **more: Any):
    expected = run(case.core, raw, dtype, type, kept, **more)
    assert run(case.on("cuda").core, raw, dtype, type, kept, **more) == expected
    return expected


@each_type
@each_dtype
@each_codec
def test_every_kernel_once(case, dtype, type):
    """F110: short enough to run under compute-sanitizer."""
    rng = np.random.default_rng(6)
    for n, offset in ((0, 0), (1, 0), (3072 + 77, 0), (1024 + 333, 1)):
        raw = make("heavy", n, dtype, rng)
        payload, _ = assert_same(
            case, raw, dtype, type, kept_bytes(type, n, n), decay=0.9, seed=1, offset=offset
        )
        assert len(payload) >= 64


@each_dtype
@each_codec
@given(data=st.data(), seed=st.integers(0, 2**32), decay=st.sampled_from([1.0, 0.9, 0.5]))
def test_values_of_any_kind_leave_the_same_residual(case, dtype, data, seed, decay):
    raw = data.draw(finite_values(dtype, max_size=5000))
    for type in TYPES:
        kept = kept_bytes(type, raw.size, seed)
        assert_same(case, raw, dtype, type, kept, decay=decay, seed=seed)


@each_type
@each_dtype
@each_codec
def test_parts_of_a_residual_leave_the_others_alone(case, dtype, type):
    """What is encoded is a chunk of a tensor, and its residual a part of the tensor's."""
    rng, count = np.random.default_rng(3), 9000
    kept = kept_bytes(type, count, 5)
    for first, n in (
        (128, 1024),
        (2048, 4096 + 130),
        (384, 77),
        (count - count % 128, count % 128),
    ):
        raw = make("normal", n, dtype, rng)
        assert_same(case, raw, dtype, type, kept, count=count, first=first, seed=2)
    if type != "block_float8":
        raw = make("normal", 2500, dtype, rng)
        assert_same(case, raw, dtype, type, kept, count=count, first=1001, seed=2)


@each_type
@each_dtype
@each_codec
def test_means_of_payloads_and_what_was_lost_of_them(case, dtype, type):
    """The second leg, with each kind of first leg: what readers take is rounded to the dtype."""
    n, rng = 4096 + 321, np.random.default_rng(4)
    raws = [make(kind, n, dtype, rng) for kind in ("normal", "heavy", "ties")]
    for first in (case, Case("identity", {}), Case("lossless", {}), Case("block_float4", {})):
        payloads = [encode(first.core, raw, dtype, seed=1) for raw in raws]
        most = max(map(len, payloads))
        payloads = [payload.ljust(most, b"\0") for payload in payloads]
        found = [
            run(
                where.core, raws[0], dtype, type, kept_bytes(type, n, 8), decay=0.5, seed=3,
                payloads=payloads, first_core=origin.core,
            )
            for where, origin in ((case, first), (case.on("cuda"), first.on("cuda")))
        ]  # fmt: skip
        assert found[0] == found[1], str(first)


@each_type
@each_dtype
@each_codec
def test_values_that_are_not_finite_make_the_same_payload(case, dtype, type):
    """F009: the residual then is not kept (test_gpu_feedback.py)."""
    n = 3000
    kept = kept_bytes(type, n, 1)
    for value in (np.nan, -np.nan, np.inf, -np.inf, -0.0, 65519.0, 65520.0, -3.4e38, 1e300):
        raw = narrow(np.random.default_rng(2).normal(size=n), dtype)
        raw[n // 2] = narrow(np.array([value]), dtype)[0]
        with np.errstate(all="ignore"):
            cpu = run(case.core, raw, dtype, type, kept)
            cuda = run(case.on("cuda").core, raw, dtype, type, kept)
        assert cuda[0] == cpu[0], value
        if np.isfinite(widen(raw, dtype)).all():
            assert cuda[1] == cpu[1], value
