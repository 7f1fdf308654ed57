"""Opening of links: dialling, requests to be dialled, and incoming connections.

Of two members one dials (`addresses.dials`). If the other one needs the link first, it *requests a dial*: it connects
in the wrong direction and holds that connection until it has been dialled. So two members never have two links.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastrain.base.event_loop import EventLoop
from elastrain.comm.wire.addresses import Credentials, LossCause, MeshConfig, dials
from elastrain.comm.wire.connector import Connector, ConnectorEvents
from elastrain.comm.wire.link import Link, farewell
from elastrain.comm.wire.link_table import LinkTable
from elastrain.comm.wire.secure import Connection

_REQUESTS_MAX = 3


@dataclass(frozen=True, kw_only=True)
class OpenerEvents:
    """Callbacks by which an opener tells its owner."""

    prepare: Callable[[Link], None]  # the link begins: queue what the other end has to know first
    connected: Callable[[Link, int, Connection], None]  # with the peer's generation; takes the connection over
    failed: Callable[[Link, str, LossCause], None]
    newer: Callable[[int], None]  # a member that came is in this generation


class Opener:
    """The part of a mesh that opens the links of a view. Called by the polling thread."""

    def __init__(
        self, links: LinkTable, loop: EventLoop, events: OpenerEvents, credentials: Credentials, config: MeshConfig
    ) -> None:
        """Open the listeners. Raises OSError if that fails, ValueError for a network without a secret."""
        self._links, self._loop, self._events, self._config = links, loop, events, config
        # Authenticated members that no view of ours names yet, and their newest generation. All that come are kept:
        # a member that is turned away here does not come again, and would be lost in the view that names it.
        self._early: dict[str, tuple[Connection, int]] = {}
        self._last_stranger = ""  # why the last unknown connection was refused
        connector_events = ConnectorEvents(on_open=self._on_open, on_refused=self._on_refused)
        self._connector = Connector(loop, connector_events, links.me, credentials, config)
        self.address = self._connector.address

    def open(self, link: Link, *, patient: bool) -> None:
        """Open the link, unless that is done or in progress.

        `patient`: the caller has its own deadline, and the other end may not need the link. If the other end is to
        dial, it is asked to.
        """
        opening = link.opening
        if opening.begun or link.lost is not None:
            return
        self._events.prepare(link)
        opening.patient = patient
        if not patient:
            opening.deadline_s = time.monotonic() + self._config.connect_timeout_s + self._config.handshake_timeout_s
        # Without patience the other end opens the link, too: it is in the same view.
        if link.lost is None and (patient or dials(self._links.me, link.peer.id)):
            self._dial(link)

    def _dial(self, link: Link) -> None:
        """Connect: to stay, or to request a dial."""
        same_node = link.peer.node == self._links.node
        try:
            self._connector.dial(link.peer, same_node=same_node, patient=link.opening.patient)
        except ValueError as error:
            self._on_refused(link.peer.id, str(error), False)

    def is_dialling(self, member: str) -> bool:
        """Return True if a call to this member is in progress."""
        return self._connector.is_dialling(member)

    # Connections whose other end is proven

    def _on_open(self, member: str, generation: int, sock: Connection, dialled: bool) -> None:
        self._events.newer(generation)
        link = self._links.get(member)
        if link is None:
            self._keep_early(member, generation, sock, dialled)
        elif (link.stream is not None or link.lost is not None) and generation > self._links.generation:
            self._keep_early(member, generation, sock, dialled)  # it has made its links anew, in a view ahead of ours
        elif link.stream is not None or link.lost is not None:
            sock.close()  # an id is never used twice: this is a duplicate, or one that was lost already
        elif dialled:
            self._on_dialled(link, generation, sock)
        else:
            self._on_accepted(link, generation, sock)

    def _keep_early(self, member: str, generation: int, sock: Connection, dialled: bool) -> None:
        if generation < self._links.generation:
            with suppress(OSError):  # it learns that the present view does not name it, or has gone already
                sock.send(farewell(self._links.generation))
            sock.close()
        elif dialled or (member in self._early and self._early[member][1] >= generation):
            sock.close()
        else:
            if member in self._early:  # it has made its links anew since
                self._early.pop(member)[0].close()
            self._early[member] = (sock, generation)

    def admit_early(self, link: Link) -> None:
        """Use the connection of a member that came before a view named it, if there is one."""
        early = self._early.pop(link.peer.id, None)
        if early is not None:
            self._on_accepted(link, early[1], early[0])

    def forget_early(self, generation: int) -> None:
        """Hang up on those that came early, and that the newest view they had heard of leaves out."""
        for member, (sock, newest) in list(self._early.items()):
            if newest <= generation:
                del self._early[member]
                sock.close()

    def begin(self, generation: int) -> None:
        """Tell this generation to all connections from now on."""
        self._connector.generation = generation

    def _on_dialled(self, link: Link, generation: int, sock: Connection) -> None:
        if dials(self._links.me, link.peer.id):
            self._connect(link, generation, sock)
            return
        link.opening.request = sock
        self._loop.register(sock, lambda _events: self._on_request_ended(link))

    def _on_accepted(self, link: Link, generation: int, sock: Connection) -> None:
        if dials(self._links.me, link.peer.id):  # a request: it is answered by dialling
            self._end_request(link)
            link.opening.request = sock
            self.open(link, patient=True)
            return
        if not link.opening.begun:
            self._events.prepare(link)
        if link.lost is None:
            self._connect(link, generation, sock)
        else:
            sock.close()

    def _connect(self, link: Link, generation: int, sock: Connection) -> None:
        if (sock.family == socket.AF_UNIX) != link.same_host:
            sock.close()
            reason = "it came over another transport than its node says: node names are wrong"
            self._events.failed(link, reason, LossCause.BROKEN)
            return
        self.abandon(link)
        self._events.connected(link, generation, sock)

    def _on_request_ended(self, link: Link) -> None:
        """Dial again, or give up: the other end closed the request without dialling."""
        self._end_request(link)
        link.opening.requests += 1
        if link.opening.requests < _REQUESTS_MAX:
            self._dial(link)
        else:
            self._on_refused(link.peer.id, "it was asked to connect, and did not", False)

    def _end_request(self, link: Link) -> None:
        request, link.opening.request = link.opening.request, None
        if request is not None:
            self._loop.unregister(request)
            request.close()

    def _on_refused(self, member: str | None, reason: str, ended: bool) -> None:
        if member is None:
            self._last_stranger = reason
            return
        link = self._links.get(member)
        if link is not None and link.stream is None:
            late = LossCause.LEFT if ended else LossCause.UNREACHED
            self._events.failed(link, reason, late if link.opening.patient else LossCause.BROKEN)

    def abandon(self, link: Link) -> None:
        """Stop dialling this member and requesting dials; nothing is told."""
        self._end_request(link)
        self._connector.hang_up(link.peer.id)

    def next_due_s(self) -> float:
        """Return the time.monotonic() at which `run_timers` is due; inf if never."""
        links = self._links.by_member.values()
        waiting = [link.opening.deadline_s for link in links if link.stream is None and link.lost is None]
        return min([self._connector.next_deadline_s(), *waiting])

    def run_timers(self, now_s: float) -> None:
        """Do everything that is due."""
        self._connector.run_timers(now_s)
        for link in self._links:
            if link.lost is None and link.stream is None and link.opening.deadline_s <= now_s:
                hint = f" (a caller was refused: {self._last_stranger})" if self._last_stranger else ""
                self._events.failed(link, f"it did not connect in time{hint}", LossCause.BROKEN)

    def close(self) -> None:
        """Close all sockets that belong to no link. The loop's registrations are left: it is closed next."""
        for sock in [*self._connector.sockets(), *(sock for sock, _ in self._early.values())]:
            sock.close()
