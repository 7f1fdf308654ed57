"""Listening, dialling, and the handshake on every new connection; what leaves here is an authenticated socket.

Abstract UNIX names: nothing is left in any file system after a kill. Nothing here knows of frames or views.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elastrain.base.event_loop import READ, WRITE, EventLoop
from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.values import Credentials, MeshConfig, Peer

_GREETINGS_MAX = 256
_BACKLOG = 1024
_DIAL_AGAIN_S = 0.01
_ACCEPT_AGAIN_S = 0.1
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Somebody whom we dial. `tries` that are left should the connection break before the other end is proven."""

    peer: Peer
    address: str
    deadline_s: float
    patient: bool
    tries: int = _TRIES


@dataclass(kw_only=True, eq=False)
class _Greeting:
    """A connection whose other end is not proven yet. `call`: by which we dialled; None when somebody came to us."""

    sock: socket.socket
    handshake: Handshake
    deadline_s: float
    call: _Call | None = None
    connecting: bool = False


@dataclass(frozen=True, kw_only=True)
class DoorEvents:
    """What the door tells its owner; `on_open` takes the socket over."""

    on_open: Callable[[str, int, socket.socket, bool], None]  # member, its generation, non-blocking socket, we dialled
    # Whom we dialled (None: a stranger came), why, and whether that proves that its mesh is closed.
    on_refused: Callable[[str | None, str, bool], None]


