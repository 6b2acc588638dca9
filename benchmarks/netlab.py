#!/usr/bin/env python3
"""netlab: run one command on several bandwidth-limited 'hosts' of one Linux machine.

Each host is a network namespace with one interface, eth0 (10.77.0.RANK+1/24), joined by a veth
pair to a switch in a namespace of its own. A token bucket (tc tbf) limits what every host sends,
and another, on the switch port, what it receives, as a full-duplex NIC would. Nothing is routed
out of these namespaces. Needs root and iproute2 (ip, tc) only.

  netlab.py run --hosts 4 --rate 1gbit -- python3 train.py     one process per host
  netlab.py run --hosts 2 --per-host 2 --rate 1gbit -- python3 train.py      two on each
  netlab.py run --hosts 2 --rate 1gbit --delay 5ms --loss 0.1% --kill 1@10 -- python3 train.py
  netlab.py clean                                              remove what dead runs left behind

Every process gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME,
NCCL_SOCKET_IFNAME, NCCL_HOSTID and so on, as torchrun would set them. Output lines are prefixed
with '[RANK] '; netlab's own messages go to stderr; the last line on stdout is one JSON object with
the bytes that each host really put on its wire. Exit status: 0 if every rank that was not killed
on purpose exited 0, 124 after --timeout, 130 if interrupted, 2 if the lab cannot be made,
otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from netlab_network import DEVICE, LabError, Network, left_behind, remove_namespace


def log(text: str) -> None:
    """To stderr: stdout is the ranks'."""
    print(f"netlab: {text}", file=sys.stderr, flush=True)


