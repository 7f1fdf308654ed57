"""Events of a mesh that were not told yet: frames, losses and newer views. No sockets, no clock."""

from __future__ import annotations

import collections

from elastrain.comm.wire.values import Event, Frame, Newer


class EventQueue:
    """Events that wait for the reader of a mesh, in order per member.

    `holds_newer`: frames of generations that are not ours yet stay with their link until an edit reaches them; else
    the reader gets them at once.
    """

    def __init__(self, *, holds_newer: bool) -> None:
        self._holds_newer = holds_newer
        self._events: collections.deque[Event] = collections.deque()
        self._newest = 0  # generation that the reader knows of

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: Event) -> None:
        self._events.append(event)

    def sort_in(self, frame: Frame, held: list[Frame], generation: int) -> None:
        """Tell of a frame, hold it back until its generation comes, or drop it: nobody waits for a former one."""
        if frame.generation > generation and self._holds_newer:
            held.append(frame)
        elif frame.generation >= generation:
            self._events.append(frame)

    def deliver(self, held: list[Frame], generation: int) -> list[Frame]:
        """Tell of the held frames that are due now; returns those that stay held."""
        self._events.extend(frame for frame in held if frame.generation == generation)
        return [frame for frame in held if frame.generation > generation]

    def hear_of(self, generation: int) -> bool:
        """Tell that a newer generation exists; True the first time that it is heard of."""
        if generation <= self._newest:
            return False
        self._newest = generation
        self._events.append(Newer(generation=generation))
        return True

    def begin(self, generation: int) -> None:
        """A generation begins: drop what belongs to former ones. Losses that still count are told anew."""
        self._newest = max(self._newest, generation)
        if not self._events:
            return
        kept = [
            event
            for event in self._events
            if (isinstance(event, Frame) and event.generation >= generation)
            or (isinstance(event, Newer) and event.generation > generation)
        ]
        self._events = collections.deque(kept)

    def take(self) -> list[Event]:
        """All events; they count as told."""
        events = list(self._events)
        self._events.clear()
        return events
