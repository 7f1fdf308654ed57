"""Drives that misbehave on request: for tests, and for placing a slower drive on a curve.

A wrapper around any engine. It never invents data but flips bits of what was read, as a failing drive does.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastrain.offload.drives.port import IoEngine


@dataclass(frozen=True, kw_only=True)
class EngineFaults:
    """What goes wrong. Counts are calls that still succeed; None means never. A device that vanished stays away."""

    write_fails_after: int | None = None
    read_fails_after: int | None = None
    full_after: int | None = None
    vanishes_after: int | None = None
    flips_after: int | None = None


class FaultyEngine:
    """`inner`, with faults."""

    def __init__(self, inner: IoEngine, faults: EngineFaults) -> None:
        self.name = inner.name
        self._inner = inner
        self._faults = faults
        self._lock = threading.Lock()
        self._writes = self._reads = self._calls = 0

    def reserve(self, size_bytes: int) -> None:
        self._inner.reserve(size_bytes)

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        calls, writes, _ = self._count(write=True)
        self._fail_if(_due(self._faults.vanishes_after, calls), errno.ENODEV)
        self._fail_if(_due(self._faults.write_fails_after, writes), errno.EIO)
        self._fail_if(_due(self._faults.full_after, writes), errno.ENOSPC)
        self._inner.write(offset_bytes, views)

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        calls, _, reads = self._count(write=False)
        self._fail_if(_due(self._faults.vanishes_after, calls), errno.ENODEV)
        self._fail_if(_due(self._faults.read_fails_after, reads), errno.EIO)
        self._inner.read(offset_bytes, views)
        if _due(self._faults.flips_after, reads):
            middle = views[0].cast("B")
            middle[len(middle) // 2] ^= 1

    def capacity_bytes(self) -> int:
        return self._inner.capacity_bytes()

    def close(self) -> None:
        self._inner.close()

    def _count(self, *, write: bool) -> tuple[int, int, int]:
        with self._lock:
            self._calls += 1
            self._writes += write
            self._reads += not write
            return self._calls, self._writes, self._reads

    def _fail_if(self, due: bool, number: int) -> None:
        if due:
            raise OSError(number, "injected fault", self.name)


def _due(after: int | None, count: int) -> bool:
    return after is not None and count > after


class ThrottledEngine:
    """`inner`, at no more than `bytes_per_s` over both directions together, as a slower drive."""

    def __init__(
        self,
        inner: IoEngine,
        *,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def reserve(self, size_bytes: int) -> None:
        self._inner.reserve(size_bytes)

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        until_s = self._book(views)
        self._inner.write(offset_bytes, views)
        self._sleep(max(0.0, until_s - self._clock()))

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        until_s = self._book(views)
        self._inner.read(offset_bytes, views)
        self._sleep(max(0.0, until_s - self._clock()))

    def capacity_bytes(self) -> int:
        return self._inner.capacity_bytes()

    def close(self) -> None:
        self._inner.close()

    def _book(self, views: Sequence[memoryview]) -> float:
        """When a drive that works one request after the other would be done with this one."""
        with self._lock:
            start_s = max(self._free_at_s, self._clock())
            self._free_at_s = start_s + sum(view.nbytes for view in views) / self._bytes_per_s
            return self._free_at_s
