"""Links between agents: one authenticated TCP connection to each other node, re-established when lost, with heartbeats.

The agent with the later incarnation dials. A separate thread sends the heartbeats, so that a busy agent (it may start a
worker) is not considered dead. Links report which agents answer; `core` decides what follows.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from elastrain.base.disk_protocol import READER
from elastrain.base.event_loop import EventLoop
from elastrain.comm.errors import CommError
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.ports import bind_within
from elastrain.comm.wire.secure import Connection, dial
from elastrain.launcher.nodes.door import open_door
from elastrain.launcher.shared import clocks
from elastrain.launcher.shared.job_values import NodeRecord
from elastrain.launcher.shared.line_socket import LineSocket
from elastrain.launcher.shared.notices import NOTICE, Beat, Notice
from elastrain.launcher.store.store_thread import Inbox
from elastrain.protocol.codec import BadMessageError

BEAT_S = 0.5
SILENCE_S = 2.5
"""Time without a message after which an agent is silent: five heartbeats were lost."""
_UNACKED_S = 5.0
"""Time without acknowledgement after which a connection is replaced.

The kernel itself would retry at growing intervals.
"""
_DIAL_S = 2.0
_DIAL_AGAIN_S = 0.2
_EARLY_MAX = 64


@dataclass(kw_only=True, eq=False)
class _Link:
    """The link to another node's agent. Two threads send on it; the loop's thread owns everything else."""

    record: NodeRecord
    channel: LineSocket | None = None
    up: bool = False
    heard_s: float = 0.0
    dialling: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        return self.record.signature


@dataclass(frozen=True, kw_only=True)
class LinkEvents:
    """Callbacks that report changes of links and received notices."""

    on_up: Callable[[str, str], None]  # node, reason
    on_down: Callable[[str, str, bool], None]  # node, reason, port closed: the machine lives, but not the agent
    on_notice: Callable[[str, Notice], None]
    # serve a worker that reads from this node's disk, or return the reason for a refusal
    on_reader: Callable[[str, Connection], str | None]
    log_refusal: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class AgentPassport:
    """The identity by which agents of one job authenticate each other. The agent listens at the record's endpoint."""

    secret: bytes
    job: str
    record: NodeRecord

    @property
    def signature(self) -> str:
        """Name of this node in handshakes: name and incarnation."""
        return self.record.signature


