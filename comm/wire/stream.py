"""One connected socket as a stream of frames: a queue of bytes and descriptors to go out, a parser for what comes in.

Never blocks. Nothing here knows of members, generations or views.
"""

from __future__ import annotations

import array
import collections
import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.comm.errors import OutOfMemory, ProtocolError
from elastrain.comm.wire.frames import Caps, Parser, RawFrame
from elastrain.comm.wire.secure import Connection, SecureSocket

_BUFFERS_PER_CALL = 64
_CALLS_PER_TURN = 32  # so that one busy link leaves the others their turn
_FDS_PER_CALL = 16
_FDS_WAITING_MAX = 64
_UNSENT = 0x894B
"""The kernel's SIOCOUTQNSD."""
_BULK_BYTES = 128 << 10
"""Frames of at least so many bytes are timed. Smaller ones arrive in one piece, whatever the rate is."""


@dataclass(kw_only=True)
class _Piece:
    view: memoryview
    fd: int | None
    done: Callable[[], None] | None


class Outbox:
    """Pieces of memory that wait to be sent, in order. They are not copied: they must not change until sent."""

    def __init__(self) -> None:
        self._pieces: collections.deque[_Piece] = collections.deque()
        self.size_bytes = 0

    def push(self, data: bytes | memoryview, *, fd: int | None = None, done: Callable[[], None] | None = None) -> None:
        """Queue non-empty `data`. `fd` travels with its first byte; `done` is called when it is sent or dropped.

        Raises OutOfMemory when there is no descriptor left for a copy of `fd`.
        """
        own_fd = None if fd is None else _copy(fd)
        self._pieces.append(_Piece(view=memoryview(data), fd=own_fd, done=done))
        self.size_bytes += len(data)

    def batch(self) -> tuple[list[memoryview], int | None]:
        """Return the pieces for one call: a descriptor may only go with the first piece."""
        views: list[memoryview] = []
        for piece in self._pieces:
            if len(views) == _BUFFERS_PER_CALL or (views and piece.fd is not None):
                break
            views.append(piece.view)
        return views, self._pieces[0].fd

    def sent(self, size_bytes: int) -> None:
        """Drop bytes that were sent."""
        self.size_bytes -= size_bytes
        while size_bytes:
            piece = self._pieces[0]
            self._drop_fd(piece)
            if size_bytes < len(piece.view):
                piece.view = piece.view[size_bytes:]
                return
            size_bytes -= len(piece.view)
            self._finish(self._pieces.popleft())

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def copy(self) -> None:
        """Copy what waits: the memory behind it may change from now on."""
        for piece in self._pieces:
            piece.view = memoryview(bytes(piece.view))

    def clear(self) -> None:
        """Drop everything."""
        self.size_bytes = 0
        while self._pieces:
            self._finish(self._pieces.popleft())

    def _finish(self, piece: _Piece) -> None:
        self._drop_fd(piece)
        if piece.done is not None:
            piece.done()

    def _drop_fd(self, piece: _Piece) -> None:
        if piece.fd is not None:
            os.close(piece.fd)
            piece.fd = None


def _copy(fd: int) -> int:
    try:
        return os.dup(fd)
    except OSError as error:
        raise OutOfMemory(f"a copy of a descriptor could not be had ({error.strerror}): RLIMIT_NOFILE") from error