class Job:
    """A command, on each host of a network."""

    def __init__(self, network: Network, args: argparse.Namespace):
        self.network, self.args = network, args
        self.processes: list[subprocess.Popen[bytes]] = []
        self.killed: set[int] = set()
        self._pumps: list[threading.Thread] = []
        self._timers: list[threading.Timer] = []
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts all ranks, and the clocks of --kill and --cut."""
        for rank in range(self.args.hosts * self.args.per_host):
            host = self.network.hosts[rank // self.args.per_host]
            # 'ip netns exec' becomes the command, so the pid is the rank's own; a session of its
            # own lets the whole tree under it be killed.
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, *self.args.command],
                env=self._environment(rank),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.processes.append(process)
            pump = threading.Thread(target=self._pump, args=(rank, process), daemon=True)
            self._pumps.append(pump)
            pump.start()
        for rank, at, _ in self.args.kill:
            self._later(at, f"killing rank {rank}", self.kill, rank)
        for rank, at, length in self.args.cut:
            self._later(at, f"cutting host {rank}'s link", self.network.set_link, rank, "down")
            if length:
                until, text = at + length, f"mending host {rank}'s link"
                self._later(until, text, self.network.set_link, rank, "up")

    def kill(self, rank: int) -> None:
        """SIGKILL to a rank and all that it started."""
        if self.processes[rank].poll() is None:
            self.killed.add(rank)
            os.killpg(self.processes[rank].pid, signal.SIGKILL)

    def wait(self) -> tuple[bool, dict[int, float]]:
        """Until all ranks ended, --timeout is over, or --grace since the first that failed.

        Returns whether it was in time, and when each rank ended.
        """
        begun, limit = time.monotonic(), self.args.timeout
        ended: dict[int, float] = {}
        while len(ended) < len(self.processes):
            now = time.monotonic() - begun
            for rank, process in enumerate(self.processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = round(now, 3)
                    if process.returncode and rank not in self.killed:
                        log(f"{now:.1f} s: rank {rank} exited with {process.returncode}")
                        limit = min(limit, now + self.args.grace)
            if now > limit:
                log(f"{now:.1f} s: ending the ranks that still run")
                return limit < self.args.timeout, ended
            time.sleep(0.02)
        return True, ended

    def stop(self) -> None:
        """Ends what still runs; the rest of a rank's tree goes with its namespace."""
        for timer in self._timers:
            timer.cancel()
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for pump in self._pumps:
            pump.join(2)  # no longer: what a rank left behind may hold the pipe

    def _environment(self, rank: int) -> dict[str, str]:
        host, local = divmod(rank, self.args.per_host)
        ranks = self.args.hosts * self.args.per_host
        threads = min(8, max(1, len(os.sched_getaffinity(0)) // ranks - 1))
        return {
            "OMP_NUM_THREADS": "1",  # all hosts share the real machine's cores
            "CCCL_CODEC_THREADS": str(threads),
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "GROUP_RANK": str(host),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(self.args.per_host),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(self.args.port),
            "GLOO_SOCKET_IFNAME": DEVICE,
            "NCCL_SOCKET_IFNAME": DEVICE,
            "NCCL_HOSTID": f"host{host}",
            "PYTHONUNBUFFERED": "1",
        }

    def _pump(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                sys.stdout.write(f"[{rank}] {line.decode(errors='replace').rstrip()}\n")
                sys.stdout.flush()

    def _later(self, at: float, text: str, action: Callable[..., None], *args: Any) -> None:
        timer = threading.Timer(at, lambda: (log(f"{at:g} s: {text}"), action(*args)))
        timer.daemon = True
        timer.start()
        self._timers.append(timer)


def run(args: argparse.Namespace) -> int:
    """The command `run`; returns the exit status."""
    for what, faults, count in (
        ("rank", args.kill, args.hosts * args.per_host), ("host", args.cut, args.hosts)
    ):  # fmt: skip
        for number, *_ in faults:
            if number >= count:
                raise LabError(f"there is no {what} {number}: they are {count}")
    network, job = Network(args), None
    try:
        network.up()
        job = Job(network, args)
        begun = time.monotonic()
        job.start()
        in_time, ended = job.wait()
        seconds_taken = time.monotonic() - begun
        counts = [network.sent(rank) for rank in range(args.hosts)]
        job.stop()
        exits = [process.returncode for process in job.processes]
        failed = any(code and rank not in job.killed for rank, code in enumerate(exits))
        status = 124 if not in_time else int(failed)
        summary = {
            "hosts": args.hosts,
            "rate_bps": args.rate,
            "burst_bytes": network.burst,
            "delay_s": args.delay,
            "loss": args.loss,
            "mtu": args.mtu,
            "cc": args.cc,
            "seconds": round(seconds_taken, 3),
            "timed_out": not in_time,
            "status": status,
            "wire_bytes_total": sum(count["wire_bytes"] for count in counts),
            "ranks": [  # with the bytes of its host
                {"rank": r, "exit": exits[r], "ended_s": ended.get(r), "killed": r in job.killed}
                | counts[r // args.per_host]
                for r in range(len(exits))
            ],
        }
        print(json.dumps({"netlab": summary}), flush=True)
    except KeyboardInterrupt:
        log("interrupted")
        status = 130
    finally:
        # A second Ctrl-C must not leave things behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if job:
            job.stop()
        network.down()
    return status


def clean(_args: argparse.Namespace) -> int:
    """The command `clean`."""
    for name, alive in left_behind():
        if not alive:
            remove_namespace(name)
        log(f"{name}: {'in use, left' if alive else 'removed'}")
    return 0


def quantity(units: dict[str, float], what: str) -> Callable[[str], float]:
    """An argparse type: a number with one of `units` behind it."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z%]*)", text.strip().lower())
        if not match or match[2] not in units:
            known = ", ".join(filter(None, units))
            raise argparse.ArgumentTypeError(f"{text!r} is no {what} (units: {known})")
        return float(match[1]) * units[match[2]]

    return parse


rate = quantity({"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}, "rate")  # bits per second
seconds = quantity({"s": 1, "ms": 1e-3, "us": 1e-6, "": 1}, "time")
fraction = quantity({"%": 0.01, "": 1}, "fraction")


def fault(text: str) -> tuple[int, float, float | None]:
    """An argparse type: RANK@SECONDS, with +LENGTH for a link that is mended."""
    match = re.fullmatch(r"(\d+)@([0-9.]+)(?:\+([0-9.]+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK@SECONDS")
    return int(match[1]), float(match[2]), float(match[3]) if match[3] else None


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser(
        "run",
        help="run COMMAND once on each host",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = p.add_argument
    add("--hosts", type=int, default=2, choices=range(1, 65), metavar="N")
    add("--per-host", type=int, default=1, choices=range(1, 17), metavar="N", help="ranks of each")
    add("--rate", type=rate, help="of each host, each way: 100mbit, 1gbit, ... (none: unlimited)")
    add("--delay", type=seconds, default=0.0, help="added one way, half of the RTT's gain: 0.2ms")
    add("--loss", type=fraction, default=0.0, help="share of packets lost at random: 0.1%%")
    add("--mtu", type=int, default=1500)
    add("--cc", default="cubic", help="TCP congestion control")
    add("--port", type=int, default=29500, help="MASTER_PORT")
    add("--timeout", type=seconds, default=300.0, help="for the whole command")
    add("--grace", type=seconds, default=30.0, help="for the other ranks once one failed by itself")
    faults: dict[str, Any] = {"type": fault, "action": "append", "default": []}
    add("--kill", **faults, metavar="RANK@SECONDS", help="SIGKILL a rank")
    cut_help = "take a host's link down (for LENGTH seconds)"
    add("--cut", **faults, metavar="RANK@SECONDS[+LENGTH]", help=cut_help)
    add("command", nargs="+", metavar="COMMAND", help="after '--'")
    p.set_defaults(func=run)
    p = commands.add_parser("clean", help="remove namespaces of runs that are no more")
    p.set_defaults(func=clean)
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    args = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(args.func(args))
    except LabError as error:
        log(str(error))
        return 2


if __name__ == "__main__":
    sys.exit(main())
