"""Slots of a slab (`SlotAllocator`), measured rates (`Meter`), and the request queue of one device (`RequestQueue`).

Requests are ordered and can be cancelled: reads come before writes, and reads that backward waits for come first. A
request that must wait for an accelerator does not block others, because at most one worker waits for such a mark.

Every request is run exactly once. A cancelled one runs too: it checks `cancelled` and reports its end, so that no
waiting thread is forgotten. `SlotAllocator` is pure arithmetic.
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
    """An allocator of slots below `quota_bytes`. `end_bytes` is the highest end of all slots so far."""

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.end_bytes = 0
        self.used_bytes = 0
        self._free = FreeRanges(quota_bytes)

    @property
    def holes(self) -> tuple[Slot, ...]:
        """Free ranges below `end_bytes`, sorted by offset. No two of them are adjacent."""
        below = [(start, min(stop, self.end_bytes)) for start, stop in self._free if start < self.end_bytes]
        return tuple(Slot(offset_bytes=start, size_bytes=stop - start) for start, stop in below)

    def allocate(self, size_bytes: int) -> Slot | None:
        """Return a slot of at least `size_bytes`, or None if no free range below the quota is large enough."""
        size_bytes = round_up(size_bytes)
        offset_bytes = self._free.take(size_bytes)
        if offset_bytes is None:
            return None
        self.used_bytes += size_bytes
        self.end_bytes = max(self.end_bytes, offset_bytes + size_bytes)
        return Slot(offset_bytes=offset_bytes, size_bytes=size_bytes)

    def free(self, slot: Slot) -> None:
        """Free a slot. Raises `ValueError` if it is not allocated."""
        self._free.give(slot.offset_bytes, slot.offset_bytes + slot.size_bytes)
        self.used_bytes -= slot.size_bytes


# Rate until one was measured. It affects only decisions about the first passes, which spill everything anyway.
ASSUMED_BYTES_PER_S = 1e9
ENOUGH_TO_TELL_BYTES = 16 << 20


class DeviceTime:
    """The busy time of one device, shared by the meters of its directions.

    Directions that move at once get equal parts.

    The rates of a drive therefore describe one direction at a time, in whatever way reads and writes were mixed.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self._meters: list[Meter] = []
        self._until_s = 0.0

    def join(self, meter: Meter) -> None:
        """Add the meter of one direction."""
        self._meters.append(meter)

    def spend(self) -> None:
        """Distribute the time since the last call among the directions that move. The lock must be held."""
        now_s = self._clock()
        moving = [each for each in self._meters if each.moving]
        for each in moving:
            each.busy_s += (now_s - self._until_s) / len(moving)
        self._until_s = now_s


class Meter:
    """The bytes moved in one direction, and the time in which requests moved them.

    `moving` is the number of requests under way.
    """

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
        """Note that a request begins to move bytes."""
        with self._time.lock:
            self._time.spend()
            self.moving += 1
            self._started += 1

    def stop(self, moved_bytes: int) -> None:
        """Note that a request has ended."""
        with self._time.lock:
            self._time.spend()
            self.moving -= 1
            self.moved_bytes += moved_bytes

    @property
    def lone(self) -> int:
        """The number of the request that is moving, if it is the only one; else 0."""
        with self._time.lock:
            return self._started * (self.moving == 1)

    def tell(self, lone: int, moved_bytes: int, took_s: float) -> None:
        """Report a request whose time was measured elsewhere. `lone` is the value of `Meter.lone` before it began.

        Only requests that stayed alone count, and the fastest of them is the rate, because others also waited for the
        GIL. After the first such report, the time between `start` and `stop` is no longer used.
        """
        with self._time.lock:
            self._is_told = True
            if lone == self._started and moved_bytes >= ENOUGH_TO_TELL_BYTES:
                self._told_bytes_per_s = max(self._told_bytes_per_s, moved_bytes / took_s)

    def mark(self) -> None:
        """Take the rate since the last mark as the recent one, if enough bytes were moved."""
        with self._time.lock:
            bytes_before, s_before = self._marked
            moved_bytes, busy_s = self.moved_bytes - bytes_before, self.busy_s - s_before
            if self._told_bytes_per_s:
                self.recent_bytes_per_s, self._told_bytes_per_s = self._told_bytes_per_s, 0.0
            if moved_bytes >= ENOUGH_TO_TELL_BYTES and busy_s > 0 and not self._is_told:
                self.recent_bytes_per_s = moved_bytes / busy_s
                self._marked = (self.moved_bytes, self.busy_s)


