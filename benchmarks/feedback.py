"""Whether error feedback helps, what it costs, and what diff gains: a small GPT, ranks simulated.

    python benchmarks/feedback.py train
    python benchmarks/feedback.py predict
    python benchmarks/feedback.py cost
    python benchmarks/feedback.py cost --device cuda

Ranks of one process compute their gradients one after the other; these go through real
collectives over the loopback transport.

`train`: for each optimizer, codec and setting the loss on held-out files after training, less that
of plain training with the same seed: the mean over seeds, and half of its 90 % interval.
`predict`: the square error of means over their square, in the first and the last quarter of a run.
`cost`: milliseconds that each of two ranks takes to encode 16 MiB of float32 (the fastest of 30
times), and how much more with feedback, by the type of the residuals. On a CUDA device the codecs
alone, on 512 MiB, which are in no cache; and what diff costs there beside its inner codec.
docs/feedback.md has the tables.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cccl
from cccl import _arrays, _core
from cccl._bench_cuda import Timer, rotating

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import corpus
from gpt import GPT, SIZES

RANKS = 4
SIZE = SIZES["tiny"]
RISING_STEPS = 10
WINDOWS = 256  # of the held-out files
# Half of the 90 % interval of a mean of so many, in standard errors (Student).
STUDENT = {2: 6.31, 3: 2.92, 4: 2.35, 5: 2.13, 6: 2.02, 8: 1.89, 10: 1.83}

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3),
}
CODECS: dict[str, dict[str, Any]] = {
    "top-k 1 %": {"compression_type": "sparse", "top_k": 0.01},
    "4 bits": {"compression_type": "block_float4"},
    "3 bits": {"compression_type": "block_float3"},
    "2 bits": {"compression_type": "block_float2"},
    "3 bits stochastic": {"compression_type": "block_float3", "rounding": "stochastic"},
    "2 bits stochastic": {"compression_type": "block_float2", "rounding": "stochastic"},
}
PREDICTED = ("block_float8", "diff(block_float8)", "block_float4", "diff(block_float4)",
             "block_float2", "diff(block_float2)")  # fmt: skip
COST_CODECS: dict[str, dict[str, Any]] = {
    "block_float8": {"compression_type": "block_float8"},
    "block_float4": {"compression_type": "block_float4"},
    "block_float4, level best": {"compression_type": "block_float4", "level": "best"},
    "block_float4, stochastic": {"compression_type": "block_float4", "rounding": "stochastic"},
    "sparse, top-k 1 %": {"compression_type": "sparse", "top_k": 0.01},
}
COST_VALUES, COST_VALUES_ON_CUDA = 1 << 22, 1 << 27
TYPES = ("float32", "bfloat16", "block_float8")
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"error_feedback": "none"},
    "sender": {"error_feedback": "sender"},
    "both": {"error_feedback": "both"},
    "both, decay 0.9": {"error_feedback": "both", "residual_decay": 0.9},
}
# What is left out by default, so that all takes ten minutes of a core.
SKIPPED = {
    "4 bits": ("sender", "both, decay 0.9"),
    "3 bits": ("sender", "both, decay 0.9"),
    "3 bits stochastic": ("sender", "both", "both, decay 0.9"),
    "2 bits stochastic": ("sender", "both", "both, decay 0.9"),
}


class Ranks:
    """The collectives of all ranks, on threads."""

    def __init__(self, config: cccl.Config, world: int = RANKS):
        self._config = config
        self._communicators = [_core.Communicator(t, 60.0) for t in _core.loopback(world)]
        self._stores = [_core.StateStore() for _ in range(world)]
        self._step = 0

    def mean(self, gradients: list[Tensor]) -> Tensor:
        """What every rank gets for these, one of each rank; written over them."""
        self._step += 1
        config, works = self._config, []
        layout = _core.Layout([("gradient", gradients[0].numel())])
        for rank, (communicator, gradient) in enumerate(
            zip(self._communicators, gradients, strict=True)
        ):
            extra = {"feedback": config.feedback} if config.feedback else {}
            if config.remembers:
                extra |= {"store": self._stores[rank], "layout": layout, "step": self._step}
            works.append(communicator.submit(
                "all_reduce", gradient.data_ptr(), gradient.numel(), gradient.data_ptr(),
                gradient.numel(), 1, *config.codecs, seed=config.seed, **extra,
            ))  # fmt: skip
        if not all(work.wait(60.0) for work in works):
            raise TimeoutError("a collective did not end")
        if not all(torch.equal(gradients[0], other) for other in gradients[1:]):
            raise AssertionError("ranks hold different means")
        return gradients[0]

    def close(self) -> None:
        """Ends the threads."""
        for communicator in self._communicators:
            communicator.close()


class Training:
    """A model, its optimizer and the batches of all ranks."""

    def __init__(self, optimizer: str, seed: int, steps: int):
        torch.manual_seed(seed)
        self.model = GPT(SIZE)
        self.parameters = list(self.model.parameters())
        self._optimizer = OPTIMIZERS[optimizer](self.parameters)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / RISING_STEPS, 1 - step / steps)
        )
        self._text, self._held_out = corpus.load()
        self._generators = [torch.Generator().manual_seed(seed * 1000 + r) for r in range(RANKS)]

    def gradients(self) -> list[Tensor]:
        """Of each rank's next batch."""
        found = []
        for generator in self._generators:
            batch = corpus.sample(self._text, SIZE.batch, SIZE.context, generator)
            parts = torch.autograd.grad(self.model(*batch), self.parameters)
            found.append(torch.cat([part.flatten() for part in parts]))
        return found

    def update(self, mean: Tensor) -> None:
        """A step with the ranks' mean gradient."""
        parts = mean.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()

    @torch.no_grad()
    def loss(self) -> float:
        """On held-out files."""
        return float(self.model(*corpus.evenly(self._held_out, WINDOWS, SIZE.context)))