class Stream:
    """A non-blocking connected socket. `ended`: None, or the reason why nothing more comes."""

    def __init__(
        self, sock: Connection, outbox: Outbox, caps: Caps, tamper: Callable[[memoryview], memoryview] | None = None
    ) -> None:
        """`tamper`: see `Mesh`."""
        self.sock = sock
        self._tamper = tamper
        if isinstance(sock, SecureSocket):
            sock.tamper, self._tamper = tamper, None  # what is changed before it is sealed arrives as if it were right
        self.ended: str | None = None
        self._outbox = outbox
        self._parser = Parser(caps)
        self._fds: collections.deque[int] = collections.deque()
        self._open: tuple[float, int] | None = None
        """Time when the first bytes of a frame were read that has come in part, and the number of bytes after these."""
        self._timed: tuple[int, float] = 0, 0.0

    def take_timed(self) -> tuple[int, float]:
        """Return the bytes of large frames, and the seconds in which they came in, since the last call."""
        timed, self._timed = self._timed, (0, 0.0)
        return timed

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the kernel has taken and not sent yet. 0 for a socket on this host."""
        if self.sock.family == socket.AF_UNIX:
            return 0
        found = array.array("i", [0])
        with contextlib.suppress(OSError):  # the connection has ended
            fcntl.ioctl(self.sock.fileno(), _UNSENT, found)
        return found[0]

    def _time(self, size_bytes: int, *, is_whole: bool) -> None:
        """Note that bytes were read. `is_whole`: a frame has ended with them."""
        now_s = time.monotonic()
        # What a link lets through at once after a rest says nothing about its rate, so the first bytes do not count.
        since_s, before = self._open or (now_s, -size_bytes)
        coming = before + size_bytes
        self._open = None if is_whole else (since_s, coming)
        if is_whole and coming >= _BULK_BYTES:
            self._timed = self._timed[0] + coming, self._timed[1] + now_s - since_s

    @property
    def holds_more(self) -> bool:
        """True if bytes can be pulled that the kernel does not report."""
        return isinstance(self.sock, SecureSocket) and self.sock.holds_more and self.ended is None

    def flush(self) -> bool:
        """Send what the socket takes now; True when nothing is left. Raises OSError when the connection is broken."""
        for _ in range(_CALLS_PER_TURN):
            if not self._outbox:
                return True
            views, fd = self._outbox.batch()
            if self._tamper is not None:
                views[0] = self._tamper(views[0])
            rights = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            try:
                sent = self.sock.sendmsg(views, rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            self._outbox.sent(sent)
        return not self._outbox

    def pull(self, *, everything: bool = False) -> list[RawFrame]:
        """Return the frames that have arrived; with `everything`, read until the socket is empty or at its end."""
        frames: list[RawFrame] = []
        turns = read_bytes = 0
        while self.ended is None and (everything or turns < _CALLS_PER_TURN):
            turns += 1
            view = self._parser.buffer()
            try:
                size_bytes = self._receive(view)
                if size_bytes == 0:
                    self.ended = "it closed the connection"
                else:
                    self._parser.received(size_bytes, frames)
            except BlockingIOError:
                break
            except ProtocolError as error:
                self.ended = f"it broke the protocol: {error}"
            except OSError as error:
                self.ended = f"its connection broke ({error.strerror})"
            else:
                read_bytes += size_bytes
                if size_bytes < len(view) and not everything:
                    break
        if read_bytes:
            self._time(read_bytes, is_whole=bool(frames))
        return frames

    def _receive(self, view: memoryview) -> int:
        if isinstance(self.sock, SecureSocket) or self.sock.family != socket.AF_UNIX:
            return self.sock.recv_into(view)
        space = socket.CMSG_SPACE(_FDS_PER_CALL * array.array("i").itemsize)
        size_bytes, ancillary, flags, _ = self.sock.recvmsg_into([view], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC or len(self._fds) > _FDS_WAITING_MAX:
            raise ProtocolError(
                "more descriptors arrived than frames ask for, or than this process may open (RLIMIT_NOFILE)"
            )
        return size_bytes

    def take_fd(self) -> int:
        """Return the next descriptor that arrived; the caller closes it. Raises ProtocolError if there is none."""
        if not self._fds:
            raise ProtocolError("a frame speaks of a descriptor that did not come with it")
        return self._fds.popleft()

    def close(self) -> None:
        """Close the socket and what came through it. Does not shut the connection down: a fork may close its copy."""
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())
