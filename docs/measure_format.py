"""Why the block formats are as they are: the error of each choice on real gradients.

    python docs/measure_format.py --input tests/data/gradients.npz

Prints NMSE = sum((decoded - x)^2) / sum(x^2) for each block size, scheme and width, and the largest
error as a share of its block's extreme. Checks that "ours" is what cccl decodes, bit for bit;
what is rotated is what cccl decodes.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np

import cccl

Array = np.ndarray
F = np.float32
WIDTHS = (2, 3, 4, 5, 6, 8)
SEARCHED = (2, 3, 4)
BLOCKS = (32, 64, 128, 256, 512, 1024)
LEVELS = np.float32([-127, -97, -77, -61, -47, -33, -21, -10, 0, 12, 23, 35, 49, 65, 84, 107])
CUTS = 128 + np.floor((LEVELS[1:] + LEVELS[:-1]) / 2)
# What is printed, the rule of the scale, how it is rounded, and the level of cccl that does so.
SCHEMES = (
    ("symmetric codes, float32 scale", "symmetric", "float32", None),
    ("signed scale, float32", "signed", "float32", None),
    ("signed, half a step, float32", "half step", "float32", None),
    ("signed, half a step for the extreme too", "half step, extreme", "float32", None),
    ("signed, half a step, power of two up", "half step", "power of two", None),
    ("signed, half a step, bfloat16 nearest", "half step", "nearest", None),
    ("ours: signed, half a step, bfloat16 up", "half step", "up", "fast"),
    ("ours, level best", "search", "up", "best"),
    ("ours, rotated", "rotated", "up", "fast"),
    ("ours, rotated, level best", "rotated", "up", "best"),
)


def round_scale(scale: Array, how: str) -> Array:
    """Positive float32 scales as the format holds them; 0 where one is too small."""
    bits = scale.astype(F).view(np.uint32)
    if how == "up":
        bits = (bits + 0xFFFF) >> 16 << 16
    elif how == "nearest":
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    elif how == "power of two":
        bits = (bits + 0x7FFFFF) >> 23 << 23
    return bits.view(F)


def over(x: Array, scale: Array) -> Array:
    """x / scale as the encoder computes it: times a reciprocal, lifted where that overflows."""
    lift = np.where(np.abs(scale) < F(2.0**-100), F(2.0**64), F(1))
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, F(0), F(1) / (scale * lift)).astype(F)
    return (x * lift) * inverse


def squared_error(x: Array, decoded: Array, extreme: Array) -> Array:
    """Of each block, relative to its extreme, in the encoder's order of summation."""
    with np.errstate(divide="ignore"):
        lift = np.where(extreme > F(2.0**-120), F(1) / extreme, F(2.0**120)).astype(F)
    squares = ((x - decoded) * lift) ** 2
    sums = np.zeros((len(x), 32), F)
    for first in range(0, x.shape[1], 32):
        sums += squares[:, first : first + 32]
    while sums.shape[1] > 1:
        sums = sum(np.split(sums, 2, axis=1))
    return sums


def search(x: Array, bits: int, extreme: Array, opposite: Array, sign: Array) -> Array:
    """The better of two scales, the first of equals; at 4 bits with the codebook."""
    half = 1 << (bits - 1)
    reaching = np.maximum(extreme * F(1 / half), opposite * (F(1) / F(half - 0.5)))
    if bits == 4:
        reaching = np.maximum(extreme * (F(1) / F(127)), opposite * (F(0.97) / F(107)))
    best, least = np.zeros_like(x), np.full_like(extreme, np.inf)
    for clip in (F(1), F({4: 0.92, 3: 0.8, 2: 0.65}[bits])):
        scale = round_scale(reaching * clip, "up") * sign
        if bits == 4:
            linear = np.clip(np.rint(over(x, scale)) + 128, 0, 255)
            decoded = LEVELS[np.searchsorted(CUTS, linear)] * scale
        else:
            decoded = np.clip(np.rint(over(x, scale)), -half, half - 1) * scale
        error = squared_error(x, decoded, extreme)
        best, least = np.where(error < least, decoded, best), np.minimum(error, least)
    return best


