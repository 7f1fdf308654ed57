"""Calls of a store that are made again: until it answers, or every so often."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from elastrain.launcher.store.port import StoreError
from elastrain.launcher.store.thread import StoreThread

T = TypeVar("T")
_AGAIN_S = 0.5


class RepeatedCalls:
    """For one loop, which calls `on_tick`."""

    def __init__(self, thread: StoreThread) -> None:
        self._thread = thread
        self._later: list[tuple[float, Callable[[], None]]] = []

    def until_answered(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        def answered(answer: T | StoreError) -> None:
            if isinstance(answer, StoreError):
                self._later.append((time.monotonic() + _AGAIN_S, lambda: self.until_answered(work, then)))
            else:
                then(answer)

        self._thread.call(lambda _: work(), answered)

    def for_ever(self, every_s: float, work: Callable[[], None]) -> None:
        """The next time is counted from the answer, so that an outage leaves no row of such calls."""

        def answered(_: StoreError | None) -> None:
            self._later.append((time.monotonic() + every_s, lambda: self.for_ever(every_s, work)))

        self._thread.call(lambda _: work(), answered)

    def next_deadline_s(self) -> float | None:
        return min((due_s for due_s, _ in self._later), default=None)

    def on_tick(self, now: float) -> None:
        due = [call for due_s, call in self._later if due_s <= now]
        self._later = [(due_s, call) for due_s, call in self._later if due_s > now]
        for call in due:
            call()