def train(optimizer: str, config: cccl.Config | None, seed: int, steps: int) -> float:
    """The loss on held-out files after training; `config` None: with exact means."""
    training = Training(optimizer, seed, steps)
    ranks = Ranks(config) if config else None
    for _ in range(steps):
        gradients = training.gradients()
        training.update(ranks.mean(gradients) if ranks else torch.stack(gradients).mean(0))
    if ranks:
        ranks.close()
    return training.loss()


def compared(losses: list[float], plain: list[float]) -> str:
    """Mean of paired differences and half of its 90 % interval."""
    differences = [a - b for a, b in zip(losses, plain, strict=True)]
    text = f"{statistics.mean(differences):+.3f}"
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
        text += f" ± {STUDENT.get(len(differences), 1.65) * error:.3f}"
    return text


def print_cost(name: str, times: list[float]) -> None:
    """The time of encoding, in seconds, and of encoding with each type of residual."""
    more = " | ".join(f"{100 * (t / times[0] - 1):+.0f} %" for t in times[1:])
    print(f"| {name} | {1e3 * times[0]:.2f} | {more} |", flush=True)


def cost(args: argparse.Namespace) -> None:
    """Prints a table of encode times."""
    print("\n| | encode, ms | " + " | ".join(TYPES) + " |\n" + "|---" * (len(TYPES) + 2) + "|")
    if args.device == "cuda":
        cost_on_cuda(args.repeats)
        return cost_of_predicting(args.repeats)
    values = torch.randn(COST_VALUES, generator=torch.Generator().manual_seed(0))
    for name, codec in COST_CODECS.items():
        times = []
        for type in (None, *TYPES):
            feedback = {"error_feedback": "sender", "residual_type": type} if type else {}
            ranks = Ranks(cccl.Config(**codec, **feedback), 2)
            found = []
            for _ in range(args.repeats):
                cccl.reset_stats()
                ranks.mean([values.clone(), values.clone()])
                (row,) = cccl.stats()["rows"]
                found.append(row["encode_seconds"] / row["calls"])
            ranks.close()
            times.append(min(found))
        print_cost(name, times)
    return None


def cost_on_cuda(repeats: int) -> None:
    """The same of the codecs alone, in CUDA graphs."""
    timer, count, dtype = Timer(repeats), COST_VALUES_ON_CUDA, _arrays.dtype_named("float32")
    values = torch.randn(COST_VALUES, generator=torch.Generator().manual_seed(0)).numpy()
    source = rotating(values, count, dtype)
    for name, settings in COST_CODECS.items():
        codec = _core.codec_on_cuda(cccl.Config(**settings).codecs[0])
        size = codec.max_encoded_bytes(count, dtype.number)
        payload = torch.empty(size, dtype=torch.uint8, device="cuda")
        where = (payload.data_ptr(), size)

        def encode(slot: int, codec: Any = codec, where: Any = where) -> None:
            codec.encode(source[slot].data_ptr(), count, dtype.number, *where, 0, 0, True,
                         timer.queue)  # fmt: skip

        times = [timer.seconds(encode, len(source))]
        for type in TYPES:
            kept, following = torch.zeros(
                (2, _core.residual_bytes(type, count)), dtype=torch.uint8, device="cuda"
            )
            residual = _core.Residual(type, kept.data_ptr(), following.data_ptr(), count)

            def correct(
                slot: int, codec: Any = codec, where: Any = where, residual: Any = residual
            ) -> None:
                _core.encode_corrected(
                    codec, source[slot].data_ptr(), count, dtype.number, *where, 0, residual,
                    timer.queue,
                )  # fmt: skip

            times.append(timer.seconds(correct, len(source)))
        print_cost(name, times)


