"""Traffic over the links of a view: frames out and in, what is said to all, and memory that is given back."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from elastrain.base.event_loop import READ, WRITE, EventLoop
from elastrain.comm.errors import OutOfMemory, ProtocolError
from elastrain.comm.shm.segments import Segment
from elastrain.comm.wire.addresses import Frame, MeshConfig
from elastrain.comm.wire.link import Link
from elastrain.comm.wire.link_table import EventQueue, LinkTable
from elastrain.comm.wire.secure import Connection
from elastrain.comm.wire.stream import Stream


@dataclass(frozen=True, kw_only=True)
class TrafficEvents:
    """Callbacks by which the traffic of a link tells its owner."""

    newer: Callable[[int], None]  # a frame of this generation came
    served: Callable[[Link], None]  # frames were taken from it: what the peer has said is in `link.heard`
    broken: Callable[[Link, str], None]  # it carries nothing more, for this reason


class Traffic:
    """Sends, receives and registers streams with the loop. Called by the thread that polls, but for deaths."""

    def __init__(
        self, links: LinkTable, loop: EventLoop, queue: EventQueue, events: TrafficEvents, config: MeshConfig
    ) -> None:
        self._links, self._loop, self._queue, self._events, self._config = links, loop, queue, events, config
        self._notices: list[tuple[int, bytes]] = []  # said to all in this generation
        self._deaths: collections.deque[tuple[Link, float]] = collections.deque()  # filled by watchers' threads
        self.tamper: Callable[[memoryview], memoryview] | None = None
        """See `Mesh.tamper`; of links that begin later."""

    def attach(self, link: Link, sock: Connection) -> None:
        """Give the link its connection."""
        link.stream = Stream(sock, link.outbox, self._config.caps, self.tamper)
        self._loop.register(sock, lambda events: self._serve(link, events))
        self.flush(link)

    def detach(self, link: Link) -> None:
        """Close the connection of the link."""
        if link.stream is not None:
            self._loop.unregister(link.stream.sock)
        link.hang_up()

    def _serve(self, link: Link, events: int) -> None:
        if events & WRITE:
            self.flush(link)
        if events & ~WRITE:
            self.read(link)

    def send(self, link: Link, kind: int, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Queue a frame of this generation. Raises ValueError for a tensor that cannot travel."""
        waiting = bool(link.outbox)
        with self.losing_without_memory(link):
            link.push(kind, self._links.generation, body, tensors)
        if not waiting:
            self.flush(link)

    def broadcast(self, kind: int, body: bytes) -> None:
        """Queue a frame on all links that stand, and on those that begin later in this generation."""
        self._notices.append((kind, body))
        for link in self._links.standing:
            if link.lost is None:  # an earlier one of these sends may have shown its end
                self.send(link, kind, body)

    def begin_generation(self) -> None:
        """Forget what was said to all in the former one: links that begin now belong to the new view."""
        self._notices.clear()

    def push_notices(self, link: Link) -> None:
        """Queue what was said to all before this link began."""
        for kind, body in self._notices:
            link.push(kind, self._links.generation, body)

    def announce(self, segment: Segment) -> None:
        """Pass a segment of mine to all members on this host that have a link and do not have it."""
        for link in self._links.standing:
            if link.same_host and link.lost is None:
                with self.losing_without_memory(link):
                    link.announce(segment, self._links.generation)
                self.flush(link)

    def tell_gone(self, numbers: Sequence[int]) -> None:
        """Let peers drop their mappings of segments that exist no more."""
        for number in numbers:
            for link in self._links:
                if link.lost is None:
                    link.push_gone(number, self._links.generation)
                    self.flush(link)

    def tell_generation(self) -> None:
        """Tell this member's generation on all standing links: nothing of former ones follows."""
        for link in self._links:
            if link.stream is not None:
                link.push_newer(self._links.generation, self._links.generation)
                self.flush(link)

    def flush(self, link: Link) -> None:
        """Send what the socket takes now."""
        if link.stream is None:
            return
        try:
            link.stream.flush()
        except OSError as error:
            # What it sent before its end comes first.
            self.read(link, everything=True)
            self._events.broken(link, f"its connection broke ({error.strerror})")
            return
        self._set_interest(link)

    def _set_interest(self, link: Link) -> None:
        """Stop reading a link with too many held frames, so that its sender waits and memory stays bounded."""
        if link.stream is not None:
            full = len(link.held) >= self._config.max_held_frames
            self._loop.modify(link.stream.sock, (0 if full else READ) | (WRITE if link.outbox else 0))

    @contextmanager
    def losing_without_memory(self, link: Link) -> Iterator[None]:
        """Lose the peer where memory or descriptors are missing for what it needs: half a conversation is worse."""
        try:
            yield
        except OutOfMemory as error:
            self._events.broken(link, f"what it needs cannot be sent to it: {error}")

    def read(self, link: Link, *, everything: bool = False) -> None:
        """Take what has arrived; with `everything`, until the socket is empty or at its end."""
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
            stream.ended = f"what it passed cannot be taken: {error}"
        self._events.served(link)
        if stream.ended is not None:
            self._events.broken(link, stream.ended)
        elif len(link.held) >= self._config.max_held_frames:
            self._set_interest(link)

    def _sort_in(self, link: Link, frame: Frame) -> None:
        if frame.generation > self._links.generation:
            self._events.newer(frame.generation)  # before the frame: a reader that holds it back knows why
        self._queue.sort_in(frame, link.held, self._links.generation)

    def deliver_held(self) -> None:
        """Tell of the frames that were held for the generation that has begun."""
        for link in self._links.by_member.values():
            if link.held:
                link.held = self._queue.deliver(link.held, self._links.generation)
                self._set_interest(link)

    def _on_death(self, link: Link, at_s: float) -> None:
        """Note a death. Runs in a watcher's thread."""
        self._deaths.append((link, at_s))
        self._loop.wake()

    def take_deaths(self) -> list[tuple[Link, float]]:
        """Links whose peers' processes have ended since the last call, and when that became known."""
        deaths: list[tuple[Link, float]] = []
        while self._deaths:
            deaths.append(self._deaths.popleft())
        return deaths

    def next_due_s(self) -> float:
        """Return the time.monotonic() at which `run_timers` is due; inf if never."""
        # Asked before every sleep: most links have nothing to give back, and a call for each would cost more than this.
        due_s = math.inf
        for link in self._links.by_member.values():
            if link.stream is None:
                continue
            if not link.same_host and self._holds_more(link):
                return 0.0
            if link.imports.returned:
                due_s = min(due_s, link.imports.return_due_s())
        return due_s

    def _holds_more(self, link: Link) -> bool:
        full = len(link.held) >= self._config.max_held_frames
        return link.stream is not None and link.stream.holds_more and not full

    def run_timers(self, now_s: float) -> None:
        """Read on where the kernel does not say that there is more; give references back that have waited."""
        for link in self._links:
            if self._holds_more(link):
                self.read(link)
            if link.stream is None or not link.imports.returned or link.imports.return_due_s() > now_s:
                continue
            if link.push_returned(self._links.generation):
                self.flush(link)