class Door:
    """One UNIX listener, and a TCP one where the transport asks for it."""

    def __init__(
        self, loop: EventLoop, events: DoorEvents, me: str, credentials: Credentials, config: MeshConfig
    ) -> None:
        if credentials.secret is None and not config.loopback:
            raise ValueError(f"links on {config.bind_host} need a secret: without one anybody in the network may join")
        self._loop, self._events, self._config = loop, events, config
        self._me, self._credentials = me, credentials
        self.generation = 0  # told to whoever greets us
        self._greetings: set[_Greeting] = set()
        self._dial_later: list[tuple[float, _Call]] = []
        self._accept_again_s: float | None = None  # until then nobody is let in
        self._listeners = [self._listen_unix()]
        if config.transport == "tcp":
            self._listeners.append(self._listen_tcp())
        self._open_up()
        self.address = ",".join(_spell(listener) for listener in self._listeners)

    def _listen_unix(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(f"\0elastrain-{secrets.token_hex(8)}")
        listener.listen(_BACKLOG)
        return listener

    def _listen_tcp(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._config.bind_host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind((self._config.bind_host, 0))
        listener.listen(_BACKLOG)
        return listener

    def _open_up(self) -> None:
        self._accept_again_s = None
        for listener in self._listeners:
            self._loop.register(listener, partial(self._accept, listener))

    def _shut(self) -> None:
        """Who comes waits in the kernel's queue. Without a pause it would wake us without end."""
        self._accept_again_s = time.monotonic() + _ACCEPT_AGAIN_S
        for listener in self._listeners:
            self._loop.unregister(listener)

    def _accept(self, listener: socket.socket, _events: int) -> None:
        for _ in range(16):
            if len(self._greetings) >= _GREETINGS_MAX:
                # Not hung up on: many members may come at once, and who is hung up on does not come again.
                self._shut()
                return
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._shut()
                return  # else nobody is waiting any more, or the caller hung up
            sock.setblocking(False)
            self._tune(sock)
            if not _same_user(sock):
                sock.close()
                continue
            self._greet(sock, Role.ACCEPT)

    def dial(self, peer: Peer, *, same_node: bool, patient: bool = False) -> None:
        """Connect and greet; ends in one call of `on_open` or `on_refused`, unless `hang_up` comes first.

        `patient`: whoever listens there may take any time to answer. Raises ValueError for an address that is none.
        """
        address = choose_address(peer.address, same_node=same_node)
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        self._dial(_Call(peer=peer, address=address, deadline_s=deadline_s, patient=patient))

    def _dial(self, call: _Call) -> None:
        peer, address = call.peer, call.address
        try:
            sock, result = _connect(address)
        except OSError as error:  # no descriptor is left, for one
            self._events.on_refused(peer.id, f"no connection to {address}: {error.strerror}", False)
            return
        if result == errno.EAGAIN:  # the listener's queue is full just now
            sock.close()
            self._dial_later.append((time.monotonic() + _DIAL_AGAIN_S, call))
        elif result not in (0, errno.EINPROGRESS):
            sock.close()
            # Names of UNIX sockets are random: nobody else will ever listen there.
            ended = result == errno.ECONNREFUSED and sock.family == socket.AF_UNIX
            self._events.on_refused(peer.id, f"no connection to {address}: {os.strerror(result)}", ended)
        else:
            self._tune(sock)
            self._greet(sock, Role.DIAL, call=call, connecting=result != 0)

    def is_dialling(self, member: str) -> bool:
        """Whether a call to this member is under way."""
        calls = [later[1].peer for later in self._dial_later] + [g.call.peer for g in self._greetings if g.call]
        return any(peer.id == member for peer in calls)

    def _tune(self, sock: socket.socket) -> None:
        if sock.family == socket.AF_UNIX:
            return
        silence_s = max(int(self._config.tcp_silence_s / 3), 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's keepalive is the heartbeat: it goes on while this process computes, and stops when the host dies.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silence_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, silence_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._config.tcp_silence_s * 1000))

    def _greet(self, sock: socket.socket, role: Role, *, call: _Call | None = None, connecting: bool = False) -> None:
        handshake = Handshake(
            role,
            secret=self._credentials.secret,
            job=self._credentials.job,
            me=self._me,
            generation=self.generation,
            expect=call.peer.id if call else None,
        )
        greeting = _Greeting(
            sock=sock,
            handshake=handshake,
            deadline_s=call.deadline_s if call and connecting else self._handshake_deadline_s(call),
            call=call,
            connecting=connecting,
        )
        self._greetings.add(greeting)
        self._loop.register(sock, lambda _events: self._advance(greeting), WRITE if connecting else READ)
        if not connecting:
            self._advance(greeting)

    def _handshake_deadline_s(self, call: _Call | None) -> float:
        return math.inf if call and call.patient else time.monotonic() + self._config.handshake_timeout_s

    def _advance(self, greeting: _Greeting) -> None:
        try:
            if greeting.connecting and not self._finish_connect(greeting):
                return
            self._exchange(greeting)
        except BlockingIOError:
            return
        except HandshakeRefused as refusal:
            try:
                greeting.sock.send(greeting.handshake.bytes_to_send())  # tell the other end why
            except OSError:
                pass  # it has gone already
            self._dismiss(greeting, refusal.reason)
        except ConnectionResetError:
            self._break_off(greeting, "the other end closed the connection during the handshake")
        except OSError as error:
            self._break_off(greeting, f"the connection broke during the handshake ({error.strerror})")

    def _finish_connect(self, greeting: _Greeting) -> bool:
        code = greeting.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._dismiss(greeting, f"no connection: {os.strerror(code)}")
            return False
        greeting.connecting = False
        greeting.deadline_s = self._handshake_deadline_s(greeting.call)
        self._loop.modify(greeting.sock, READ)
        return True

    def _exchange(self, greeting: _Greeting) -> None:
        handshake, sock = greeting.handshake, greeting.sock
        if greeting.call is not None and not _same_user(sock):
            raise HandshakeRefused("another user's process listens there")
        while True:
            out = handshake.bytes_to_send()
            if out:
                # A fresh connection takes a few hundred bytes; if not, the other end is not one of ours.
                sock.sendall(out)
            if handshake.done:
                break
            data = sock.recv(handshake.wants())
            if not data:
                raise ConnectionResetError
            handshake.receive(data)
        self._forget(greeting)
        self._events.on_open(handshake.peer, handshake.peer_generation, sock, greeting.call is not None)

    def _forget(self, greeting: _Greeting) -> None:
        self._greetings.discard(greeting)
        self._loop.unregister(greeting.sock)

    def _dismiss(self, greeting: _Greeting, reason: str) -> None:
        self._forget(greeting)
        greeting.sock.close()
        self._events.on_refused(greeting.call.peer.id if greeting.call else None, reason, False)

    def _break_off(self, greeting: _Greeting, reason: str) -> None:
        call = greeting.call
        if call is None or not call.patient or not call.tries:
            self._dismiss(greeting, reason)
            return
        # It has gone, which the next try will show; or we came to it in a bad moment.
        self._forget(greeting)
        greeting.sock.close()
        now_s = time.monotonic()
        deadline_s = now_s + self._config.connect_timeout_s
        again = dataclasses.replace(call, deadline_s=deadline_s, tries=call.tries - 1)
        self._dial_later.append((now_s + _DIAL_AGAIN_S, again))

    def hang_up(self, member: str) -> None:
        """Give up dialling this member; nothing is told."""
        self._dial_later = [later for later in self._dial_later if later[1].peer.id != member]
        for greeting in [g for g in self._greetings if g.call is not None and g.call.peer.id == member]:
            self._forget(greeting)
            greeting.sock.close()

    def next_deadline_s(self) -> float | None:
        """When `run_timers` has something to do, in time.monotonic()."""
        deadlines = [greeting.deadline_s for greeting in self._greetings]
        if self._accept_again_s is not None:
            deadlines.append(self._accept_again_s)
        return min([*deadlines, *[later[0] for later in self._dial_later]], default=None)

    def run_timers(self, now_s: float) -> None:
        if self._accept_again_s is not None and self._accept_again_s <= now_s:
            self._open_up()
        for greeting in [g for g in self._greetings if g.deadline_s <= now_s]:
            self._dismiss(greeting, "it did not finish the handshake in time")
        due = [later for later in self._dial_later if later[0] <= now_s]
        self._dial_later = [later for later in self._dial_later if later[0] > now_s]
        for _, call in due:
            if now_s < call.deadline_s:
                self._dial(call)
            else:
                self._events.on_refused(call.peer.id, f"no connection to {call.address}: it accepts nobody", False)

    def sockets(self) -> list[socket.socket]:
        return [*self._listeners, *(greeting.sock for greeting in self._greetings)]


def _connect(address: str) -> tuple[socket.socket, int]:
    """A non-blocking socket on its way to this address, and what `connect` said."""
    scheme, _, where = address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        return sock, sock.connect_ex(f"\0{where}")
    host, _, port = where.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    return sock, sock.connect_ex((host, int(port)))


def _same_user(sock: socket.socket) -> bool:
    if sock.family != socket.AF_UNIX:
        return True
    _pid, uid, _gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.geteuid())


def _spell(listener: socket.socket) -> str:
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
