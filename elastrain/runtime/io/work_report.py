"""A worker's report about its share, its memory, and the end of its loop. The agent shows it to people."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import asdict

from elastrain.protocol.agent_messages import WorkTold
from elastrain.runtime.io.heartbeat import LoopHeartbeat

_EVERY_S = 1.0


class WorkReport:
    """The figures that the worker reports at most once a second. The loop's thread begins it, the engine's takes it."""

    def __init__(
        self, whereabouts: LoopHeartbeat, note: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Report what the loop does. `note` writes a line to the journal."""
        self._whereabouts, self._note, self._clock = whereabouts, note, clock
        self._until: int | None = None
        self._measured: Callable[[], int | None] = lambda: None
        self._limit_bytes: int | None = None
        self._told_s = float("-inf")
        self._told_micro_batches = self._steps = 0

    def measure(self, measured: Callable[[], int | None], limit_bytes: int | None) -> None:
        """Report the memory that `measured` returns in bytes, against this limit."""
        self._measured, self._limit_bytes = measured, limit_bytes

    def begin(self, until: int) -> None:
        """Note the end of the loop, before which nothing is reported."""
        self._until = until

    def take(self) -> WorkTold | None:
        """Count a committed step, and return a report if one is due."""
        self._steps += 1
        if self._until is None or self._clock() < self._told_s + _EVERY_S:
            return None
        self._told_s, steps, self._steps = self._clock(), self._steps, 0
        before, self._told_micro_batches = self._told_micro_batches, self._whereabouts.micro_batches
        told = WorkTold(
            until=self._until,
            micro_batches=(self._told_micro_batches - before) / steps,
            memory_bytes=self._measured(),
            memory_limit_bytes=self._limit_bytes,
        )
        self._note("work", **asdict(told))
        return told
