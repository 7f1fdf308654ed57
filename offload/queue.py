"""Ordered, cancellable requests to one device: reads before writes, what is waited for before what will be.

A request is always run exactly once, a cancelled one too: it looks at `cancelled` and reports that it ended. Whoever
waits for the end of a request can therefore never be forgotten.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from enum import IntEnum


class Urgency(IntEnum):
    """The order between requests; within one, first come first served."""

    CANCELLED = 0  # nothing to move: only the end has to be reported
    DEMAND = 1  # backward waits for it
    PREFETCH = 2
    WRITE = 3


class IoRequest:
    """One read or write of one storage."""

    __slots__ = ("cancelled", "taken", "urgency", "work")

    def __init__(self, urgency: Urgency, work: Callable[[IoRequest], None]) -> None:
        self.urgency = urgency
        self.work = work
        self.taken = False
        self.cancelled = False


_Heaps = tuple[list[tuple[int, int, IoRequest]], list[tuple[int, int, IoRequest]]]
"""What a worker looks through, in this order."""


def _done(_: IoRequest) -> None:
    """What is left to do of a request that was run. Its work, and what that refers to, is let go of."""


class RequestQueue:
    """`threads` workers that take requests in order. `work` must not raise; it runs without any lock held.

    `writers` of them take writes first: where both directions move at once, neither is to wait for the other.
    """

    def __init__(self, name: str, *, threads: int, writers: int = 0) -> None:
        self._ready = threading.Condition(threading.Lock())
        self._idle = 0
        self._writes: list[tuple[int, int, IoRequest]] = []
        self._others: list[tuple[int, int, IoRequest]] = []
        self._sequence = itertools.count()
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=((self._writes, self._others) if number < writers else (self._others, self._writes),),
                name=f"offload {name} {number}",
                daemon=True,
            )
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: Urgency, work: Callable[[IoRequest], None]) -> IoRequest:
        request = IoRequest(urgency, work)
        self._push(request)
        return request

    def hasten(self, request: IoRequest) -> None:
        """Move a request that has not begun to the front."""
        if request.urgency > Urgency.DEMAND and not request.taken:
            request.urgency = Urgency.DEMAND
            self._push(request)

    def cancel(self, request: IoRequest) -> None:
        """Let a request end as soon as it can; it still runs, to say so."""
        request.cancelled = True
        if not request.taken:
            request.urgency = Urgency.CANCELLED
            self._push(request)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the workers once everything that was submitted has run."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _push(self, request: IoRequest) -> None:
        with self._ready:
            heap = self._writes if request.urgency is Urgency.WRITE else self._others
            heapq.heappush(heap, (request.urgency, next(self._sequence), request))
            if self._idle:
                self._ready.notify()

    def _serve(self, heaps: _Heaps) -> None:
        while (request := self._take(heaps)) is not None:
            work, request.work = request.work, _done
            work(request)
            del work, request  # nothing is held while there is nothing to do

    def _take(self, heaps: _Heaps) -> IoRequest | None:
        with self._ready:
            while True:
                while heap := next(filter(None, heaps), None):
                    request = heapq.heappop(heap)[2]
                    if not request.taken:  # a hastened or cancelled request is in the heap twice
                        request.taken = True
                        return request
                if self._closed:
                    return None
                self._idle += 1
                try:
                    self._ready.wait()
                finally:
                    self._idle -= 1