class Urgency(IntEnum):
    """The order of requests. Requests of equal urgency are first come, first served."""

    CANCELLED = 0  # moves nothing, and only reports its end
    DEMAND = 1  # backward is waiting for it
    PREFETCH = 2
    WRITE = 3


class Mark(Protocol):
    """A point that an accelerator must reach before bytes can be moved, such as a CUDA event."""

    def query(self) -> bool:
        """Return True if the point is reached."""

    def synchronize(self) -> None:
        """Wait until the point is reached."""


class IoRequest:
    """One read or write of one storage. It must wait for its mark, if it has one."""

    __slots__ = ("cancelled", "mark", "taken", "urgency", "work")

    def __init__(self, urgency: Urgency, work: Callable[[IoRequest], None], mark: Mark | None) -> None:
        self.urgency = urgency
        self.work = work
        self.mark = mark
        self.taken = False
        self.cancelled = False

    def can_be_run(self) -> bool:
        """Return True if the request need not wait for its mark.

        A mark that fails counts as reached, because moving the bytes will report the error.
        """
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
"""The two heaps of requests, in the order in which a worker searches them."""


def _left(heap: _Heap) -> Iterator[tuple[int, int, IoRequest]]:
    """Yield the entries that no worker has taken, in order. A hastened or cancelled request is in the heap twice."""
    while heap and heap[0][2].taken:
        heapq.heappop(heap)
    yield from heap[:1]
    yield from sorted(entry for entry in heap[1:] if not entry[2].taken)


def _done(_: IoRequest) -> None:
    """Replace the work of a request that was run, so that the work and all that it refers to can be freed."""


class RequestQueue:
    """A pool of `threads` workers that run requests in order. `work` must not raise; it runs without any lock held.

    `writers` of the workers prefer writes, for devices that can read and write at full speed at once.
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
        """Queue a request and return it."""
        request = IoRequest(urgency, work, mark)
        self._push(request)
        return request

    def hasten(self, request: IoRequest) -> None:
        """Move a request to the front of the queue if it has not begun."""
        if request.urgency > Urgency.DEMAND and not request.taken:
            request.urgency = Urgency.DEMAND
            self._push(request)

    def cancel(self, request: IoRequest) -> None:
        """Cancel a request. It still runs, in order to report its end."""
        request.cancelled = True
        if not request.taken:
            request.urgency = Urgency.CANCELLED
            self._push(request)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the workers after everything in the queue has run."""
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
            del work, request  # nothing is kept alive while the worker is idle

    def _take(self, heaps: _Heaps) -> IoRequest | Mark | None:
        """Wait for work.

        Returns a request that can be run, a mark to wait for, or None if the queue is closed and empty.
        """
        with self._ready:
            while True:
                found = next((each for heap in heaps for *_, each in _left(heap) if each.can_be_run()), None)
                if found is not None:
                    found.taken = True
                    return found
                left = [entry for heap in heaps for entry in _left(heap)]
                if left and not self._is_awaited:
                    self._is_awaited = True
                    return min(left, key=lambda entry: entry[1])[2].mark  # marks are reached in the order of submission
                if self._closed and not left:
                    return None
                self._idle += 1
                try:
                    self._ready.wait()
                finally:
                    self._idle -= 1

    def _await(self, mark: Mark) -> None:
        """Wait for a mark, then wake all workers. Any worker may take its request."""
        with contextlib.suppress(RuntimeError):  # a mark that fails counts as reached
            mark.synchronize()
        with self._ready:
            self._is_awaited = False
            self._ready.notify_all()
