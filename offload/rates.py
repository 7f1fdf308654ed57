"""How fast a device is in one direction: bytes that were moved, and the time that it took."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
