"""What `lossless` makes of a trained model: bytes beside what entropy allows, and its speed.

    python benchmarks/lossless.py [--device cuda --mib 512]

Trains the small GPT of examples/, then encodes its weights and its last gradients. "entropy": of
all exponents of the tensor together, sign and mantissa kept as they are. On a CPU one core, on a
GPU the values repeated to `--mib`. Prints a Markdown table; `--json` prints rows instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cccl
from cccl import _arrays, _bench_cuda, _core

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import corpus
from gpt import GPT, SIZES

# Of each type: where the exponent is, and how wide.
EXPONENTS = {"bfloat16": (7, 8), "float16": (10, 5), "float32": (23, 8)}
LEVELS = ("fast", "best")


def train(size: str, steps: int) -> dict[str, torch.Tensor]:
    """Weights after `steps` of AdamW, and the last step's gradients; float32, flat."""
    torch.manual_seed(0)
    shape, model = SIZES[size], GPT(SIZES[size])
    text, _ = corpus.load()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        inputs, targets = corpus.sample(text, shape.batch, shape.context, generator)
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()
    parameters = list(model.parameters())
    return {
        "weights": torch.cat([p.detach().flatten() for p in parameters]),
        "gradients": torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]),
    }


def bits_of_exponent(values: torch.Tensor) -> float:
    """Entropy of the whole tensor's exponents."""
    shift, width = EXPONENTS[str(values.dtype).removeprefix("torch.")]
    word = {2: torch.int16, 4: torch.int32}[values.itemsize]
    exponents = (values.view(word) >> shift).bitwise_and((1 << width) - 1)
    counts = torch.bincount(exponents.flatten().int(), minlength=1 << width).double()
    share = counts[counts > 0] / values.numel()
    return float(-(share * share.log2()).sum())


def speeds_on_cpu(values: torch.Tensor, codec: Any, repeats: int) -> tuple[float, float]:
    """GB/s of uncompressed data to encode and to decode, of one core, in the fastest repeat: other
    work on the machine only ever adds."""
    number = _arrays.dtype_named(str(values.dtype).removeprefix("torch.")).number
    out = np.empty(codec.max_encoded_bytes(values.numel(), number), np.uint8)
    back = torch.empty_like(values)
    size = 0

    def encode() -> None:
        nonlocal size
        size = codec.encode(values.data_ptr(), values.numel(), number, out.ctypes.data, out.size,
                            0, 0, True)  # fmt: skip

    def decode() -> None:
        codec.decode(out.ctypes.data, size, back.data_ptr(), values.numel(), number)

    def seconds(call: Callable[[], None]) -> float:
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
        return min(times)

    found = values.nbytes / seconds(encode) / 1e9, values.nbytes / seconds(decode) / 1e9
    word = {2: torch.int16, 4: torch.int32}[values.itemsize]
    if not torch.equal(back.view(word), values.view(word)):
        raise SystemExit("decoding did not give back every bit")
    return found


def speeds_on_cuda(values: torch.Tensor, codec: Any, mib: int, repeats: int) -> tuple[float, float]:
    """The same on a GPU, of `mib` MiB."""
    dtype = _arrays.dtype_named(str(values.dtype).removeprefix("torch."))
    numel = (mib << 20) // dtype.size
    row = _bench_cuda.measure_codec(codec, numel, dtype, values.float().numpy(), repeats)
    return row["encode_gbps"], row["decode_gbps"]


def measure(what: str, values: torch.Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each level."""
    dtype = str(values.dtype).removeprefix("torch.")
    _, width = EXPONENTS[dtype]
    entropy = bits_of_exponent(values)
    rows = []
    for level in LEVELS:
        codec = _core.make_codec("lossless", {"level": level})
        nbytes = cccl.codec("lossless", level=level).encode(values).nbytes
        if options.device == "cuda":
            speed = speeds_on_cuda(values, codec, options.mib, options.repeats)
        else:
            speed = speeds_on_cpu(values, codec, options.repeats)
        bits = 8 * values.itemsize
        rows.append({
            "values": what, "dtype": dtype, "level": level, "numel": values.numel(),
            "exponent_bits": width, "entropy": entropy,
            "coded_bits": width - (bits - 8 * nbytes / values.numel()),
            "bound": bits / (bits - width + entropy), "ratio": values.nbytes / nbytes,
            "encode_gbps": speed[0], "decode_gbps": speed[1],
        })  # fmt: skip
    return rows


def main() -> None:
    """Prints the table."""
    _core.set_codec_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="medium", help="of the model")
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--dtype", nargs="+", choices=EXPONENTS, default=list(EXPONENTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mib", type=int, default=512, help="of values, on a GPU")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, help="only keep the weights, for --input of bench")
    options = parser.parse_args()
    tensors = train(options.size, options.steps)
    if options.save:
        np.save(options.save, tensors["weights"].numpy())
        return
    if not options.json:
        print("| values | dtype | level | exponent's entropy | coded in | entropy allows | ratio "
              "| encode GB/s | decode GB/s |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for dtype in options.dtype:
        for what, values in tensors.items():
            # float16 gradients are scaled, as a GradScaler does.
            scale = 2.0**16 if dtype == "float16" and what == "gradients" else 1.0
            for row in measure(what, (values * scale).to(getattr(torch, dtype)), options):
                if options.json:
                    print(json.dumps(row))
                    continue
                print(f"| {what} | {dtype} | {row['level']} | {row['entropy']:.2f} bit "
                      f"| {row['coded_bits']:.2f} bit | {row['bound']:.3f} | {row['ratio']:.3f} "
                      f"| {row['encode_gbps']:.2f} | {row['decode_gbps']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
