"""Waiting for a device, with an end: no drive may stop a training step for ever."""

from __future__ import annotations

from collections.abc import Callable

from elastrain.offload.deferred import DeferredLock
from elastrain.offload.errors import OffloadError


class BoundedWait:
    """Lets others hold the lock until something changes. `deadline_s` bounds each wait for a device."""

    def __init__(self, lock: DeferredLock, *, deadline_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._lock = lock
        self._deadline_s = deadline_s

    def until_s(self, began_s: float) -> float:
        """When a wait that began then has to be over."""
        return began_s + self._deadline_s

    def wait(self, until_s: float, error: type[OffloadError], what: str) -> None:
        """Wait once, for a change or for a moment. Raises `error` when the device gave no sign in time."""
        if self.clock() > until_s:
            raise error(f"{what} did not end within {self._deadline_s} s: look at the drive, or use another")
        self._lock.wait()
