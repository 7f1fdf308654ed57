"""Ports for servers that tests start as other processes."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import ExitStack, suppress

_FIRST, _EACH = 20000, 1000
"""First port of all, and ports of each process of the tests.

They lie below those that the kernel gives away by itself (32768 to 60999). Such a port may be taken by any process
between the look and the start of the server.
"""
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_NUMBERS = itertools.count(os.getpid() % _EACH)


def free_ports(count: int = 1) -> list[int]:
    """Return consecutive ports that are free on loopback, and that no other process of these tests gets."""
    for _ in range(_EACH):
        ports = [_FIRST + _WORKER * _EACH + next(_NUMBERS) % _EACH for _ in range(count)]
        if ports[-1] - ports[0] != count - 1:
            continue
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports
    raise AssertionError(f"no {count} free ports")
