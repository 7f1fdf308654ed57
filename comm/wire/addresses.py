"""Addresses of meshes as text, such as `tcp:10.0.0.1:4711` or `unix:NAME,tcp:…`: written, chosen from, connected to."""

from __future__ import annotations

import socket


def spell(listener: socket.socket) -> str:
    """Where it is reached."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name[1:].decode()}"
    return f"tcp:{name[0]}:{name[1]}"


def choose_address(address: str, *, same_node: bool) -> str:
    """The part of a mesh's address to dial: UNIX inside a node, TCP between nodes where the peer listens there.

    A peer that only listens on a UNIX socket is taken at its word: its job runs on one host. Raises ValueError.
    """
    parts = [part for part in address.split(",") if part.partition(":")[0] in ("unix", "tcp")]
    if not parts:
        raise ValueError(f"{address!r} is no mesh address")
    wanted = "unix:" if same_node else "tcp:"
    return next((part for part in parts if part.startswith(wanted)), parts[0])


def connect(address: str) -> tuple[socket.socket, int]:
    """A non-blocking socket on its way to this address, and what `connect` said."""
    scheme, _, where = address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        return sock, sock.connect_ex(f"\0{where}")
    host, _, port = where.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    return sock, sock.connect_ex((host, int(port)))
