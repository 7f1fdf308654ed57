"""A worker that is slower than it could be: each micro-batch takes a multiple of its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class Slowness:
    """`begin` in any thread; `around` wraps what surrounds each micro-batch, in the training loop's."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._factor, self._how, self._until_s = 1.0, "busy", 0.0
        self._last_s = 0.0
        """What the last micro-batch took by itself."""

    def begin(self, factor: float, how: str, for_s: float | None) -> None:
        self._factor, self._how = factor, how
        self._until_s = self._clock() + (math.inf if for_s is None else for_s)

    def around(
        self, computing: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """`computing`, after a delay that makes this micro-batch so many times as long as the one before it was."""

        @contextmanager
        def slowed() -> Iterator[None]:
            self._delay()
            began_s = self._clock()
            with computing():
                yield
            self._last_s = self._clock() - began_s

        return slowed

    def _delay(self) -> None:
        if self._clock() >= self._until_s:
            return
        # Before the computation: afterwards its result would be on its way already.
        until_s = self._clock() + (self._factor - 1.0) * self._last_s
        if self._how == "sleep":
            self._sleep(max(0.0, until_s - self._clock()))
        while self._clock() < until_s:
            pass
