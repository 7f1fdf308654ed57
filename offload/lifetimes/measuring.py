"""Measures one point at a time: its seconds without waits, what it takes besides pieces, what it saves."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastrain.offload.lifetimes.custody import PieceCustody
from elastrain.offload.lifetimes.memory import MemoryMeter


class PointMeter:
    """Begins and ends with each point. Seconds leave out what custody waited for."""

    def __init__(
        self, custody: PieceCustody, meter: MemoryMeter, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.saved_bytes = 0
        self._custody = custody
        self._meter = meter
        self._clock = clock
        self._since_s = self._waited_s = 0.0
        self._held: tuple[int, int] | None = None  # what was accounted for, and what really was held

    def begin(self, *, with_memory: bool) -> None:
        """A point begins: all that it wants is there."""
        self.saved_bytes, self._held = 0, None
        if with_memory:
            # The peak over what is accounted for is what computing itself takes.
            self._meter.forget_peak()
            self._held = self._custody.accounted_bytes(), self._meter.own_bytes()[0]
        self._since_s, self._waited_s = self._clock(), self._custody.waited_s

    def seconds(self) -> float:
        """Since the point began, without waits."""
        return max(0.0, self._clock() - self._since_s - (self._custody.waited_s - self._waited_s))

    def extra_bytes(self) -> int:
        """The most that was held since the point began, without what pieces and saved tensors took meanwhile."""
        if self._held is None:
            return 0
        (accounted, own), (_, most) = self._held, self._meter.own_bytes()
        more = max(0, self._custody.accounted_bytes() - accounted)
        return max(0, most - own - more)
