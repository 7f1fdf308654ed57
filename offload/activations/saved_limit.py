"""Counts live bytes: memory that holds saved storages, until it is really freed. The manager's lock guards it.

The limit on saved storages in memory: how much must be free for the next one, and whether the limit can hold at all.

Values only: no lock, no clock, no I/O. The manager's lock guards it.

Waiting for a device, with an end: no drive may stop a training step for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastrain.offload.activations.deferred import DeferredLock, Watched
from elastrain.offload.errors import LimitTooSmallError, OffloadError


class Account:
    """Adds up what is watched, and keeps none of it alive. `changed` is called after each change, under the lock."""

    def __init__(self, lock: DeferredLock, changed: Callable[[], None]) -> None:
        self.live_bytes = 0
        self._lock = lock
        self._changed = changed

    def watch(self, storage: torch.UntypedStorage) -> Watched:
        """Count memory until it is freed, or until `forget`. The record keeps the note, which is about the bytes."""
        self._add(storage.nbytes())
        return self._lock.watch(storage, self.forget, storage.nbytes())

    def forget(self, watched: Watched) -> None:
        """Stop counting: the memory is gone, or belongs to others only."""
        size_bytes, watched.about = watched.about, 0
        if size_bytes:
            self._add(-size_bytes)

    def _add(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self._changed()


class SpillLimit:
    """`limit_bytes` holds now, None for no limit; it may change while somebody waits."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        # Only a limit that the user gave before anything was saved can be called too small. A later one holds from the
        # next storage on, and what was saved under another limit says nothing against it.
        self._is_given = limit_bytes is not None
        self._smallest_bytes = 0
        self._foreseen_bytes: int | None = None

    def set(self, limit_bytes: int) -> None:
        """Let another limit hold from the next storage on."""
        self.limit_bytes, self._is_given = limit_bytes, False

    def check(self) -> None:
        """Raises LimitTooSmallError, with the smallest limit that works, where one was found not to hold."""
        if self.limit_bytes is not None and self._smallest_bytes > self.limit_bytes:
            raise LimitTooSmallError(self.limit_bytes, self._smallest_bytes)

    def at_least(self, size_bytes: int) -> None:
        """Note that no limit below this would have held."""
        self._smallest_bytes = max(self._smallest_bytes, size_bytes)

    def foresee(self, largest_bytes: int) -> None:
        """Note the largest storage of a whole forward: the next one is expected to save none that is larger."""
        self._foreseen_bytes = largest_bytes

    def before_next_bytes(self, largest_bytes: int) -> int:
        """How much may be live when a forward, whose largest storage is this so far, saves its next storage.

        In the first forward nobody knows how large that will be: everything leaves.
        """
        assert self.limit_bytes is not None
        foreseen_bytes = self.limit_bytes if self._foreseen_bytes is None else self._foreseen_bytes
        return max(0, self.limit_bytes - max(largest_bytes, foreseen_bytes))

    def passed_bytes(self, *, live_bytes: int, index: int, size_bytes: int) -> int:
        """How much is live if a storage that was just saved went beyond the limit, and the limit is to blame; else 0.

        It is not to blame where another limit held a moment ago, where nothing could have left before the pass's first
        storage, or where this storage was not foreseen.
        """
        is_passed = self.limit_bytes is not None and live_bytes > self.limit_bytes
        is_foreseen = self._foreseen_bytes is None or size_bytes <= self._foreseen_bytes
        return live_bytes if is_passed and is_foreseen and self._is_given and index > 0 else 0


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
