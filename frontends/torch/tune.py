"""`tune`: measures a process group's machines and links, for settings that fit them and for `plan`.

docs/tune.md says what is measured, and how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import _bench_cuda, _core, _show, bench
from .._arrays import DTYPES
from .._config import Config
from .._model import CHUNKS, GIGABIT, GIGABYTE, LEAST_MESSAGE, MICRO, Cluster, Rates, flat
from .._policy import SIZES, Table, calibrate
from .._rules import PLAIN
from ..errors import ConfigError
from ..plan import measured_rates
from . import _steps, all_reduce
from ._auto import Probe
from ._call import Call

CHUNK_SIZES = tuple(1 << bits for bits in range(16, 25))  # 64 KiB to 16 MiB
CLEARLY = 0.95  # of the time with chunks by default, from which another size is taken
_PROBED_LEAST, _PROBED = 1 << 20, 1 << 24  # bytes of the tensor that chunk sizes are tried with
_PROBED_ENOUGH = 1 << 23  # from which it says something of others
_ROUNDS, _WORK_ROUNDS = 5, 15
_BUCKET = 1 << 24  # bytes, of about as many messages as a bucket of DDP
_MATRIX, _PRODUCTS = 256, 100  # rows, and how many products
_THREADS = 4  # of a rank that have most of its work: codec, sockets, Python


def tune(
    group: dist.ProcessGroup | None = None,
    *,
    codecs: Sequence[str] = ("block_float8",),
    device: torch.device | str = "cpu",
    seconds: float = 10.0,
    advance: _show.Advance = lambda done: None,
) -> dict[str, Any]:
    """Measures; all ranks of the group call it, and all get the same.

    `seconds` is about how long all-reduces may take, and training steps as long again; `advance` is
    called on every rank with the name of each of the 5 parts that is done. Returns `config`
    (settings for `cccl.configure`), `cluster` (for `cccl.plan`), `measured` (seconds of all-reduces
    for each size), `crossover_bytes` (of each codec: from which size on it was faster; None if
    nowhere), `chunks` (seconds for each chunk size) and `notes`.
    """
    codecs = tuple(codecs)
    if not codecs or not 0 < seconds < math.inf:
        raise ConfigError("tune needs one codec or more, and more than 0 seconds")
    if dist.get_world_size(group) < 2:
        raise ConfigError("tune needs 2 ranks or more: there is no link to measure")
    device = torch.device(device)
    config = Config(compression_type="auto", auto_codecs=codecs)
    probe = _probe(group, device, config)
    rates = _rates(codecs, device, probe)
    advance("codecs")
    first = config.candidates[codecs[0]]
    nbytes, chunks = _chunk_sizes(group, device, first, seconds / 3, probe)
    chunk, fastest = min(chunks.items(), key=lambda item: item[1])
    better = chunk != "auto" and fastest < CLEARLY * chunks["auto"]
    if better and nbytes >= _PROBED_ENOUGH:
        config = dataclasses.replace(config, chunk_size=int(chunk))
        probe = _probe(group, device, config)
    advance("chunk sizes")
    table = calibrate(codecs, probe, seconds)
    advance("all-reduces of 1 KiB to 64 MiB")
    crossover = {name: crossover_bytes(table, name) for name in codecs}
    best = min(codecs, key=lambda name: table.medians[name][-1])
    cluster, notes = _cluster(group, device, table, rates, config.candidates[best], best, probe)
    if better and nbytes < _PROBED_ENOUGH:
        notes.append(
            f"chunk sizes were tried with {nbytes >> 20} MiB only, too little to set one: "
            "--seconds allows more"
        )
    advance("work for sockets")
    share = _steps.interference(group, device, config.candidates, cluster, seconds, probe)
    cluster = dataclasses.replace(cluster, interference=share)
    advance("training steps")
    settings: dict[str, Any] = {"compression_type": PLAIN}
    if any(value is not None for value in crossover.values()):
        settings = {"compression_type": "auto", "auto_codecs": list(codecs)}
        settings |= {} if config.chunk_size == "auto" else {"chunk_size": config.chunk_size}
    return {
        "config": settings,
        "cluster": dataclasses.asdict(cluster),
        "world_size": dist.get_world_size(group),
        "measured": [
            {"bytes": nbytes, **{name: curve[i] for name, curve in table.medians.items()}}
            for i, nbytes in enumerate(table.sizes)
        ],
        "crossover_bytes": crossover,
        "chunks": chunks,
        "notes": notes,
    }


def crossover_bytes(table: Table, name: str) -> int | None:
    """The size from which on the codec was faster than plain at all sizes measured."""
    found = None
    for nbytes, plain, ours in zip(
        table.sizes, table.medians[PLAIN], table.medians[name], strict=True
    ):
        found = (found or nbytes) if ours < plain else None
    return found


def _probe(group: dist.ProcessGroup | None, device: torch.device, config: Config) -> Probe:
    tensor = torch.zeros(1, device=device)
    return Probe(Call("all_reduce", tensor, tensor, "avg", group, config, "tune"))


def _rates(codecs: Sequence[str], device: torch.device, probe: Probe) -> dict[str, Rates]:
    """Of the slowest rank, all at work together: the best of several rounds, as ranks that share
    cores only add to it."""
    bits: dict[str, float] = {}
    best = {name: [math.inf] * 3 for name in codecs}
    for _ in range(_ROUNDS):
        for name in codecs:
            probe.slowest([0.0])  # begin together
            rates = measured_rates(name) if device.type == "cpu" else _rates_on_cuda(name)
            bits[name] = rates.bits
            speeds = rates.encode, rates.accumulate, rates.decode
            taken = probe.slowest([1 / speed for speed in speeds])
            best[name] = [min(pair) for pair in zip(best[name], taken, strict=True)]
    return {name: Rates(bits[name], *(1 / value for value in best[name])) for name in codecs}


def _rates_on_cuda(name: str) -> Rates:
    codec = Config(compression_type=name).codecs
    assert codec is not None
    numel, dtype = 1 << 24, DTYPES["float32"]
    row = _bench_cuda.measure_codec(codec[0], numel, dtype, bench.values_of(1 << 22, None), 10)
    return Rates(row["bits_per_element"], row["encode_gbps"], row["accumulate_gbps"],
                 row["decode_gbps"])  # fmt: skip


def _chunk_sizes(
    group: dist.ProcessGroup | None,
    device: torch.device,
    config: Config,
    seconds: float,
    probe: Probe,
) -> tuple[int, dict[str, float]]:
    """Of a tensor as large as the time allows: its bytes, and median seconds of all-reduces for
    each chunk size, in turns."""
    tensor = torch.linspace(-1, 1, _PROBED_LEAST // 4, device=device)
    all_reduce(tensor, group=group, config=config)
    once = _timed(device, lambda: all_reduce(tensor, group=group, config=config))
    affordable = seconds / (len(CHUNK_SIZES) + 1) / (_ROUNDS + 1) / probe.slowest([once])[0]
    nbytes = _PROBED_LEAST
    while 2 * nbytes <= min(_PROBED, affordable * _PROBED_LEAST):
        nbytes *= 2
    tensor = torch.linspace(-1, 1, nbytes // 4, device=device)
    tried = ["auto", *(str(size) for size in CHUNK_SIZES if size <= nbytes)]
    configs = {
        size: dataclasses.replace(config, chunk_size=int(size) if size != "auto" else size)
        for size in tried
    }
    times: dict[str, list[float]] = {size: [] for size in tried}
    for number in range(_ROUNDS + 1):
        for size, one in configs.items():
            taken = _timed(device, partial(all_reduce, tensor, group=group, config=one))
            if number:  # the first one pays for memory and agreement
                times[size].append(taken)
    medians = probe.slowest([statistics.median(column) for column in times.values()])
    return nbytes, dict(zip(tried, medians, strict=True))


def _cluster(
    group: dist.ProcessGroup | None,
    device: torch.device,
    table: Table,
    rates: dict[str, Rates],
    config: Config,
    codec: str,
    probe: Probe,
) -> tuple[Cluster, list[str]]:
    """Latency from the smallest all-reduce, rate from what the largest takes longer, and a rank's
    own work."""
    world, notes = dist.get_world_size(group), []
    (most,) = probe.slowest([float(os.environ.get("LOCAL_WORLD_SIZE", 1))])  # on any host
    local = min(int(most), world)
    backend = "gloo" if device.type == "cpu" else "nccl"
    times, large = table.medians[PLAIN], table.sizes[-1]
    hops = 2 * (world - 1)
    if backend == "nccl":
        hops = min(hops, 2 * math.ceil(math.log2(world)))
    taken = max(times[-1] - times[0], 1e-9)
    rate = 2 * (world - 1) / world * (large - table.sizes[0]) / taken  # bytes/s of payload
    cluster = Cluster(
        link_gbit=rate / GIGABIT / Cluster.efficiency,
        latency_us=times[0] / hops / MICRO,
        backend=backend,
        ranks_per_host=local,
        message_us=2.0 if backend == "nccl" else Cluster.message_us,
        codecs=rates,
    )
    if local == world:
        cluster = dataclasses.replace(cluster, intra_gbyte=rate / GIGABYTE)
        notes.append("all ranks are on one host: link_gbit is what they reach inside it")
    elif local > 1:
        notes.append("intra_gbyte, the rate inside a host, was not measured: it is a default")
    if large < SIZES[-1]:
        notes.append(f"sizes above {large >> 20} MiB were not measured: --seconds allows more")
    if backend == "gloo":
        ranks_per_core = max(1.0, _seconds_per_work(probe, 1))
        cluster = dataclasses.replace(cluster, ranks_per_core=ranks_per_core)
        # That a rank finds free when all are at work, up to as many as it has threads.
        cores = min(max(1.0, 1 / _seconds_per_work(probe, _THREADS)), float(_THREADS))
        with _one_codec_thread():
            alone = _rates((codec,), device, probe)[codec]
            nbytes = min(large, _BUCKET)
            cluster = _with_work(cluster, group, nbytes, config, alone, cores, probe)
    way = flat(rates[codec], 4)
    late = statistics.median(
        seconds - way(cluster, nbytes, world).seconds
        for nbytes, seconds in zip(table.sizes, table.medians[codec], strict=True)
        if nbytes >= min(large, _PROBED_LEAST)
    )
    return dataclasses.replace(cluster, start_us=max(0.0, late) / MICRO), notes


def _with_work(
    cluster: Cluster,
    group: dist.ProcessGroup | None,
    nbytes: int,
    config: Config,
    rates: Rates,
    cores: float,
    probe: Probe,
) -> Cluster:
    """Processor time that sockets take from a rank: of plain, by the byte; of ours, what is left
    after codec and bytes, by the message."""
    world = dist.get_world_size(group)
    tensor = torch.linspace(-1, 1, nbytes // 4)
    ours = partial(all_reduce, tensor, group=group, config=config)
    ours()
    plain = _work_seconds(lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG, group), cores)
    (plain, mine) = probe.slowest([plain, _work_seconds(ours, cores)])
    sent = 2 * (world - 1) / world * tensor.nbytes
    stack = sent / max(plain, 1e-9) / GIGABYTE
    bare = dataclasses.replace(cluster, stack_gbyte=stack, message_us=0.0)
    payload = tensor.nbytes * rates.bits / 32 / world
    chunks = min(CHUNKS, max(1, int(payload / LEAST_MESSAGE["gloo"])))
    known = flat(rates, 4)(bare, tensor.nbytes, world).work / cluster.ranks_per_core
    left = max(0.0, mine - known) / (2 * (world - 1) * chunks)
    return dataclasses.replace(bare, message_us=left / MICRO)


@contextlib.contextmanager
def _one_codec_thread() -> Iterator[None]:
    """Processor time is then that of the work: threads that share it also wait, and look for it."""
    threads = _core.codec_threads()
    _core.set_codec_threads(1)
    try:
        yield
    finally:
        _core.set_codec_threads(threads)


def _seconds_per_work(probe: Probe, threads: int) -> float:
    """Seconds of a computation in as many threads of all ranks at once, over the slowest one's
    processor time. The least of several rounds: other programs only add to it."""
    matrix = torch.full((_MATRIX, _MATRIX), 1e-3)

    def compute(_: int) -> None:
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix)

    ratios = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            probe.slowest([0.0])  # begin together
            before, begun = time.process_time(), time.perf_counter()
            list(pool.map(compute, range(threads)))
            ratios.append((time.perf_counter() - begun) / (time.process_time() - before))
    return min(probe.slowest(ratios))


def _timed(device: torch.device, call: Callable[[], Any]) -> float:
    _finish(device)
    begun = time.perf_counter()
    call()
    _finish(device)
    return time.perf_counter() - begun


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _work_seconds(call: Callable[[], Any], cores: float) -> float:
    """Processor time of one call: of the busiest thread or, if that is more, of all of them shared
    out among the rank's cores."""
    before = _thread_seconds()
    for _ in range(_WORK_ROUNDS):
        call()
    spent = [now - before.get(thread, 0.0) for thread, now in _thread_seconds().items()]
    return max(max(spent), sum(spent) / cores) / _WORK_ROUNDS


def _thread_seconds() -> dict[int, float]:
    """Processor time of each thread of this process, the kernel's part too."""
    found = {}
    for name in os.listdir("/proc/self/task"):
        thread = int(name)
        with contextlib.suppress(OSError):  # it has ended
            found[thread] = time.clock_gettime(~thread << 3 | 6)  # as pthread_getcpuclockid
    return found
