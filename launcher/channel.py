"""Non-blocking sockets that carry JSON lines: the workers' channel and the operator's. Bytes in, lines out.

What the lines say is known to those who encode and decode them; nothing here decides.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from elastrain.codec import LINE_BYTES_MAX, BadMessageError

_READ_BYTES = 1 << 16
_FDS_MAX = 4
_QUEUE_BYTES_MAX = 8 * LINE_BYTES_MAX
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, kw_only=True)
class Received:
    """What one read brought. `closed`: the other end will say no more."""

    lines: tuple[bytes, ...] = ()
    fds: tuple[int, ...] = ()
    closed: bool = False


class Channel:
    """One connected stream socket. `receive` and `flush` never block; the owner calls them when the socket is ready."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._in = bytearray()
        self._out = bytearray()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._out)

    def receive(self) -> Received:
        """All that is there now. The caller owns the descriptors. Raises BadMessageError if a line is too long."""
        fds: list[int] = []
        closed = False
        while True:
            try:
                data, came, _, _ = socket.recv_fds(self.sock, _READ_BYTES, _FDS_MAX)
            except BlockingIOError:
                break
            except OSError:
                closed = True
                break
            fds += came
            self._in += data
            if not data:
                closed = True
                break
        *lines, rest = self._in.split(b"\n")
        self._in = rest
        if len(rest) >= LINE_BYTES_MAX or any(len(line) >= LINE_BYTES_MAX for line in lines):
            for fd in fds:
                os.close(fd)
            raise BadMessageError(f"a line longer than {LINE_BYTES_MAX} bytes")
        return Received(lines=tuple(bytes(line) for line in lines), fds=tuple(fds), closed=closed)

    def send(self, line: bytes) -> bool:
        """Queue the line and write what can be written. False if the other end is gone or reads nothing."""
        self._out += line
        return self.flush() and len(self._out) <= _QUEUE_BYTES_MAX

    def flush(self) -> bool:
        """Write what can be written now. False if the other end is gone."""
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.sock.close()


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a UNIX socket, as the kernel knows it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])
