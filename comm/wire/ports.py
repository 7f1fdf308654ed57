"""A free port within a range, for sockets that listen."""

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
