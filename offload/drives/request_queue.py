"""Which part of a slab belongs to whom: page-aligned slots below a quota. Pure arithmetic, no I/O.

How fast a device is in one direction: bytes that were moved, and the time that it took.

Ordered, cancellable requests to one device: reads before writes, what is waited for before what will be.

What cannot be moved yet, since an accelerator still computes it, holds nobody up: one worker at most waits for that.

A request is always run exactly once, a cancelled one too: it looks at `cancelled` and reports that it ended. Whoever
waits for the end of a request can therefore never be forgotten.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from elastrain.base.arithmetic import FreeRanges
from elastrain.offload.drives.port import round_up


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A page-aligned range of a slab."""

    offset_bytes: int
    size_bytes: int


class SlotAllocator:
    """Hands out slots below `quota_bytes`. `end_bytes` is how far the slab is in use, ever."""

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.end_bytes = 0
        self.used_bytes = 0
        self._free = FreeRanges(quota_bytes)

    @property
    def holes(self) -> tuple[Slot, ...]:
        """What is free below `end_bytes`, sorted by offset, never touching each other."""
        below = [(start, min(stop, self.end_bytes)) for start, stop in self._free if start < self.end_bytes]
        return tuple(Slot(offset_bytes=start, size_bytes=stop - start) for start, stop in below)

    def allocate(self, size_bytes: int) -> Slot | None:
        """A slot of at least `size_bytes`, or None where the quota does not allow it."""
        size_bytes = round_up(size_bytes)
        offset_bytes = self._free.take(size_bytes)
        if offset_bytes is None:
            return None
        self.used_bytes += size_bytes
        self.end_bytes = max(self.end_bytes, offset_bytes + size_bytes)
        return Slot(offset_bytes=offset_bytes, size_bytes=size_bytes)

    def free(self, slot: Slot) -> None:
        """Take a slot back. Raises `ValueError` if it was not handed out."""
        self._free.give(slot.offset_bytes, slot.offset_bytes + slot.size_bytes)
        self.used_bytes -= slot.size_bytes


# Until something was measured; only the first passes, which spill everything anyway, are decided with it.
ASSUMED_BYTES_PER_S = 1e9
ENOUGH_TO_TELL_BYTES = 16 << 20


