"""Listening and dialling, up to an authenticated connection. An `Acceptor` serves incoming connections.

UNIX names are abstract, so nothing remains in a file system after a kill. No frames or views.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.base.event_loop import READ, WRITE, EventLoop
from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.acceptor import Acceptor, AcceptorEvents, AcceptorLimits, Introduction, failure, same_user
from elastrain.comm.wire.addresses import Credentials, MeshConfig, Peer
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.ports import bind_within, choose_address, connect, spell
from elastrain.comm.wire.secure import Connection

_INTRODUCTIONS_MAX = 256
_BACKLOG = 1024
_DIAL_AGAIN_S = 0.01
_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A member to dial. `tries`: attempts left if the connection breaks before the handshake is done."""

    peer: Peer
    address: str
    deadline_s: float
    patient: bool
    tries: int = _TRIES


@dataclass(kw_only=True, eq=False)
class _Dialled:
    """A dialled connection whose other end is not proven yet."""

    call: _Call
    introduction: Introduction
    connecting: bool

    @property
    def sock(self) -> socket.socket:
        return self.introduction.sock


@dataclass(frozen=True, kw_only=True)
class ConnectorEvents:
    """Callbacks from a connector to its owner. `on_open` takes the connection over."""

    on_open: Callable[[str, int, Connection, bool], None]  # member, its generation, non-blocking, whether we dialled
    # The member that we dialled (None: a stranger came), why, and whether that proves that its mesh is closed.
    on_refused: Callable[[str | None, str, bool], None]


