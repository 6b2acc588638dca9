#!/usr/bin/env python3
"""Heat spreading over a plate that several processes hold in strips: halos by send and receive.

  python examples/heat.py                  two processes, NumPy
  python examples/heat.py --device cuda --ranks 4   CuPy

In each step a rank swaps its outer rows with its neighbours. With exact halos the plate has the
bits that one process alone would get; with encoded ones it is off by what is printed. The sum of
all heat goes through a codec too, and is as near as the codec's error bound promises.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import processes

import cccl
import cccl.cupy


def main() -> None:
    """Reads the options and runs the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    processes.add_arguments(parser)
    parser.add_argument("--side", type=int, default=512, help="cells of the square plate")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--codec", default="block_float8")
    processes.run(compare, parser.parse_args())


def compare(communicator: cccl.cupy.Communicator, xp: Any, options: argparse.Namespace) -> None:
    """Exact and encoded halos against one process alone, then the sum."""
    rank, world = communicator.rank, communicator.world_size
    rows = np.array_split(np.arange(options.side), world)[rank]
    alone = plate(xp, options.side)
    for _ in range(options.steps):
        step(alone)
    mine = alone[rows[0] + 1 : rows[-1] + 2]
    for codec in ("none", options.codec):
        cccl.reset_stats()
        strip = xp.ascontiguousarray(plate(xp, options.side)[rows[0] : rows[-1] + 3])
        config = cccl.Config(compression_type=codec, collective_filter=("send",))
        begun = time.perf_counter()
        for _ in range(options.steps):
            swap_halos(communicator, strip, config)
            step(strip)
        off = xp.abs(strip[1:-1] - mine).max().reshape(1)
        took = time.perf_counter() - begun
        worst = communicator.all_gather(off).max()
        if rank == 0:
            sent = cccl.stats()["total"]["bytes_sent"] / 1e6
            print(f"halos {codec:12} off by {float(worst):.2e}  {sent:6.2f} MB sent  "
                  f"{1e3 * took / options.steps:.3f} ms a step", flush=True)  # fmt: skip
    sum_with_bound(communicator, xp, mine, options.codec)


def plate(xp: Any, side: int) -> Any:
    """Cold, with two hot spots, and a border that stays cold."""
    x, y = xp.meshgrid(xp.linspace(0, 1, side + 2), xp.linspace(0, 1, side + 2))
    heat = xp.exp(-60 * ((x - 0.3) ** 2 + (y - 0.45) ** 2))
    heat += 0.5 * xp.exp(-90 * ((x - 0.7) ** 2 + (y - 0.6) ** 2))
    heat[[0, -1], :] = heat[:, [0, -1]] = 0
    return heat.astype(xp.float32)


def step(heat: Any) -> None:
    """All inner cells take a fifth of themselves and of their neighbours."""
    neighbours = heat[:-2, 1:-1] + heat[2:, 1:-1] + heat[1:-1, :-2] + heat[1:-1, 2:]
    heat[1:-1, 1:-1] = (heat[1:-1, 1:-1] + neighbours) / 5


def swap_halos(communicator: cccl.cupy.Communicator, strip: Any, config: cccl.Config) -> None:
    """The outer rows of this strip for the neighbours' halos, and theirs for its own."""
    above, below = communicator.rank - 1, communicator.rank + 1
    sends, receives = {}, {}
    if above >= 0:
        sends[above], receives[above] = strip[1], strip[0]
    if below < communicator.world_size:
        sends[below], receives[below] = strip[-2], strip[-1]
    communicator.exchange(sends, receives, config=config)


def sum_with_bound(communicator: cccl.cupy.Communicator, xp: Any, mine: Any, codec: str) -> None:
    """Sums of columns over all ranks: encoded, exact, and how far apart they may be."""
    columns = mine.sum(axis=0)
    exact = communicator.all_reduce(columns, config={"compression_type": "none"})
    found = communicator.all_reduce(columns, config={"compression_type": codec})
    host = columns if isinstance(columns, np.ndarray) else columns.get()
    bound_of = cccl.codec(codec).error_bound
    # Each contribution is encoded once, and their sum once more.
    first = communicator.all_reduce(bound_of(host), config={"compression_type": "none"})
    sums = np.abs(exact if isinstance(exact, np.ndarray) else exact.get()) + first
    bound = first + bound_of(sums.astype(np.float32))
    off = np.abs((found - exact) if isinstance(found, np.ndarray) else (found - exact).get())
    assert (off <= bound * 1.01 + 1e-6).all()
    if communicator.rank == 0:
        print(f"column sums off by {off.max():.2e}, at most {bound.max():.2e}", flush=True)


if __name__ == "__main__":
    main()
