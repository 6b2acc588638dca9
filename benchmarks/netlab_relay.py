"""A switch in user space that delays every frame, as not every kernel has netem.

    netlab_relay.py DELAY_SECONDS PORT...

netlab.py starts it inside the switch's namespace for --delay. It learns addresses and forwards each
frame DELAY later, in order. It adds about 0.1 ms of its own and carries some 100,000 frames a
second in all (of up to 64 kB each, but with --loss no larger than the MTU).
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import sys
import time

ETHERTYPE_ALL = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_RCVBUFFORCE = 263, 15, 23, 33
VNET_HDR = 10  # bytes of struct virtio_net_hdr in front of each frame
FRAMES_PER_TURN = 64  # of one port, before the others are looked at
RECEIVE_BUFFER = 64 << 20


def open_port(name: str) -> socket.socket:
    """A raw socket on a port of the switch, for frames of up to 64 kB with their offload marks."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
    port.bind((name, ETHERTYPE_ALL))
    port.setblocking(False)
    return port


def relay(delay: float, ports: list[socket.socket]) -> None:
    """Forwards for ever."""
    port_of_mac: dict[bytes, socket.socket] = {}
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], patience)[0]:
            for _ in range(FRAMES_PER_TURN):
                try:
                    frame = port.recv(1 << 17)
                except OSError:  # nothing more, or the link is down
                    break
                port_of_mac[frame[VNET_HDR + 6 : VNET_HDR + 12]] = port
                waiting.append((time.monotonic() + delay, port, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, source, frame = waiting.popleft()
            known = port_of_mac.get(frame[VNET_HDR : VNET_HDR + 6])
            for port in [known] if known else [p for p in ports if p is not source]:
                # Lost if the port's queue is full or its link is down.
                with contextlib.suppress(OSError):
                    port.send(frame)


if __name__ == "__main__":
    opened = [open_port(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    relay(float(sys.argv[1]), opened)
