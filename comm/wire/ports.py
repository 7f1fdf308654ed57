"""Sockets that connect to an address of a mesh, and a free port within a range for sockets that listen.

An address is `tcp:10.0.0.1:4711` or `unix:NAME,tcp:…`. Behind it, `device:NAME` is there if members on the same host
that have the same name read each other's device memory. The launcher imports this file without torch.
"""

from __future__ import annotations

import errno
import secrets
import socket


def bind_within(listener: socket.socket, host: str, ports: tuple[int, int] | None) -> None:
    """Bind the socket to a free port of the host, between the first and the last of `ports`, or any if that is None.

    Raises OSError if none is free, or if this machine has no such address.
    """
    if ports is None:
        listener.bind((host, 0))
        return
    first, last = ports
    count = last - first + 1
    # Processes of one machine begin at different ports, so that they seldom try the same one.
    start = secrets.randbelow(count)
    for number in range(count):
        try:
            listener.bind((host, first + (start + number) % count))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port from {first} to {last} is free on {host}")


def spell(listener: socket.socket) -> str:
    """Return the listener's address."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name[1:].decode()}"
    return f"tcp:{name[0]}:{name[1]}"


def choose_address(address: str, *, same_node: bool) -> str:
    """Return the part of a mesh's address to dial: UNIX inside a node, TCP between nodes.

    A peer that listens on a UNIX socket only is dialled there: its job runs on one host. Raises ValueError.
    """
    parts = [part for part in address.split(",") if part.partition(":")[0] in ("unix", "tcp")]
    if not parts:
        raise ValueError(f"{address!r} is no mesh address")
    wanted = "unix:" if same_node else "tcp:"
    return next((part for part in parts if part.startswith(wanted)), parts[0])


def with_device_domain(address: str, domain: str) -> str:
    """Return the address of a member whose device memory others of the domain read."""
    return f"{address},device:{domain}"


def device_domain(address: str) -> str:
    """Return the domain from an address of `with_device_domain`, or "" if it has none."""
    parts = (part.partition(":") for part in address.split(","))
    return next((name for scheme, _, name in parts if scheme == "device"), "")


def connect(address: str) -> tuple[socket.socket, int]:
    """Begin to connect a non-blocking socket to this address; returns it, and the result of `connect`."""
    scheme, _, where = address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        return sock, sock.connect_ex(f"\0{where}")
    host, _, port = where.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    return sock, sock.connect_ex((host, int(port)))