def code(x: Array, bits: int, rule: str, rounding: str) -> Array:
    """Blocks (rows of `x`), encoded and decoded."""
    half = 1 << (bits - 1)
    top = np.maximum(x.max(axis=1, keepdims=True), 0)
    bottom = np.maximum(-x.min(axis=1, keepdims=True), 0)
    extreme, opposite = np.maximum(top, bottom), np.minimum(top, bottom)
    sign = np.where(top > bottom, F(-1), F(1))
    if rule == "search":
        return search(x, bits, extreme, opposite, sign)
    if rule == "symmetric":
        scale = extreme / F(half - 1)
    elif rule == "signed":
        scale = extreme * F(1 / half)
    else:
        reach = half + (0.5 if rule.endswith("extreme") else 0.0)
        scale = np.maximum(extreme * (F(1) / F(reach)), opposite * (F(1) / F(half - 0.5)))
    scale = round_scale(scale, rounding) * sign
    lowest = 1 - half if rule == "symmetric" else -half
    return np.clip(np.rint(over(x, scale)), lowest, half - 1) * scale


def measure(arrays: list[Array], shifts: int, block: int, bits: int, scheme: Any) -> Array | None:
    """NMSE, and the largest error as a share of its block's extreme, over `shifts` ways to cut the
    values into blocks: a few blocks hold most of the energy."""
    _, rule, rounding, level = scheme
    if level == "best" and bits not in SEARCHED:
        return None
    rotation = "hadamard" if rule == "rotated" else "none"
    errors = squares = worst = 0.0
    for values, shift in itertools.product(arrays, range(shifts)):
        x = np.zeros((-(-values.size // block), block), F)
        x.ravel()[: values.size] = rolled = np.roll(values, shift * block // shifts)
        decoded = np.zeros_like(x)
        if level:
            codec = cccl.codec(
                f"block_float{bits}", block_size=block, level=level, rotation=rotation
            )
            decoded.ravel()[: values.size] = back = codec.decode(codec.encode(rolled))
        if rule != "rotated":
            decoded = code(x, bits, rule, rounding) + F(0)
            if level and back.tobytes() != decoded.ravel()[: values.size].tobytes():
                raise SystemExit(f"the model differs from {codec!r}")
        error = np.abs(decoded.astype(np.float64) - x)
        errors += float((error**2).sum())
        squares += float((x.astype(np.float64) ** 2).sum())
        worst = max(worst, (error.max(axis=1) / np.abs(x).max(axis=1).clip(2.0**-100)).max())
    return np.array([errors / squares, worst])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", required=True, help=".npy or .npz of float32")
    parser.add_argument("--keys", nargs="+", help="arrays of the .npz; default: all of float32")
    parser.add_argument("--blocks", nargs="+", type=int, default=BLOCKS, choices=BLOCKS)
    parser.add_argument("--shifts", type=int, default=16, help="ways to cut into blocks, averaged")
    args = parser.parse_args()
    loaded = np.load(args.input)
    named = {"": loaded} if isinstance(loaded, Array) else {key: loaded[key] for key in loaded}
    keys = args.keys or [key for key, values in named.items() if values.dtype == F]
    arrays = [named[key].ravel() for key in keys]
    print(f"{sum(a.size for a in arrays)} values, {args.shifts} cuts; cccl's own values: equal")
    for block in args.blocks:
        print(
            f"\n| block {block} |" + "".join(f" {bits} bit |" for bits in WIDTHS), "worst, 4 bit |"
        )
        print("|---|" + "---|" * len(WIDTHS) + "---|")
        for scheme in SCHEMES:
            found = {bits: measure(arrays, args.shifts, block, bits, scheme) for bits in WIDTHS}
            cells = "".join(" - |" if e is None else f" {e[0]:.2e} |" for e in found.values())
            print(f"| {scheme[0]} |{cells} {found[4][1]:.4f} |")


if __name__ == "__main__":
    main()
