"""A proven connection for a thread that waits: all bytes are sent, or exactly so many received.

Torch may never come in: the launcher uses it.
"""

from __future__ import annotations

import select

from elastrain.comm.errors import Timeout
from elastrain.comm.wire.secure import Connection, SecureSocket


class BlockingStream:
    """Over a connection that never blocks; for one thread at a time. `timeout_s`: how long nothing may move."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """All of it. Raises OSError, Timeout."""
        rest = memoryview(data)
        while rest.nbytes:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def receive_into(self, view: memoryview) -> None:
        """Fill it. Raises EOFError where the other end has closed the connection, OSError, Timeout."""
        rest = view
        while rest.nbytes:
            try:
                size_bytes = self._connection.recv_into(rest)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            if not size_bytes:
                raise EOFError("the other end has closed the connection")
            rest = rest[size_bytes:]

    def receive(self, size_bytes: int) -> bytes:
        """Raises as `receive_into`."""
        data = bytearray(size_bytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def close(self) -> None:
        self._connection.close()

    def _wait(self, events: int) -> None:
        if isinstance(self._connection, SecureSocket) and events == select.POLLIN and self._connection.holds_more:
            return
        poll = select.poll()
        poll.register(self._connection.fileno(), events)
        if not poll.poll(self._timeout_s * 1000):
            raise Timeout(f"nothing moved for {self._timeout_s:g} s: the other end is stuck")
