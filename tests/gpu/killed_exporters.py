"""One process reads the device memory of many, each of which is killed in the middle of a kernel.

`python -m tests.gpu.killed_exporters KIND ROUNDS` prints a line of JSON: how many rounds there were, in how many the
reader read on with its context intact, and the seconds. The processes that export are forks of one that has imported
torch and never uses a device. Some of them start while an earlier one is read.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
import uuid

import torch

from elastrain.device.device_sharing import PROVIDERS, made
from elastrain.device.sharing_probe import export, read_on

BESIDE = 3
"""Exporters that start or wait at a time."""
START_S = 60.0
_PEER = struct.Struct("3i")
"""Pid, user and group of the process at the other end of a socket."""


def main() -> None:
    kind, rounds = sys.argv[1], int(sys.argv[2])
    if kind == "late":
        from tests.support.late import sharing

        sharing.set_up()
    address = f"\0killed-exporters-{uuid.uuid4().hex}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(BESIDE)
    listener.settimeout(START_S)
    asks, orders = socket.socketpair()
    if not os.fork():
        listener.close()
        asks.close()
        _fork_exporters(PROVIDERS[kind], address, orders)
    orders.close()
    began_s, equal = time.perf_counter(), 0
    own = made(PROVIDERS[kind], 0)
    kept = torch.arange(1 << 16, device=kind)
    asks.send(b"n" * min(BESIDE, rounds))
    for number in range(rounds):
        exporter, _ = listener.accept()
        readable = read_on(own, exporter, lambda exporter=exporter: _kill(exporter))  # type: ignore[misc]
        is_whole = bool(torch.equal(kept.cpu(), torch.arange(1 << 16)))  # its own memory, and its context
        equal += readable == [0] and is_whole
        exporter.close()
        if number + BESIDE < rounds:
            asks.send(b"n")
    found = {"rounds": rounds, "equal": equal, "seconds": time.perf_counter() - began_s}
    sys.stdout.write(json.dumps(found) + "\n")


def _fork_exporters(provider: str, address: str, orders: socket.socket) -> None:
    """Fork an exporter for each byte that comes, until the reader ends. Never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes the dead away
    while orders.recv(1):
        if not os.fork():
            orders.close()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(address)
            export(made(provider, 0), sock)
    os._exit(0)


def _kill(exporter: socket.socket) -> None:
    """Kill the process at the other end, and wait until the kernel has closed its sockets."""
    pid, _, _ = _PEER.unpack(exporter.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    os.kill(pid, signal.SIGKILL)
    while exporter.recv(1):
        pass


if __name__ == "__main__":
    main()
