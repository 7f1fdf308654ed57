"""Counts live bytes: memory that holds saved storages, until it is really freed. The manager's lock guards it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from elastrain.offload.deferred import DeferredLock


class Watched(weakref.ref[torch.UntypedStorage]):
    """Counted memory; `size_bytes` is 0 once it is not counted any more. The record keeps it, so that it is called."""

    __slots__ = ("size_bytes",)
    size_bytes: int


class Account:
    """Adds up what is watched, and keeps none of it alive. `changed` is called after each change, under the lock."""

    def __init__(self, lock: DeferredLock, changed: Callable[[], None]) -> None:
        self.live_bytes = 0
        self._changed = changed
        weak_lock, weak_self = weakref.ref(lock), weakref.ref(self)

        def died(watched: Watched) -> None:
            if (lock := weak_lock()) is not None and (account := weak_self()) is not None:
                lock.later(lambda: account.forget(watched))

        self._died = died

    def watch(self, storage: torch.UntypedStorage) -> Watched:
        """Count memory until it is freed, or until `forget`."""
        watched = Watched(storage, self._died)
        watched.size_bytes = storage.nbytes()
        self._add(watched.size_bytes)
        return watched

    def forget(self, watched: Watched) -> None:
        """Stop counting: the memory is gone, or belongs to others only."""
        size_bytes, watched.size_bytes = watched.size_bytes, 0
        if size_bytes:
            self._add(-size_bytes)

    def _add(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self._changed()
