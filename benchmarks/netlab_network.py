"""The network of a lab: namespaces joined by a switch, each behind a limited link."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PREFIX = "netlab-"  # of namespaces: netlab-PID-sw, netlab-PID-h0, ... (PID: netlab's own)
DEVICE = "eth0"
HOST_QUEUE_S, PORT_QUEUE_S = 0.05, 0.01  # TCP itself keeps the host's own queue short


class LabError(Exception):
    """The lab cannot be made, or a command that it needs failed."""


def sh(*args: str, check: bool = True) -> str:
    """Runs a command and returns its stdout; an error carries the command's own words."""
    done = subprocess.run(args, capture_output=True, text=True)
    if check and done.returncode:
        raise LabError(f"{' '.join(args)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Network:
    """The namespaces of one run, made by up() and removed by down()."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.switch = f"{PREFIX}{os.getpid()}-sw"
        self.hosts = [f"{PREFIX}{os.getpid()}-h{rank}" for rank in range(args.hosts)]
        self.burst: int | None = None
        self._relay: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Makes all; raises `LabError` where that is not possible."""
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                raise LabError(f"'{tool}' is missing: apt-get install iproute2")
        try:
            sh("ip", "netns", "add", self.switch)
        except LabError as error:
            raise LabError(
                f"cannot make network namespaces here (root or CAP_SYS_ADMIN needed): {error}"
            ) from None
        if not self.args.delay:
            bridge = ("ip", "-n", self.switch, "link")
            sh(*bridge, "add", "br0", "type", "bridge", "stp_state", "0")
            sh(*bridge, "set", "br0", "addrgenmode", "none")
            sh(*bridge, "set", "br0", "up")
        for rank, host in enumerate(self.hosts):
            self._add_host(rank, host)
        if self.args.delay:
            self._start_relay()

    def down(self) -> None:
        """Removes all, with every process inside."""
        if self._relay:
            self._relay.kill()
            self._relay.wait()
        for name in [*self.hosts, self.switch]:
            remove_namespace(name)

    def set_link(self, rank: int, state: str) -> None:
        """Cuts ("down") or mends ("up") a host's link."""
        sh("ip", "-n", self.switch, "link", "set", f"p{rank}", state, check=False)

    def sent(self, rank: int) -> dict[str, int]:
        """What a host has sent and received so far, as its kernel counted it."""

        def read(tool: str, name: str, what: str, device: str) -> Any:
            return json.loads(sh(tool, "-n", name, "-s", "-j", what, "show", "dev", device))

        host = self.hosts[rank]
        queues = {queue["kind"]: queue for queue in read("tc", host, "qdisc", DEVICE)}
        out = queues.get("tbf") or queues["pfifo"]
        port = read("tc", self.switch, "qdisc", f"p{rank}")[0]
        link = read("ip", host, "link", DEVICE)[0]["stats64"]
        return {
            "wire_bytes": out["bytes"],  # Ethernet, IP and TCP headers of every packet included
            "wire_packets": out["packets"],
            "queue_drops": out["drops"] + port["drops"],  # on the way out, and at the switch's port
            "lost": queues["clsact"]["drops"] if "clsact" in queues else 0,  # by --loss, inbound
            "link_tx_bytes": link["tx"]["bytes"],  # the same with one header per offloaded packet
            "link_rx_bytes": link["rx"]["bytes"],
        }

    def _add_host(self, rank: int, host: str) -> None:
        args, port = self.args, f"p{rank}"
        mtu = ("mtu", str(args.mtu))
        sh("ip", "netns", "add", host)
        sh("ip", "-n", host, "link", "set", "lo", "up")
        pair = ("type", "veth", "peer", "name", port, *mtu, "netns", self.switch)
        sh("ip", "-n", host, "link", "add", DEVICE, *mtu, *pair)
        sh("ip", "-n", host, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", DEVICE)
        for where, device in (host, DEVICE), (self.switch, port):
            # No IPv6: its chatter would be counted.
            sh("ip", "-n", where, "link", "set", device, "addrgenmode", "none")
            sh("ip", "-n", where, "link", "set", device, "up")
        if not args.delay:
            sh("ip", "-n", self.switch, "link", "set", port, "master", "br0")
        # Cubic, as on most clusters, unless asked: what the machine itself uses (bbr, say) may
        # ignore loss and make a lossy lab look too good. By route: a namespace has no such sysctl.
        route = ("route", "replace", "10.77.0.0/24", "dev", DEVICE)
        sh("ip", "-n", host, *route, "congctl", args.cc)
        self._limit(host, DEVICE, HOST_QUEUE_S)
        self._limit(self.switch, port, PORT_QUEUE_S)
        if args.loss:
            self._lose(host, args.loss)

    def _limit(self, name: str, device: str, queue_s: float) -> None:
        add = ("tc", "-n", name, "qdisc", "add", "dev", device, "root")
        if not self.args.rate:  # a plain fifo, since only a qdisc counts every packet's headers
            sh(*add, "pfifo", "limit", "10000")
            return
        # The bucket's depth is what may pass at once after a pause: 0.6 ms at the rate, but at
        # least 16 kB, and at most 400 kB (less fell well short of 10 gbit/s on two busy cores).
        per_s = self.args.rate / 8
        self.burst = round(max(16e3, min(per_s * 0.6e-3, 400e3), per_s * 0.1e-3))
        limit = max(128e3, per_s * queue_s)
        rate = f"{self.args.rate:.0f}bit"
        sh(*add, "tbf", "rate", rate, "burst", f"{self.burst}b", "limit", f"{limit:.0f}b")

    def _lose(self, host: str, share: float) -> None:
        """Drops arriving packets at random with a classic BPF program: netem may be missing."""
        # Else one loss would take a whole 64 kB segmentation-offload packet.
        sh("ip", "-n", host, "link", "set", DEVICE, "gso_max_segs", "1")
        sh("tc", "-n", host, "qdisc", "add", "dev", DEVICE, "clsact")
        random_word = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
        threshold, ok, drop = int((1 - share) * 0xFFFFFFFF), 0, 2  # TC_ACT_OK, TC_ACT_SHOT
        program = f"4,32 0 0 {random_word},53 0 1 {threshold},6 0 0 {drop},6 0 0 {ok}"
        add = ("tc", "-n", host, "filter", "add", "dev", DEVICE, "ingress")
        sh(*add, "bpf", "da", "bytecode", program)

    def _start_relay(self) -> None:
        script = str(Path(__file__).resolve().with_name("netlab_relay.py"))
        ports = [f"p{rank}" for rank in range(len(self.hosts))]
        command = [sys.executable, script, str(self.args.delay), *ports]
        self._relay = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, *command],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ready\n":
            raise LabError("the relay that stands in for the switch did not start")


def remove_namespace(name: str) -> None:
    """Ends what still runs inside the namespace (nothing else can be there), then removes it."""
    if not Path("/run/netns", name).exists():
        return
    for pid in sh("ip", "netns", "pids", name, check=False).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    sh("ip", "netns", "del", name, check=False)


def left_behind() -> list[tuple[str, bool]]:
    """All lab namespaces of this machine, each with whether its netlab still runs."""
    found = []
    for line in sh("ip", "netns", "list").splitlines():
        match = re.match(rf"({PREFIX}(\d+)-\S+)", line)
        if match:
            command = Path("/proc", match[2], "cmdline")
            try:
                alive = b"netlab" in command.read_bytes()
            except OSError:
                alive = False
            found.append((match[1], alive))
    return found
