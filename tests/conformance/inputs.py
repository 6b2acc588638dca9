"""Values that codecs meet in the field and values made to break them."""

from __future__ import annotations

import numpy as np
import reference
from codec_cases import SIZES, narrow, storage, unsigned, widen
from hypothesis import strategies as st

KINDS = ("bits", "normal", "heavy", "denormal", "huge", "constant", "zeros", "spike", "ties",
         "sparse")  # fmt: skip


def finite_only(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Infs and NaNs become the largest value of their sign."""
    bits = raw.view(unsigned(dtype)).copy()
    exponent = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80,
                "float64": 0x7FF0000000000000}[dtype]  # fmt: skip
    wide = bits.dtype.type
    largest = wide(exponent - 1)
    sign = wide(1 << (8 * bits.itemsize - 1))
    bad = (bits & wide(exponent)) == wide(exponent)
    bits[bad] = (bits[bad] & sign) | largest
    return bits.view(storage(dtype))


def make(kind: str, n: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """`n` finite values as raw bits of `dtype`."""
    word = unsigned(dtype)
    if kind == "bits":
        raw = rng.integers(0, 1 << (8 * word.itemsize), n, word, endpoint=False)
        return finite_only(raw.view(storage(dtype)), dtype)
    if kind == "denormal":
        mantissa = {"float32": 23, "float16": 10, "bfloat16": 7, "float64": 52}[dtype]
        bits = rng.integers(0, 1 << mantissa, n, word)
        bits |= rng.integers(0, 2, n, word) << word.type(8 * word.itemsize - 1)
        return bits.view(storage(dtype))
    largest = {"float16": 65504.0}.get(dtype, 3.3e38)
    values = {
        "normal": lambda: rng.standard_normal(n),
        "heavy": lambda: rng.standard_t(1.5, n).clip(-1e4, 1e4) * 10.0 ** rng.integers(-6, 1, n),
        "huge": lambda: rng.uniform(-largest, largest, n),
        "constant": lambda: np.full(n, rng.standard_normal()),
        "zeros": lambda: np.zeros(n),
        "spike": lambda: np.where(np.arange(n) == rng.integers(0, max(n, 1)), 100.0, 1e-4),
        "sparse": lambda: rng.standard_normal(n) * (rng.random(n) < rng.choice([0.3, 0.1, 0.003])),
        "ties": lambda: rng.integers(-256, 257, n) / 2.0,
    }[kind]()
    return finite_only(narrow(values, dtype), dtype)


@st.composite
def finite_values(draw: st.DrawFn, dtype: str, max_size: int = 2500) -> np.ndarray:
    """One kind of data, with up to four values replaced by arbitrary bit patterns."""
    sizes = st.sampled_from([s for s in SIZES if s <= max_size]) | st.integers(0, max_size)
    n = draw(sizes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    raw = make(draw(st.sampled_from(KINDS)), n, dtype, rng)
    if n:
        bits = raw.view(unsigned(dtype)).copy()
        top = (1 << (8 * bits.itemsize)) - 1
        edits = st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, top)), max_size=4)
        for at, pattern in draw(edits):
            bits[at] = pattern
        raw = finite_only(bits.view(storage(dtype)), dtype)
    assert np.isfinite(widen(raw, dtype)).all()
    return raw


def hardly_shorter(dtype: str, **options: str) -> np.ndarray:
    """Blocks that `lossless` makes a few bytes shorter, or cannot. In each, one more value may
    have any exponent."""
    shift = {"bfloat16": 7, "float16": 10, "float32": 23}[dtype]
    rng, model = np.random.default_rng(1), reference.model("lossless", options, dtype)
    places = rng.permutation(model.block)
    exponents = rng.integers(0, 32 if dtype == "float16" else 256, model.block)

    def block(irregular: int) -> bytes:
        chosen = np.where(places < irregular, exponents, 9) << shift
        return chosen.astype(unsigned(dtype)).tobytes()

    kept = next(n for n in range(0, model.block, 8) if model._block(block(n)) == block(n))
    return np.frombuffer(b"".join(block(n) for n in range(kept - 24, kept + 9)), storage(dtype))