class DeviceTime:
    """The time of one device, for the meters of its directions: while several move, each has an equal part of it.

    So the rates of a drive say what it can do, one direction at a time, however both were mixed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self._meters: list[Meter] = []
        self._until_s = 0.0

    def join(self, meter: Meter) -> None:
        """One direction more."""
        self._meters.append(meter)

    def spend(self) -> None:
        """Let who moves have the time since this was called last. The lock is held."""
        now_s = self._clock()
        moving = [each for each in self._meters if each.moving]
        for each in moving:
            each.busy_s += (now_s - self._until_s) / len(moving)
        self._until_s = now_s


class Meter:
    """Bytes moved and the time during which at least one request was moving them; `moving` counts those requests."""

    def __init__(self, time: DeviceTime) -> None:
        self._time = time
        self._marked = (0, 0.0)
        self._started, self._is_told, self._told_bytes_per_s = 0, False, 0.0
        self.moving = 0
        self.moved_bytes = 0
        self.busy_s = 0.0
        self.recent_bytes_per_s = ASSUMED_BYTES_PER_S
        time.join(self)

    def start(self) -> None:
        with self._time.lock:
            self._time.spend()
            self.moving += 1
            self._started += 1

    def stop(self, moved_bytes: int) -> None:
        with self._time.lock:
            self._time.spend()
            self.moving -= 1
            self.moved_bytes += moved_bytes

    @property
    def lone(self) -> int:
        """The number of the request that is moved now, if it is the only one; else 0."""
        with self._time.lock:
            return self._started * (self.moving == 1)

    def tell(self, lone: int, moved_bytes: int, took_s: float) -> None:
        """So many bytes were moved in so many seconds by somebody else's clock; `lone` is what that was before.

        Of those that stayed alone the fastest one is the rate: others waited for the interpreter within their time.
        Told once, the time between `start` and `stop` says nothing any more.
        """
        with self._time.lock:
            self._is_told = True
            if lone == self._started and moved_bytes >= ENOUGH_TO_TELL_BYTES:
                self._told_bytes_per_s = max(self._told_bytes_per_s, moved_bytes / took_s)

    def mark(self) -> None:
        """Take the rate since the last mark as the recent one, if enough was moved to tell."""
        with self._time.lock:
            bytes_before, s_before = self._marked
            moved_bytes, busy_s = self.moved_bytes - bytes_before, self.busy_s - s_before
            if self._told_bytes_per_s:
                self.recent_bytes_per_s, self._told_bytes_per_s = self._told_bytes_per_s, 0.0
            if moved_bytes >= ENOUGH_TO_TELL_BYTES and busy_s > 0 and not self._is_told:
                self.recent_bytes_per_s = moved_bytes / busy_s
                self._marked = (self.moved_bytes, self.busy_s)


class Urgency(IntEnum):
    """The order between requests; within one, first come first served."""

    CANCELLED = 0  # nothing to move: only the end has to be reported
    DEMAND = 1  # backward waits for it
    PREFETCH = 2
    WRITE = 3


class Mark(Protocol):
    """What an accelerator has to reach before something can be moved: a CUDA event, for one."""

    def query(self) -> bool:
        """Whether it is reached."""

    def synchronize(self) -> None:
        """Wait until it is."""


class IoRequest:
    """One read or write of one storage; not before its mark, if it has one."""

    __slots__ = ("cancelled", "mark", "taken", "urgency", "work")

    def __init__(self, urgency: Urgency, work: Callable[[IoRequest], None], mark: Mark | None) -> None:
        self.urgency = urgency
        self.work = work
        self.mark = mark
        self.taken = False
        self.cancelled = False

    def can_be_run(self) -> bool:
        """Whether it would not wait for its mark. A mark that fails is reached: who moves the bytes says why."""
        if self.mark is not None and (self.cancelled or _is_reached(self.mark)):
            self.mark = None
        return self.mark is None


def _is_reached(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:
        return True


_Heap = list[tuple[int, int, IoRequest]]
_Heaps = tuple[_Heap, _Heap]
"""What a worker looks through, in this order."""


def _left(heap: _Heap) -> Iterator[tuple[int, int, IoRequest]]:
    """What nobody has taken, in order. A hastened or cancelled request is in the heap twice."""
    while heap and heap[0][2].taken:
        heapq.heappop(heap)
    yield from heap[:1]
    yield from sorted(entry for entry in heap[1:] if not entry[2].taken)


def _done(_: IoRequest) -> None:
    """What is left to do of a request that was run. Its work, and what that refers to, is let go of."""


class RequestQueue:
    """`threads` workers that take requests in order. `work` must not raise; it runs without any lock held.

    `writers` of them take writes first: where both directions move at once, neither is to wait for the other.
    """

    def __init__(self, name: str, *, threads: int, writers: int = 0) -> None:
        self._ready = threading.Condition(threading.Lock())
        self._idle = 0
        self._writes: _Heap = []
        self._others: _Heap = []
        self._sequence = itertools.count()
        self._closed = self._is_awaited = False
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

    def submit(self, urgency: Urgency, work: Callable[[IoRequest], None], mark: Mark | None = None) -> IoRequest:
        request = IoRequest(urgency, work, mark)
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
            if not isinstance(request, IoRequest):
                self._await(request)
                continue
            work, request.work = request.work, _done
            work(request)
            del work, request  # nothing is held while there is nothing to do

    def _take(self, heaps: _Heaps) -> IoRequest | Mark | None:
        """The next request that can be run, or a mark that has to be waited for; None at the end."""
        with self._ready:
            while True:
                found = next((each for heap in heaps for *_, each in _left(heap) if each.can_be_run()), None)
                if found is not None:
                    found.taken = True
                    return found
                left = [entry for heap in heaps for entry in _left(heap)]
                if left and not self._is_awaited:
                    self._is_awaited = True
                    return min(left, key=lambda entry: entry[1])[2].mark  # they are reached in the order of asking
                if self._closed and not left:
                    return None
                self._idle += 1
                try:
                    self._ready.wait()
                finally:
                    self._idle -= 1

    def _await(self, mark: Mark) -> None:
        """Wait for a mark: anybody may take its request then, also while this one is still on its way here."""
        with contextlib.suppress(RuntimeError):  # as in `_is_reached`
            mark.synchronize()
        with self._ready:
            self._is_awaited = False
            self._ready.notify_all()
