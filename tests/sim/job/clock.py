"""Virtual time: one heap of what is to happen. Nothing is concurrent, so a seed replays everything."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

Act = Callable[[], None]


class LaterError(Exception):
    """A shell wanted to sleep: what it was about is done again after that time."""


class Clock:
    """`now` in seconds. Takes the place of the module `time` in production shells: `monotonic`, `sleep`."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.events = 0
        self._heap: list[tuple[float, int, Act]] = []
        self._count = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        raise LaterError(seconds)

    def at(self, delay_s: float, act: Act) -> None:
        self.at_time(self.now + delay_s, act)

    def at_time(self, time_s: float, act: Act) -> None:
        """What is due at the same time is done in the order in which it was asked for."""
        self._count += 1
        heapq.heappush(self._heap, (time_s, self._count, act))

    def turn(self, until_s: float) -> bool:
        """Do what is due next. False: nothing is, before that time."""
        if not self._heap or self._heap[0][0] > until_s:
            return False
        self.now, _, act = heapq.heappop(self._heap)
        self.events += 1
        act()
        return True

    def soon(self) -> float:
        """How long something takes that usually takes a moment, and sometimes much longer."""
        drawn = self.rng.random()  # one draw for both: this is asked more often than anything else
        usual = 0.0005 if drawn < 0.5 else 0.002 if drawn < 0.75 else 0.03
        return usual * (0.5 + 1.5 * (drawn * 64 % 1.0))


class Process:
    """Something that runs, stands still, or is gone. What comes to it while it stands still waits."""

    def __init__(self, clock: Clock, node: str) -> None:
        self.clock, self.node = clock, node
        self.alive = True
        self.paused_until_s = 0.0

    @property
    def runs(self) -> bool:
        return self.alive and self.clock.now >= self.paused_until_s

    def later(self, delay_s: float, act: Act) -> None:
        self.clock.at(delay_s, lambda: self._do(act))

    def pause(self, for_s: float) -> None:
        self.paused_until_s = max(self.paused_until_s, self.clock.now + for_s)

    def _do(self, act: Act) -> None:
        if self.runs:
            act()
        elif self.alive:  # in the order in which it came: a difference of two times would be rounded, and mix it up
            self.clock.at_time(self.paused_until_s, lambda: self._do(act))
