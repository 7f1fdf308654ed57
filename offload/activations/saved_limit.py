"""Accounting of saved bytes in memory (`Account`), their limit (`SpillLimit`), and bounded waits (`BoundedWait`).

The manager's lock guards all of it. `SpillLimit` is pure arithmetic. Every wait for a device has a deadline, because no
drive may stop a training step forever.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastrain.offload.activations.deferred import DeferredLock, Watched
from elastrain.offload.errors import LimitTooSmallError, OffloadError


class Account:
    """The number of live bytes: memory that holds saved storages and is not freed yet.

    Keeps no storage alive. `changed` is called after each change, with the lock held.
    """

    def __init__(self, lock: DeferredLock, changed: Callable[[], None]) -> None:
        self.live_bytes = 0
        self._lock = lock
        self._changed = changed

    def watch(self, storage: torch.UntypedStorage) -> Watched:
        """Count a storage's bytes until it is freed, or until `forget`. The caller keeps the returned note."""
        self._add(storage.nbytes())
        return self._lock.watch(storage, self.forget, storage.nbytes())

    def forget(self, watched: Watched) -> None:
        """Stop to count a storage, because its memory is freed or belongs to the program alone."""
        size_bytes, watched.about = watched.about, 0
        if size_bytes:
            self._add(-size_bytes)

    def _add(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self._changed()


class SpillLimit:
    """The limit on saved bytes in memory. `limit_bytes` is None for no limit; it may change during a wait."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        # Only a limit that was set before anything was saved can be found too small. A later one applies from the
        # next storage on, and storages that were saved under another limit prove nothing about it.
        self._is_given = limit_bytes is not None
        self._smallest_bytes = 0
        self._foreseen_bytes: int | None = None

    def set(self, limit_bytes: int) -> None:
        """Set another limit, which applies from the next storage on."""
        self.limit_bytes, self._is_given = limit_bytes, False

    def check(self) -> None:
        """Raise LimitTooSmallError, with the smallest limit that works, if the limit was found too small."""
        if self.limit_bytes is not None and self._smallest_bytes > self.limit_bytes:
            raise LimitTooSmallError(self.limit_bytes, self._smallest_bytes)

    def at_least(self, size_bytes: int) -> None:
        """Note that any limit below `size_bytes` would have been exceeded."""
        self._smallest_bytes = max(self._smallest_bytes, size_bytes)

    def foresee(self, largest_bytes: int) -> None:
        """Note the largest storage of a whole forward. The next forward is expected to save none that is larger."""
        self._foreseen_bytes = largest_bytes

    def before_next_bytes(self, largest_bytes: int) -> int:
        """Return how many bytes may be live before the next storage is saved.

        `largest_bytes` is the largest storage of this forward so far. In the first forward the result is 0, because the
        size of the next storage is unknown.
        """
        assert self.limit_bytes is not None
        foreseen_bytes = self.limit_bytes if self._foreseen_bytes is None else self._foreseen_bytes
        return max(0, self.limit_bytes - max(largest_bytes, foreseen_bytes))

    def passed_bytes(self, *, live_bytes: int, index: int, size_bytes: int) -> int:
        """Return the live bytes if the storage just saved exceeds the limit and proves it too small, else 0.

        Three cases prove nothing: the limit was changed; the storage is the pass's first, so that nothing could have
        left before it; or it is larger than any storage of the forward before.
        """
        is_passed = self.limit_bytes is not None and live_bytes > self.limit_bytes
        is_foreseen = self._foreseen_bytes is None or size_bytes <= self._foreseen_bytes
        return live_bytes if is_passed and is_foreseen and self._is_given and index > 0 else 0


class BoundedWait:
    """Waits that release the lock until something changes. `deadline_s` bounds each wait for a device."""

    def __init__(self, lock: DeferredLock, *, deadline_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._lock = lock
        self._deadline_s = deadline_s

    def until_s(self, began_s: float) -> float:
        """Return the deadline of a wait that began at `began_s`."""
        return began_s + self._deadline_s

    def wait(self, until_s: float, error: type[OffloadError], what: str) -> None:
        """Wait once, for a change or for a moment. Raises `error` if the deadline has passed."""
        if self.clock() > until_s:
            raise error(f"{what} did not end within {self._deadline_s} s: look at the drive, or use another")
        self._lock.wait()
