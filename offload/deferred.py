"""A lock for callers that must not wait: they leave a note, on which the holder of the lock acts.

Finalizers of tensors and graph nodes run in any thread at any time, also in a thread that holds the lock: one that
waited for it would wait for ever. A note is acted on at once if the lock is free, else when its holder lets go.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType

# A note can slip in between the last look and the wait; a waiter looks again after this long.
LOOK_AGAIN_S = 0.02


class DeferredLock:
    """Holds the lock as a context manager; notes are acted on after entering, and before and after leaving.

    `after_notes` is called, with the lock held, whenever notes were acted on.
    """

    def __init__(self, after_notes: Callable[[], None]) -> None:
        self._after_notes = after_notes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._notes: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self.act()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.act()
        finally:
            self._lock.release()
            self._try()

    def later(self, note: Callable[[], None]) -> None:
        """Leave a note. Never waits."""
        self._notes.append(note)
        self._try()

    def act(self) -> None:
        """Act on the notes. The lock is held."""
        # Called for every saved tensor: nothing else is done where there are no notes.
        if not self._notes:
            return
        while self._notes:
            self._notes.popleft()()
        self.tell()
        self._after_notes()

    def tell(self) -> None:
        """Wake the threads that wait. The lock is held."""
        if self._waiting:
            self._changed.notify_all()

    def wait(self) -> None:
        """Let others hold the lock until something changes, or a moment has passed. The lock is held."""
        self.act()
        self._waiting += 1
        try:
            self._changed.wait(LOOK_AGAIN_S)
        finally:
            self._waiting -= 1
        self.act()

    def _try(self) -> None:
        while self._notes and self._lock.acquire(blocking=False):
            try:
                self.act()
            finally:
                self._lock.release()
