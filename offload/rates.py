"""How fast a device is in one direction: bytes that were moved, and the time that it took."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Until something was measured; only the first passes, which spill everything anyway, are decided with it.
ASSUMED_BYTES_PER_S = 1e9
ENOUGH_TO_TELL_BYTES = 16 << 20


class Meter:
    """Bytes moved and the time during which at least one request was moving them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy = 0
        self._since_s = 0.0
        self._marked = (0, 0.0)
        self.moved_bytes = 0
        self.busy_s = 0.0
        self.recent_bytes_per_s = ASSUMED_BYTES_PER_S

    def start(self) -> None:
        with self._lock:
            if not self._busy:
                self._since_s = self._clock()
            self._busy += 1

    def stop(self, moved_bytes: int) -> None:
        with self._lock:
            self._busy -= 1
            self.moved_bytes += moved_bytes
            if not self._busy:
                self.busy_s += self._clock() - self._since_s

    def mark(self) -> None:
        """Take the rate since the last mark as the recent one, if enough was moved to tell."""
        with self._lock:
            bytes_before, s_before = self._marked
            moved_bytes, busy_s = self.moved_bytes - bytes_before, self.busy_s - s_before
            if moved_bytes >= ENOUGH_TO_TELL_BYTES and busy_s > 0:
                self.recent_bytes_per_s = moved_bytes / busy_s
                self._marked = (self.moved_bytes, self.busy_s)
