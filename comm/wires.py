"""The connections of a mesh: who is let in, what arrives, who is lost. Views and messages are in `mesh`.

Everything here is called by the one thread that polls, but for what a watcher notes.
"""

from __future__ import annotations

import collections
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastrain.comm.door import Door, DoorEvents
from elastrain.comm.errors import OutOfMemory, ProtocolError
from elastrain.comm.link import Link
from elastrain.comm.loop import READ, WRITE, Loop
from elastrain.comm.segments import SharedMemory
from elastrain.comm.stream import Stream
from elastrain.comm.values import Frame, How, Lost, MeshConfig, Newer

Event = Frame | Lost | Newer
_ASIDE_MAX = 64


def dials(one: str, other: str) -> bool:
    """Whether `one` opens the link between the two: ids rise, and the later member comes to those who are there."""
    return (len(one), one) > (len(other), other)


class Wires:
    """The lower half of a Mesh, which see: links by member, and the events that wait to be told."""

    def __init__(self, *, me: str, job: str, secret: bytes | None, config: MeshConfig) -> None:
        self.me = me
        self.generation = 0
        self._config = config
        self._loop = Loop()
        self._shared = SharedMemory(config.segment_bytes)
        self._links: dict[str, Link] = {}
        # Authenticated members that no view of ours names yet; their newest generation beside.
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

    def _admit(self, member: str, generation: int, sock: socket.socket) -> None:
        self._heard_of(generation)
        link = self._links.get(member)
        if link is None and member not in self._aside and len(self._aside) < _ASIDE_MAX and dials(member, self.me):
            self._aside[member] = (sock, generation)
        elif link is None or link.stream is not None or link.lost is not None:
            sock.close()  # an id is never used twice: this is a duplicate, or one that was lost already
        else:
            self._connect(link, sock)

    def _connect(self, link: Link, sock: socket.socket) -> None:
        if (sock.family == socket.AF_UNIX) != link.same_host:
            sock.close()
            self._lose(link, "it came over another transport than its node says: node names are wrong")
            return
        link.stream = Stream(sock, link.outbox, self._config.caps)
        self._loop.register(sock.fileno(), READ, lambda events: self._serve(link, events))
        self._flush(link)

    def _refused(self, member: str | None, reason: str) -> None:
        if member is None:
            self._last_stranger = reason
        elif member in self._links:
            self._lose(self._links[member], reason)

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
        if link.left_out is not None:
            self._heard_of(link.left_out)
        if stream.ended is not None:
            self._lose(link, stream.ended)
        elif len(link.held) >= self._config.max_held_frames:
            self._set_events(link)

    def _sort_in(self, link: Link, frame: Frame) -> None:
        if frame.generation == self.generation:
            self._ready.append(frame)
        elif frame.generation > self.generation:
            link.held.append(frame)
            self._heard_of(frame.generation)

    def _heard_of(self, generation: int) -> None:
        if generation > self._newest_told:
            self._newest_told = generation
            self._ready.append(Newer(generation=generation))

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
                self._lose(link, "its process ended", at_s=at_s, how=How.DEAD)

    def _lose(self, link: Link, reason: str, *, at_s: float | None = None, how: How = How.BROKEN) -> None:
        if link.lost is not None:
            return
        if link.left_out is not None:  # it has said why itself
            how = How.LEFT_US_OUT if link.left_out else How.LEFT
            reason = f"it went on without us in generation {link.left_out}" if link.left_out else "it left"
        elif link.proven_dead:
            how, reason = How.DEAD, "its process ended"
        link.lost, link.lost_how = reason, how
        link.lost_at_s = time.monotonic() if at_s is None else at_s
        self._hang_up(link)
        self._tell_lost(link)

    def _tell_lost(self, link: Link) -> None:
        assert link.lost is not None
        self._ready.append(Lost(member=link.peer.id, reason=link.lost, at_s=link.lost_at_s, how=link.lost_how))

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
        link.hang_up()

    # Time

    def next_due_s(self) -> float | None:
        """When something is due, in time.monotonic(); None: nothing is."""
        deadlines = [self._door.next_deadline_s()]
        for link in self._links.values():
            if link.lost is None:
                deadlines.append(link.return_due_s() if link.stream else link.deadline_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

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