class Links:
    """Links to all nodes that `follow` names. `passport` is this node's identity."""

    def __init__(
        self, loop: EventLoop, inbox: Inbox, listener: socket.socket, passport: AgentPassport, events: LinkEvents
    ) -> None:
        self._loop, self._inbox, self._passport, self._events = loop, inbox, passport, events
        self._links: dict[str, _Link] = {}
        self._early: dict[str, LineSocket] = {}
        """Agents that dialled before the store's news of them. They get heartbeats, and notices that go to all."""
        self._early_lock = threading.Lock()
        self._closed = threading.Event()
        handshake = lambda: Handshake(  # noqa: E731
            Role.ACCEPT, secret=passport.secret, job=passport.job, me=passport.signature
        )
        self._door = open_door(loop, listener, handshake, self._admit, events.log_refusal)
        self._beats = threading.Thread(target=self._beat, name="elastrain-heartbeats", daemon=True)
        self._beats.start()

    def follow(self, records: Mapping[str, NodeRecord]) -> None:
        """Link to these nodes: those with a key, and those whose key has just gone but that still answer."""
        for name, record in records.items():
            known = self._links.get(name)
            if known is not None and known.record.incarnation == record.incarnation:
                known.record = record
                continue
            if known is not None:
                self._hang_up(known)
            link = self._links[name] = _Link(record=record, heard_s=time.monotonic())
            with self._early_lock:
                early = self._early.pop(link.name, None)
            if early is not None:
                self._connect(link, early)
            elif record.incarnation < self._passport.record.incarnation:
                self._dial(link)

    def keep(self, nodes: Collection[str]) -> None:
        """Close the links to all other nodes, which are dead."""
        for name in [name for name in self._links if name not in nodes]:
            self._hang_up(self._links.pop(name))

    def answering(self) -> dict[str, int]:
        """Return the nodes whose agents answer, and their incarnations."""
        return {name: link.record.incarnation for name, link in self._links.items() if link.up}

    def tell(self, notice: Notice, node: str | None = None) -> None:
        """Send a notice to one node, or to all, including agents that dialled before the store's news of them.

        A node that does not answer misses the notice. The next view contains what it needs to know.
        """
        for name, link in list(self._links.items()):
            if node in (None, name) and link.channel is not None and not self._send(link, notice):
                self._broken(link, "its connection broke")
        if node is None:
            self._tell_early(notice)

    def hear_all(self) -> None:
        """Read all that has arrived on any link."""
        for link in list(self._links.values()):
            if link.channel is not None:
                self._on_bytes(link)

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time of the next deadline, or None."""
        dues = [link.heard_s + SILENCE_S for link in self._links.values() if link.up]
        door = self._door.next_deadline_s()
        return min(dues + ([door] if door is not None else []), default=None)

    def on_tick(self, now: float) -> None:
        """Report agents as silent if nothing was heard for `SILENCE_S`."""
        self._door.on_tick(now)
        overdue = [link for link in self._links.values() if link.up and link.heard_s + SILENCE_S <= now]
        for link in overdue:
            # What arrived while this loop was busy counts.
            if link.channel is not None:
                self._on_bytes(link)
            if link.up and link.heard_s + SILENCE_S <= now:
                self._down(link, f"nothing was heard of it for {SILENCE_S:g} s")

    def close(self) -> None:
        """Stop the heartbeats and close all connections."""
        self._closed.set()
        self._beats.join()
        for link in self._links.values():
            self._hang_up(link)
        for channel in self._early.values():
            channel.close()
        self._door.close()

    def _admit(self, name: str, sock: Connection) -> str | None:
        if name.startswith(READER):
            return self._events.on_reader(name, sock)
        link = next((link for link in self._links.values() if link.name == name), None)
        if link is not None:
            self._connect(link, _channel(sock))
        elif name in self._early or len(self._early) < _EARLY_MAX:  # the agent dialled before the store's news of it
            self._keep_early(name, _channel(sock))
        else:
            return f"{name} is no node that this agent knows of"
        return None

    def _keep_early(self, name: str, channel: LineSocket) -> None:
        with self._early_lock:
            older, self._early[name] = self._early.get(name), channel
        if older is not None:
            older.close()

    def _connect(self, link: _Link, channel: LineSocket) -> None:
        self._hang_up(link)
        link.channel, link.heard_s = channel, time.monotonic()
        self._loop.register(channel.sock, lambda _events: self._on_bytes(link))
        if not link.up:
            link.up = True
            self._events.on_up(link.record.name, "its agent answers")
        self._on_bytes(link)  # data may have arrived together with the end of the handshake

    def _dial(self, link: _Link) -> None:
        """Dial in a thread, because an unreachable node blocks the caller."""
        if link.dialling or self._closed.is_set():
            return
        link.dialling = True
        threading.Thread(target=self._dial_until, args=(link,), name="elastrain-dial", daemon=True).start()

    def _dial_until(self, link: _Link) -> None:
        while not self._closed.is_set() and self._links.get(link.record.name) is link:
            try:
                sock = self._connection(link)
            except (OSError, CommError) as error:
                self._inbox.post(partial(self._on_dial_failed, link, error))
                self._closed.wait(_DIAL_AGAIN_S)
            else:
                self._inbox.post(partial(self._on_dialled, link, sock))
                return
        link.dialling = False

    def _connection(self, link: _Link) -> Connection:
        passport = self._passport
        handshake = Handshake(
            Role.DIAL, secret=passport.secret, job=passport.job, me=passport.signature, expect=link.name
        )
        sock = _connected(link.record.endpoint)
        try:
            return dial(sock, handshake, _DIAL_S)
        except CommError:
            sock.close()
            raise

    def _on_dialled(self, link: _Link, sock: Connection) -> None:
        link.dialling = False
        if self._closed.is_set() or self._links.get(link.record.name) is not link:
            sock.close()
        else:
            self._connect(link, _channel(sock))

    def _on_dial_failed(self, link: _Link, error: Exception) -> None:
        if link.up and isinstance(error, ConnectionRefusedError) and link.channel is None:
            self._down(link, "its agent's port is closed", closed=True)

    def _broken(self, link: _Link, why: str) -> None:
        """Reconnect after a broken connection.

        The attempt also shows if the agent is dead, because its port is closed then.
        """
        self._hang_up(link)
        if link.record.incarnation < self._passport.record.incarnation:
            self._dial(link)
        else:
            threading.Thread(target=self._probe, args=(link,), name="elastrain-probe", daemon=True).start()

    def _probe(self, link: _Link) -> None:
        try:
            _connected(link.record.endpoint).close()
        except OSError as error:
            self._inbox.post(partial(self._on_dial_failed, link, error))

    def _down(self, link: _Link, why: str, *, closed: bool = False) -> None:
        if link.up:
            link.up = False
            self._events.on_down(link.record.name, why, closed)

    def _hang_up(self, link: _Link) -> None:
        with link.lock:
            channel, link.channel = link.channel, None
        if channel is not None:
            self._loop.unregister(channel.sock)
            channel.close()

    def _on_bytes(self, link: _Link) -> None:
        channel = link.channel
        if channel is None:
            return
        try:
            received = channel.receive()
            if received.lines:
                link.heard_s = time.monotonic()
                if not link.up:
                    link.up = True
                    self._events.on_up(link.record.name, "its agent answers again")
            for line in received.lines:
                self._events.on_notice(link.record.name, NOTICE.decode(line))
        except BadMessageError as problem:
            self._broken(link, f"it said what no agent says: {problem}")
            return
        if received.closed and link.channel is channel:
            self._broken(link, "it closed the connection")

    def _send(self, link: _Link, notice: Notice) -> bool:
        with link.lock:
            return link.channel is None or link.channel.send(NOTICE.encode(notice))

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            beat = Beat(wall_s=clocks.wall_s())
            for link in list(self._links.values()):
                self._send(link, beat)
            self._tell_early(beat)

    def _tell_early(self, notice: Notice) -> None:
        with self._early_lock:
            gone = [name for name, channel in self._early.items() if not channel.send(NOTICE.encode(notice))]
            for name in gone:
                self._early.pop(name).close()


def _channel(sock: Connection) -> LineSocket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_UNACKED_S * 1000))
    return LineSocket(sock)


def listen(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Open a TCP listener at a free port. Raises OSError if this host has no such address, or no free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        bind_within(listener, host, ports)
    except OSError:
        listener.close()
        raise
    listener.listen(128)
    return listener


def _connected(endpoint: str) -> socket.socket:
    host, _, port = endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_DIAL_S)
