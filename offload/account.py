"""The account of live bytes: memory that holds saved storages, until it really dies. The owner's lock guards it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial

import torch

from elastrain.offload.notes import NoteLock
from elastrain.offload.records import Record


class Account:
    """`changed` is called with the lock held after each change. Holds no storage alive."""

    def __init__(self, lock: NoteLock, changed: Callable[[], None]) -> None:
        self.live_bytes = 0
        self._lock = weakref.ref(lock)
        self._changed = changed
        self._keys = itertools.count()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def watch(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Count memory until it dies, or until the record that it was saved for is gone."""
        key, size_bytes = next(self._keys), storage.nbytes()
        self._alive[key] = weakref.ref(storage, self._leaves_note(partial(self._gone, key, size_bytes)))
        record.watched.append((key, size_bytes))
        self._add(size_bytes)

    def forget(self, record: Record) -> None:
        """The record is gone: what is left of its memory belongs to others."""
        for key, size_bytes in record.watched:
            self._gone(key, size_bytes)

    def _leaves_note(self, note: Callable[[], None]) -> Callable[[object], None]:
        weak_lock = self._lock

        def finalizer(_: object) -> None:
            if (lock := weak_lock()) is not None:
                lock.later(note)

        return finalizer

    def _gone(self, key: int, size_bytes: int) -> None:
        if self._alive.pop(key, None) is not None:
            self._add(-size_bytes)

    def _add(self, more_bytes: int) -> None:
        self.live_bytes += more_bytes
        self._changed()
