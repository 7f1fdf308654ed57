"""The connections of a mesh: who is let in, what arrives, who is lost. Views and messages are in `mesh`.

Of two members one dials (`dials`). Where the other one wants the link first, it *knocks*: it connects in the wrong
direction, and is dialled. So there is one link between two members, whoever wanted it first, and however often.

Along a *ring* (see `ring`) links always stand: what is to be known to all goes that way, from each to its neighbours.

Everything here is called by the one thread that polls, but for what a watcher notes.
"""

from __future__ import annotations

import collections
import math
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastrain.comm.errors import OutOfMemory, ProtocolError
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.shm.segments import SharedMemory
from elastrain.comm.wire.door import Door, DoorEvents
from elastrain.comm.wire.link import Link, farewell
from elastrain.comm.wire.loop import READ, WRITE, Loop
from elastrain.comm.wire.ring import neighbours
from elastrain.comm.wire.stream import Stream
from elastrain.comm.wire.values import Frame, LossCause, MeshConfig, Newer, PeerLost

Event = Frame | PeerLost | Newer
_RUMOURS_MAX = 4096
_KNOCKS_MAX = 3
# What one learns later replaces what says less.
_CERTAINTY = {
    LossCause.UNREACHED: 0,
    LossCause.BROKEN: 1,
    LossCause.LEFT_US_OUT: 2,
    LossCause.LEFT: 2,
    LossCause.DEAD: 2,
}
_TOLD = {
    LossCause.UNREACHED: "it could not be reached",
    LossCause.BROKEN: "its connection to another member broke",
    LossCause.LEFT: "it left",
    LossCause.DEAD: "its process ended",
}


def dials(one: str, other: str) -> bool:
    """Whether `one` opens the link between the two: ids rise, and the later member comes to those who are there."""
    return in_order(one) > in_order(other)


def in_order(member: str) -> tuple[int, str]:
    """The key of the order of members."""
    return len(member), member