def cost_of_predicting(repeats: int) -> None:
    """Milliseconds for values that the prediction says most of. A mean is of 4 payloads."""
    timer, count, dtype = Timer(repeats), COST_VALUES_ON_CUDA, _arrays.dtype_named("float32")
    values = torch.randn(count, device="cuda")
    known, out = 0.9 * values + 0.1 * torch.randn_like(values), torch.empty_like(values)
    shape, queue = (count, dtype.number), timer.queue
    print("\n| | encode | decode | mean |\n|---|---|---|---|")
    for name in PREDICTED:
        codec = _core.codec_on_cuda(cccl.Config(compression_type=name).codecs[0])
        if codec.predicts:
            codec = codec.with_prediction(known.data_ptr(), *shape, 1)
        size = codec.max_encoded_bytes(*shape)
        payload = torch.empty(size, dtype=torch.uint8, device="cuda")
        at = payload.data_ptr()
        calls = (
            lambda _, c=codec, at=at, size=size: c.encode(
                values.data_ptr(), *shape, at, size, 0, 0, True, queue),
            lambda _, c=codec, at=at, size=size: c.decode(
                at, size, out.data_ptr(), *shape, queue),
            lambda _, c=codec, at=at, size=size: c.reduce(
                [at] * 4, size, 4.0, out.data_ptr(), *shape, queue),
        )  # fmt: skip
        times = [f"{1e3 * timer.seconds(call, 1):.2f}" for call in calls]
        print(f"| {name} | {' | '.join(times)} |", flush=True)


def compare(args: argparse.Namespace) -> None:
    """Prints a table for each optimizer."""
    for optimizer in args.optimizers:
        begun = time.process_time()
        plain = [train(optimizer, None, seed, args.steps) for seed in range(args.seeds)]
        print(f"\n{optimizer}: plain {', '.join(f'{loss:.3f}' for loss in plain)}", flush=True)
        print(
            "\n| | " + " | ".join(args.settings) + " |\n" + "|---" * (len(args.settings) + 1) + "|"
        )
        for name in args.codecs:
            cells = []
            for setting in args.settings:
                if not args.all and setting in SKIPPED.get(name, ()):
                    cells.append("")
                    continue
                config = cccl.Config(
                    **CODECS[name], **SETTINGS[setting], residual_type=args.residual_type
                )
                losses = [train(optimizer, config, seed, args.steps) for seed in range(args.seeds)]
                cells.append(compared(losses, plain))
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        print(f"\n{time.process_time() - begun:.0f} s of CPU")


def predict(args: argparse.Namespace) -> None:
    """Prints a table of errors in a training run with exact means."""
    all_ranks = {name: Ranks(cccl.Config(compression_type=name)) for name in PREDICTED}
    errors: dict[str, list[float]] = {name: [] for name in PREDICTED}
    training = Training("AdamW", 0, args.steps)
    for _ in range(args.steps):
        gradients = training.gradients()
        exact = torch.stack(gradients).mean(0)
        for name, ranks in all_ranks.items():
            found = ranks.mean([gradient.clone() for gradient in gradients])
            errors[name].append(float((found - exact).square().sum() / exact.square().sum()))
        training.update(exact)
    print("\n| | first quarter | last quarter |\n|---|---|---|")
    for name, found in errors.items():
        all_ranks[name].close()
        early, late = found[: args.steps // 4], found[-args.steps // 4 :]
        print(f"| {name} | {statistics.mean(early):.2e} | {statistics.mean(late):.2e} |")


def main() -> None:
    """Runs one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    costs = commands.add_parser("cost")
    costs.add_argument("--repeats", type=int, default=30)
    costs.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    costs.set_defaults(run=cost)
    predicts = commands.add_parser("predict")
    predicts.add_argument("--steps", type=int, default=400)
    predicts.set_defaults(run=predict)
    trains = commands.add_parser("train")
    trains.set_defaults(run=compare)
    trains.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    trains.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    trains.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    trains.add_argument("--all", action="store_true", help="every setting of every codec")
    trains.add_argument("--residual-type", default="bfloat16")
    trains.add_argument("--steps", type=int, default=400)
    trains.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__":
    main()
