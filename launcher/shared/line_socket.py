"""Non-blocking sockets that carry JSON lines between agents, workers and the operator's commands.

Only bytes and lines are handled here. Other modules encode and decode the messages.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from elastrain.base.line_files import LineBuffer
from elastrain.comm.wire.secure import Connection, SecureSocket
from elastrain.protocol.codec import LINE_BYTES_MAX, BadMessageError

_READ_BYTES = 1 << 16
_FDS_MAX = 4
_QUEUE_BYTES_MAX = 8 * LINE_BYTES_MAX
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, kw_only=True)
class Received:
    """Result of one read: lines, file descriptors, and whether the other end has closed the connection."""

    lines: tuple[bytes, ...] = ()
    fds: tuple[int, ...] = ()
    closed: bool = False


class LineSocket:
    """One connection. `receive` and `flush` never block; the owner calls them when the socket is ready."""

    def __init__(self, sock: Connection) -> None:
        if isinstance(sock, socket.socket):
            sock.setblocking(False)
        self.sock = sock
        self._lines = LineBuffer(LINE_BYTES_MAX)
        self._out = bytearray()

    @property
    def wants_to_write(self) -> bool:
        """True if queued bytes wait for the socket to become writable."""
        return bool(self._out)

    def receive(self) -> Received:
        """Read everything that has arrived. The caller must close the descriptors.

        Raises BadMessageError if a line is too long.
        """
        fds: list[int] = []
        came = bytearray()
        closed = False
        while True:
            try:
                data, new_fds = self._read()
            except BlockingIOError:
                break
            except OSError:
                closed = True
                break
            fds += new_fds
            came += data
            if not data:
                closed = True
                break
        try:
            lines = self._lines.feed(bytes(came))
        except ValueError as error:
            for fd in fds:
                os.close(fd)
            raise BadMessageError(str(error)) from None
        return Received(lines=tuple(lines), fds=tuple(fds), closed=closed)

    def _read(self) -> tuple[bytes, list[int]]:
        if isinstance(self.sock, SecureSocket):
            return self.sock.recv(_READ_BYTES), []
        data, fds, _, _ = socket.recv_fds(self.sock, _READ_BYTES, _FDS_MAX)
        return data, fds

    def send(self, line: bytes) -> bool:
        """Queue the line and write as much as possible. Returns False if the other end is gone or reads nothing."""
        self._out += line
        return self.flush() and len(self._out) <= _QUEUE_BYTES_MAX

    def flush(self) -> bool:
        """Write as many queued bytes as possible. Returns False if the other end is gone."""
        try:
            while self._out:
                del self._out[: self.sock.send(self._out)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a UNIX socket, as reported by the kernel."""
    return peer(sock)[1]


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id at the other end of a UNIX socket, as reported by the kernel."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(raw)
    return pid, uid