class Wires:
    """The lower half of a Mesh, which see: links by member, and the events that wait to be told."""

    def __init__(
        self, *, me: str, node: str, job: str, secret: bytes | None, config: MeshConfig, beacon: Beacon | None
    ) -> None:
        self.me, self.node = me, node
        self.generation = 0
        self._beacon = beacon
        self._config = config
        self._loop = Loop()
        self._shared = SharedMemory(config.segment_bytes, huge_pages=config.huge_pages)
        self._links: dict[str, Link] = {}
        self._order: tuple[str, ...] = ()  # the ring's; empty: there is none
        self._ring: frozenset[str] = frozenset()  # my neighbours
        self._fresh: frozenset[str] = frozenset()  # members that the edit under way adds
        self._untold: collections.deque[Link] = collections.deque()  # lost links that the ring was not told of
        self._tending = False
        self._words: list[tuple[int, bytes]] = []  # said to all in this generation
        self._rumours: dict[str, tuple[LossCause, int]] = {}  # losses of who is in no view of ours yet; generation
        # Authenticated members that no view of ours names yet; their newest generation beside. As many as there are:
        # who is turned away here does not come again, and is lost to us in the view that names it.
        self._aside: dict[str, tuple[socket.socket, int]] = {}
        self._ready: collections.deque[Event] = collections.deque()
        self._deaths: collections.deque[tuple[Link, float]] = collections.deque()
        self._newest_told = 0
        self._last_stranger = ""
        events = DoorEvents(on_open=self._admit, on_refused=self._refused)
        try:
            self._door = Door(self._loop, events, me=me, job=job, secret=secret, config=config)
        except (OSError, ValueError):
            self._loop.close()
            raise

    # How links come about

    def _open(self, link: Link, *, patient: bool) -> None:
        """Bring the link about, unless that is done. `patient`: whoever needs it has a deadline, and it may be that the
        other end does not: where it is to dial, it is asked to.
        """
        if link.opened or link.lost is not None:
            return
        self._prepare(link)
        link.patient = patient
        if not patient:
            link.deadline_s = time.monotonic() + self._config.connect_timeout_s + self._config.handshake_timeout_s
        if link.lost is None and (patient or dials(self.me, link.peer.id)):
            self._call_on(link)

    def _prepare(self, link: Link) -> None:
        """What the other end has to know first."""
        link.opened = True
        with self._serving(link):
            if link.same_host and self._beacon is not None:
                link.push_beacon(self._beacon.fd, self.generation)
            self._push_losses(link)
            for kind, body in self._words:
                link.push(kind, self.generation, body)

    def _push_losses(self, link: Link) -> None:
        for member in self._order:
            other = self._links.get(member)
            if other is not None and other.lost is not None and other.lost_cause is not LossCause.LEFT_US_OUT:
                link.push_loss(member, other.lost_cause, self.generation)

    def _call_on(self, link: Link) -> None:
        """Dial, or knock."""
        try:
            self._door.dial(link.peer, same_node=link.same_node, patient=link.patient)
        except ValueError as error:
            self._refused(link.peer.id, str(error), False)

    def _admit(self, member: str, generation: int, sock: socket.socket, dialled: bool) -> None:
        self._heard_of(generation)
        link = self._links.get(member)
        if link is not None and (link.stream is not None or link.lost is not None):
            sock.close()  # an id is never used twice: this is a duplicate, or one that was lost already
        elif link is not None and dialled:
            self._enter(link, generation, sock)
        elif link is not None:
            self._let_in(link, generation, sock)
        elif generation < self.generation:
            _turn_away(sock, self.generation)
        elif dialled or member in self._aside:
            sock.close()
        else:
            self._aside[member] = (sock, generation)

    def _enter(self, link: Link, generation: int, sock: socket.socket) -> None:
        """We have called."""
        if dials(self.me, link.peer.id):
            self._connect(link, generation, sock)
            return
        link.knock = sock
        self._loop.register(sock.fileno(), READ, lambda _events: self._turned_away(link))

    def _let_in(self, link: Link, generation: int, sock: socket.socket) -> None:
        """It has called."""
        if dials(link.peer.id, self.me):
            if not link.opened:
                self._prepare(link)
            if link.lost is None:
                self._connect(link, generation, sock)
            else:
                sock.close()
            return
        self._end_knock(link)
        link.knock = sock
        self._open(link, patient=True)

    def _turned_away(self, link: Link) -> None:
        """It ended the knock, and has not dialled."""
        self._end_knock(link)
        link.knocks += 1
        if link.knocks < _KNOCKS_MAX:
            self._call_on(link)
        else:
            self._refused(link.peer.id, "it was asked to connect, and did not", False)

    def _end_knock(self, link: Link) -> None:
        if link.knock is not None:
            self._loop.unregister(link.knock.fileno())
            link.knock.close()
            link.knock = None

    def _connect(self, link: Link, generation: int, sock: socket.socket) -> None:
        if (sock.family == socket.AF_UNIX) != link.same_host:
            sock.close()
            self._lose(link, "it came over another transport than its node says: node names are wrong")
            return
        self._end_knock(link)
        self._door.hang_up(link.peer.id)
        if generation < self.generation:
            link.push_newer(self.generation, self.generation)
        link.stream = Stream(sock, link.outbox, self._config.caps)
        self._loop.register(sock.fileno(), READ, lambda events: self._serve(link, events))
        self._flush(link)

    def _refused(self, member: str | None, reason: str, ended: bool) -> None:
        if member is None:
            self._last_stranger = reason
            return
        link = self._links.get(member)
        if link is not None and link.stream is None:
            late = LossCause.LEFT if ended else LossCause.UNREACHED
            self._lose(link, reason, cause=late if link.patient else LossCause.BROKEN)

    def _serve(self, link: Link, events: int) -> None:
        if events & WRITE:
            self._flush(link)
        if events & ~WRITE:
            self._read(link)

    def _read(self, link: Link, *, everything: bool = False) -> None:
        stream = link.stream
        if stream is None:
            return
        raws = stream.pull(everything=everything)
        try:
            for raw in raws:
                frame = link.take(raw, lambda at_s: self._on_death(link, at_s))
                if frame is not None:
                    self._sort_in(link, frame)
        except ProtocolError as error:
            stream.ended = f"it broke the protocol: {error}"
        except OutOfMemory as error:
            stream.ended = f"what it passed can not be taken: {error}"
        self._heard_of(max(link.left_out or 0, link.told_newer))
        while link.told_losses:
            self._hear_loss(*link.told_losses.pop(0), generation=link.newest)
        if stream.ended is not None:
            self._lose(link, stream.ended)
        elif len(link.held) >= self._config.max_held_frames:
            self._set_events(link)

    def _sort_in(self, link: Link, frame: Frame) -> None:
        if frame.generation > self.generation:
            self._heard_of(frame.generation)
            if self._config.holds_newer:
                link.held.append(frame)
                return
        if frame.generation >= self.generation:
            self._ready.append(frame)

    def _heard_of(self, generation: int) -> None:
        if generation > self._newest_told:
            self._newest_told = generation
            self._ready.append(Newer(generation=generation))
            for link in self._along_the_ring():
                link.push_newer(generation, self.generation)
                self._flush(link)

    def _flush(self, link: Link) -> None:
        if link.stream is None:
            return
        try:
            link.stream.flush()
        except OSError as error:
            # What it sent before its end comes first.
            self._read(link, everything=True)
            self._lose(link, f"its connection broke ({error.strerror})")
            return
        self._set_events(link)

    def _set_events(self, link: Link) -> None:
        if link.stream is not None:
            full = len(link.held) >= self._config.max_held_frames
            self._loop.modify(link.stream.sock.fileno(), (0 if full else READ) | (WRITE if link.outbox else 0))

    def _on_death(self, link: Link, at_s: float) -> None:
        """Runs in a watcher's thread."""
        self._deaths.append((link, at_s))
        self._loop.wake()

    def _bury(self) -> None:
        while self._deaths:
            link, at_s = self._deaths.popleft()
            if link.lost is None and self._links.get(link.peer.id) is link:
                self._read(link, everything=True)
                self._lose(link, "its process ended", at_s=at_s, cause=LossCause.DEAD)

    def _lose(self, link: Link, reason: str, *, at_s: float | None = None, cause: LossCause = LossCause.BROKEN) -> None:
        if link.lost is not None:
            return
        ended = link.left_out is None and (cause is LossCause.DEAD or link.proven_dead)
        if link.left_out is not None:  # it has said why itself
            cause = LossCause.LEFT_US_OUT if link.left_out else LossCause.LEFT
            reason = f"it went on without us in generation {link.left_out}" if link.left_out else "it left"
        elif ended:
            cause, reason = LossCause.DEAD, _TOLD[LossCause.DEAD]
        elif link.rumour is not None and _CERTAINTY[link.rumour] > _CERTAINTY[cause]:
            cause, reason = link.rumour, _TOLD[link.rumour]
        link.lost, link.lost_cause = reason, cause
        link.lost_at_s = time.monotonic() if at_s is None else at_s
        self._hang_up(link)
        if ended:
            link.take_all_back()  # nobody reads there any more
        self._tell_lost(link)
        self._untold.append(link)
        self._tend()

    def _tell_lost(self, link: Link) -> None:
        assert link.lost is not None
        self._ready.append(PeerLost(member=link.peer.id, reason=link.lost, at_s=link.lost_at_s, cause=link.lost_cause))

    # The ring

    def _along_the_ring(self) -> list[Link]:
        links = [self._links[member] for member in self._ring if member in self._links]
        return [link for link in links if link.opened and link.lost is None]

    def _hear_loss(self, member: str, cause: LossCause, *, generation: int) -> None:
        """Somebody else has lost it. Who has a link of its own sees for itself."""
        link = self._links.get(member)
        if cause not in _TOLD or member == self.me:
            return
        if link is None:
            if len(self._rumours) < _RUMOURS_MAX:
                self._rumours[member] = (cause, generation)
        elif link.lost is not None:
            if _CERTAINTY[cause] > _CERTAINTY[link.lost_cause]:
                link.lost_cause = cause
                self._tell_lost(link)
                self._untold.append(link)
                self._tend()
        elif link.stream is not None or self._door.is_dialling(member):
            link.rumour = cause if link.rumour is None else max(cause, link.rumour, key=lambda one: _CERTAINTY[one])
        else:
            self._lose(link, _TOLD[cause], cause=cause)

    def _tend(self) -> None:
        """Tell the ring of who was lost, and close it around them. Not within itself: what it does may lose others."""
        if self._tending:
            return
        self._tending = True
        try:
            while True:
                while self._untold:
                    self._tell_ring(self._untold.popleft())
                if not self._close_ring():
                    break
        finally:
            self._tending = False

    def _tell_ring(self, lost: Link) -> None:
        if lost.lost_cause is not LossCause.LEFT_US_OUT:
            for link in self._along_the_ring():
                link.push_loss(lost.peer.id, lost.lost_cause, self.generation)
                self._flush(link)

    def _close_ring(self) -> bool:
        """Whether there were changes."""
        nodes = {member: self._links[member].peer.node for member in self._order if member in self._links}
        lost = {member for member in nodes if self._links[member].lost is not None}
        ring = neighbours(self.me, self._order, lost, {self.me: self.node, **nodes})
        new, self._ring = ring - self._ring, ring
        for link in [self._links[member] for member in self._order if member in new]:
            if link.opened and link.lost is None:
                self._push_losses(link)
                self._flush(link)
            else:
                # A neighbour only because others are lost may not know of that.
                self._open(link, patient=bool(lost) or link.peer.id not in self._fresh)
        return bool(new or self._untold)

    @contextmanager
    def _serving(self, link: Link) -> Iterator[None]:
        """Who can not be given what it needs to read the rest is lost: better than half a conversation."""
        try:
            yield
        except OutOfMemory as error:
            self._lose(link, f"what it needs can not be sent to it: {error}")

    def _hang_up(self, link: Link) -> None:
        if link.stream is not None:
            self._loop.unregister(link.stream.sock.fileno())
        self._end_knock(link)
        self._door.hang_up(link.peer.id)
        link.hang_up()

    # Time

    def next_due_s(self) -> float | None:
        """When something is due, in time.monotonic(); None: nothing is."""
        links = [link for link in self._links.values() if link.lost is None]
        returns = [link.return_due_s() for link in links if link.stream and link.imports.returned]
        deadlines = [self._door.next_deadline_s(), *returns, *[link.deadline_s for link in links if not link.stream]]
        return min([deadline for deadline in deadlines if deadline not in (None, math.inf)], default=None)

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        self._door.run_timers(now_s)
        for link in self._links.values():
            if link.lost is not None:
                continue
            if link.stream is None:
                if link.deadline_s <= now_s:
                    self._lose(link, f"it did not connect in time{self._stranger_words()}")
                continue
            return_s = link.return_due_s()
            if return_s is not None and return_s <= now_s and link.push_returned(self.generation):
                self._flush(link)

    def _stranger_words(self) -> str:
        return f" (somebody was refused: {self._last_stranger})" if self._last_stranger else ""


def _turn_away(sock: socket.socket, generation: int) -> None:
    """Somebody from a former view, which the new one does not name."""
    try:
        sock.send(farewell(generation))
    except OSError:
        pass  # it has gone already
    sock.close()
