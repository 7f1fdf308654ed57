"""Counts live bytes: memory that holds saved storages, until it is really freed. The manager's lock guards it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastrain.offload.deferred import DeferredLock, Watched


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