class Connector:
    """A UNIX listener, a TCP listener if the transport is TCP, and the calls to other members."""

    def __init__(
        self, loop: EventLoop, events: ConnectorEvents, me: str, credentials: Credentials, config: MeshConfig
    ) -> None:
        if credentials.secret is None and not config.loopback:
            raise ValueError(f"links on {config.bind_host} need a secret: without one anybody in the network may join")
        self._loop, self._events, self._config = loop, events, config
        self._me, self._credentials = me, credentials
        self.generation = 0  # told to each peer that greets this member
        self._dialled: set[_Dialled] = set()
        self._dial_later: list[tuple[float, _Call]] = []
        listeners = [_listen_unix()]
        if config.transport == "tcp":
            listeners.append(_listen_tcp(config.bind_host, config.ports))
        self.address = ",".join(spell(listener) for listener in listeners)
        acceptor_events = AcceptorEvents(
            new_handshake=lambda: self._handshake(Role.ACCEPT),
            admit=self._admit,
            refused=lambda reason: events.on_refused(None, reason, False),
            tune=self._tune,
        )
        limits = AcceptorLimits(introductions_max=_INTRODUCTIONS_MAX, handshake_timeout_s=config.handshake_timeout_s)
        self._acceptor = Acceptor(loop, listeners, acceptor_events, limits)

    @property
    def under_way(self) -> int:
        """Number of calls and handshakes in progress."""
        return self._acceptor.introductions + len(self._dialled) + len(self._dial_later)

    def _admit(self, handshake: Handshake, connection: Connection) -> None:
        self._events.on_open(handshake.peer, handshake.peer_generation, connection, False)

    def _handshake(self, role: Role, expect: str | None = None) -> Handshake:
        secret, job = self._credentials.secret, self._credentials.job
        return Handshake(role, secret=secret, job=job, me=self._me, generation=self.generation, expect=expect)

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

    def dial(self, peer: Peer, *, same_node: bool, patient: bool = False) -> None:
        """Connect and shake hands; ends in one call of `on_open` or `on_refused`, unless `hang_up` comes first.

        `patient`: the other end may take any time to answer. Raises ValueError for an invalid address.
        """
        address = choose_address(peer.address, same_node=same_node)
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        self._dial(_Call(peer=peer, address=address, deadline_s=deadline_s, patient=patient))

    def _dial(self, call: _Call) -> None:
        peer, address = call.peer, call.address
        try:
            sock, result = connect(address)
        except OSError as error:  # no descriptor is left, for one
            self._events.on_refused(peer.id, f"no connection to {address}: {error.strerror}", False)
            return
        if result == errno.EAGAIN:  # the listener's queue is full just now
            sock.close()
            self._dial_later.append((time.monotonic() + _DIAL_AGAIN_S, call))
        elif result not in (0, errno.EINPROGRESS):
            sock.close()
            # Names of UNIX sockets are random: no other process will ever listen there.
            ended = result == errno.ECONNREFUSED and sock.family == socket.AF_UNIX
            self._events.on_refused(peer.id, f"no connection to {address}: {os.strerror(result)}", ended)
        else:
            self._tune(sock)
            self._greet(sock, call, connecting=result != 0)

    def is_dialling(self, member: str) -> bool:
        """Return True if a call to this member is in progress."""
        calls = [call for _, call in self._dial_later] + [dialled.call for dialled in self._dialled]
        return any(call.peer.id == member for call in calls)

    def _greet(self, sock: socket.socket, call: _Call, *, connecting: bool) -> None:
        deadline_s = call.deadline_s if connecting else self._handshake_deadline_s(call)
        introduction = Introduction(sock, self._handshake(Role.DIAL, call.peer.id), deadline_s)
        dialled = _Dialled(call=call, introduction=introduction, connecting=connecting)
        self._dialled.add(dialled)
        self._loop.register(sock, lambda _events: self._advance(dialled), WRITE if connecting else READ)
        if not connecting:
            self._advance(dialled)

    def _handshake_deadline_s(self, call: _Call) -> float:
        return math.inf if call.patient else time.monotonic() + self._config.handshake_timeout_s

    def _advance(self, dialled: _Dialled) -> None:
        try:
            if dialled.connecting and not self._finish_connect(dialled):
                return
            if not same_user(dialled.sock):
                raise HandshakeRefused("another user's process listens there")
            if not dialled.introduction.advance():
                return
        except HandshakeRefused as refusal:
            self._dismiss(dialled, refusal.reason)
            return
        except OSError as error:
            self._break_off(dialled, failure(error))
            return
        self._forget(dialled)
        handshake, connection = dialled.introduction.handshake, dialled.introduction.connection
        self._events.on_open(handshake.peer, handshake.peer_generation, connection, True)

    def _finish_connect(self, dialled: _Dialled) -> bool:
        code = dialled.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._dismiss(dialled, f"no connection: {os.strerror(code)}")
            return False
        dialled.connecting = False
        dialled.introduction.deadline_s = self._handshake_deadline_s(dialled.call)
        self._loop.modify(dialled.sock, READ)
        return True

    def _forget(self, dialled: _Dialled) -> None:
        self._dialled.discard(dialled)
        self._loop.unregister(dialled.sock)

    def _dismiss(self, dialled: _Dialled, reason: str) -> None:
        self._forget(dialled)
        dialled.sock.close()
        self._events.on_refused(dialled.call.peer.id, reason, False)

    def _break_off(self, dialled: _Dialled, reason: str) -> None:
        call = dialled.call
        if not call.patient or not call.tries:
            self._dismiss(dialled, reason)
            return
        # It has gone, which the next try will show; or we came to it in a bad moment.
        self._forget(dialled)
        dialled.sock.close()
        now_s = time.monotonic()
        deadline_s = now_s + self._config.connect_timeout_s
        again = dataclasses.replace(call, deadline_s=deadline_s, tries=call.tries - 1)
        self._dial_later.append((now_s + _DIAL_AGAIN_S, again))

    def hang_up(self, member: str) -> None:
        """Stop dialling this member, without a callback."""
        self._dial_later = [later for later in self._dial_later if later[1].peer.id != member]
        for dialled in [each for each in self._dialled if each.call.peer.id == member]:
            self._forget(dialled)
            dialled.sock.close()

    def next_deadline_s(self) -> float:
        """Return the time.monotonic() at which `run_timers` is due; inf if never."""
        accept_s = self._acceptor.next_deadline_s()
        due_s = math.inf if accept_s is None else accept_s
        if self._dialled or self._dial_later:  # asked before every sleep, and mostly no peer is dialled
            again = [again_s for again_s, _ in self._dial_later]
            due_s = min([due_s, *again, *[dialled.introduction.deadline_s for dialled in self._dialled]])
        return due_s

    def run_timers(self, now_s: float) -> None:
        """Do everything that is due."""
        self._acceptor.on_tick(now_s)
        for dialled in [each for each in self._dialled if each.introduction.deadline_s <= now_s]:
            self._dismiss(dialled, "it did not finish the handshake in time")
        due = [call for again_s, call in self._dial_later if again_s <= now_s]
        self._dial_later = [later for later in self._dial_later if later[0] > now_s]
        for call in due:
            if now_s < call.deadline_s:
                self._dial(call)
            else:
                self._events.on_refused(call.peer.id, f"no connection to {call.address}: it accepts none", False)

    def sockets(self) -> list[socket.socket]:
        """Return all open sockets."""
        return [*self._acceptor.sockets(), *(dialled.sock for dialled in self._dialled)]


def _listen_unix() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(f"\0elastrain-{secrets.token_hex(8)}")
    listener.listen(_BACKLOG)
    return listener


def _listen_tcp(bind_host: str, ports: tuple[int, int] | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        bind_within(listener, bind_host, ports)
    except OSError:
        listener.close()
        raise
    listener.listen(_BACKLOG)
    return listener
