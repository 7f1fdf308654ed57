"""Acceptor of incoming connections: nothing is read from one until the handshake has proven the job's secret.

The later protocol is unknown here. This module never imports torch, because the launcher uses it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from elastrain.base.event_loop import EventLoop
from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.handshake import Handshake
from elastrain.comm.wire.secure import Connection, SecureSocket

_ACCEPTED_PER_TURN = 16
_ACCEPT_AGAIN_S = 0.1
_CREDENTIALS = struct.Struct("3i")


class Introduction:
    """The handshake on one fresh, non-blocking connection."""

    def __init__(self, sock: socket.socket, handshake: Handshake, deadline_s: float) -> None:
        self.sock, self.handshake, self.deadline_s = sock, handshake, deadline_s
        self.has_heard = False
        """True once the other end has sent anything."""
        self._secure: SecureSocket | None = None

    @property
    def connection(self) -> Connection:
        """The connection to use once `advance` has returned True."""
        return self._secure or self.sock

    def advance(self) -> bool:
        """Go on with the handshake. Returns True once both ends are proven, and TCP is encrypted.

        Raises HandshakeRefused, which the other end is told, and OSError for a connection that ends or breaks.
        """
        try:
            while True:
                out = self.handshake.bytes_to_send()
                if out:
                    # A fresh connection takes a few hundred bytes; if not, the other end is not one of ours.
                    self.sock.sendall(out)
                if self.handshake.done:
                    return self._is_secure()
                # No more than it wants: what follows belongs to the next layer, descriptors included.
                data = self.sock.recv(self.handshake.wants())
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
                self.has_heard = True
                self.handshake.receive(data)
        except BlockingIOError:
            return False
        except HandshakeRefused:
            with suppress(OSError):  # it has gone already
                self.sock.send(self.handshake.bytes_to_send())
            raise

    def _is_secure(self) -> bool:
        if self.sock.family == socket.AF_UNIX:
            return True
        if self._secure is None:
            self._secure = SecureSocket(self.sock, self.handshake)
        return self._secure.establish()


@dataclass(frozen=True, kw_only=True)
class AcceptorEvents:
    """Callbacks from an acceptor to its owner."""

    new_handshake: Callable[[], Handshake]
    admit: Callable[[Handshake, Connection], str | None]  # takes the connection over, or returns why not
    refused: Callable[[str], None]
    tune: Callable[[socket.socket], None] = lambda _sock: None  # a fresh connection


@dataclass(frozen=True, kw_only=True)
class AcceptorLimits:
    """Limits of an acceptor: handshakes at a time, and the time for each."""

    introductions_max: int
    handshake_timeout_s: float


class Acceptor:
    """Server of listeners, which it owns. Only the loop's thread uses it."""

    def __init__(
        self, loop: EventLoop, listeners: Sequence[socket.socket], events: AcceptorEvents, limits: AcceptorLimits
    ) -> None:
        self._loop, self._listeners, self._events, self._limits = loop, tuple(listeners), events, limits
        self._introductions: set[Introduction] = set()
        self._again_s: float | None = None  # until then no caller is let in
        self._resume()

    @property
    def introductions(self) -> int:
        """Number of connections that are not proven yet."""
        return len(self._introductions)

    def _resume(self) -> None:
        self._again_s = None
        for listener in self._listeners:
            self._loop.register(listener, partial(self._on_connections, listener))

    def _pause(self) -> None:
        """Leave new connections in the kernel's queue for a while, because they would wake the loop without end.

        They are not closed: many may come at once, and a member whose connection is closed does not come again.
        """
        self._again_s = time.monotonic() + _ACCEPT_AGAIN_S
        for listener in self._listeners:
            self._loop.unregister(listener)

    def _on_connections(self, listener: socket.socket, _events: int) -> None:
        for _ in range(_ACCEPTED_PER_TURN):
            if len(self._introductions) >= self._limits.introductions_max:
                self._pause()
                return
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._pause()
                return  # else no connection is waiting any more, or the caller hung up
            sock.setblocking(False)
            self._events.tune(sock)
            if same_user(sock):
                self._introduce(sock)
            else:
                sock.close()

    def _introduce(self, sock: socket.socket) -> None:
        deadline_s = time.monotonic() + self._limits.handshake_timeout_s
        introduction = Introduction(sock, self._events.new_handshake(), deadline_s)
        self._introductions.add(introduction)
        self._loop.register(sock, lambda _events: self._advance(introduction))
        self._advance(introduction)

    def _advance(self, introduction: Introduction) -> None:
        try:
            if not introduction.advance():
                return
        except (HandshakeRefused, OSError) as error:
            if introduction.has_heard:
                self._dismiss(introduction, failure(error))
            else:  # the caller only tested if a process listens
                self._forget(introduction)
                introduction.sock.close()
            return
        self._forget(introduction)
        refusal = self._events.admit(introduction.handshake, introduction.connection)
        if refusal is not None:
            introduction.sock.close()
            self._events.refused(refusal)

    def _dismiss(self, introduction: Introduction, reason: str) -> None:
        self._forget(introduction)
        introduction.sock.close()
        self._events.refused(reason)

    def _forget(self, introduction: Introduction) -> None:
        self._introductions.discard(introduction)
        self._loop.unregister(introduction.sock)
        if self._again_s is not None:
            self._resume()

    def next_deadline_s(self) -> float | None:
        """Return the time.monotonic() at which `on_tick` is due, or None."""
        if not self._introductions:  # asked before every sleep, and mostly no caller comes
            return self._again_s
        deadlines = [introduction.deadline_s for introduction in self._introductions]
        return min([*deadlines, *([] if self._again_s is None else [self._again_s])])

    def on_tick(self, now_s: float) -> None:
        """Accept again after a pause, and close connections whose handshake is overdue."""
        if self._again_s is not None and self._again_s <= now_s:
            self._resume()
        for introduction in [each for each in self._introductions if each.deadline_s <= now_s]:
            self._dismiss(introduction, "it did not finish the handshake in time")

    def sockets(self) -> list[socket.socket]:
        """Return all open sockets."""
        return [*self._listeners, *(introduction.sock for introduction in self._introductions)]

    def close(self) -> None:
        """Close all sockets. Their registrations stay in the loop, which is closed next."""
        for sock in self.sockets():
            sock.close()


def failure(error: HandshakeRefused | OSError) -> str:
    """Return the reason why an introduction failed."""
    if isinstance(error, HandshakeRefused):
        return error.reason
    if isinstance(error, ConnectionResetError):
        return "the other end closed the connection during the handshake"
    return f"the connection broke during the handshake ({error.strerror})"


def same_user(sock: socket.socket) -> bool:
    """Return True if the other end of a UNIX socket runs as this user; always True for other sockets."""
    if sock.family != socket.AF_UNIX:
        return True
    _pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())
