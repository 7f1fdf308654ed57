"""How fast this job goes, learned from its own committed steps: what a hang is judged by."""

from __future__ import annotations

from collections import deque
from statistics import median

from elastrain.base.places import Station

_STEPS_MOST, _STEPS_LEAST = 32, 3
"""So many of the newest steps count; with fewer there is nothing to judge by."""
_REMEMBERED_STEPS = 100
"""How long a healthy standstill is remembered."""
_WORTH_NOTING_S = 0.5


class Pace:
    """Durations of committed steps, and the longest standstills of threads that went on by themselves afterwards."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=_STEPS_MOST)
        self._newest: tuple[int, float] | None = None
        """The newest committed step, and when this agent first heard of it."""
        self._healthy: deque[tuple[int, Station, float]] = deque()
        """(step, place, seconds)."""

    def commit(self, step: int, now: float) -> None:
        """Note that a member of this node has committed a step; the first one counts."""
        if self._newest is not None and step <= self._newest[0]:
            return
        # A step that this agent has heard nothing of (no member of its was in the view) has no duration.
        if self._newest is not None and step == self._newest[0] + 1:
            self._steps_s.append(now - self._newest[1])
        self._newest = (step, now)
        while self._healthy and self._healthy[0][0] < step - _REMEMBERED_STEPS:
            self._healthy.popleft()

    def note(self, place: Station, stood_s: float) -> None:
        """Note that a thread has stood there for so long, and went on by itself."""
        if stood_s >= _WORTH_NOTING_S and self._newest is not None:
            self._healthy.append((self._newest[0], place, stood_s))

    @property
    def step_s(self) -> float | None:
        """The median step. Half of them may have had an evaluation in them and it would still be right."""
        return median(self._steps_s) if len(self._steps_s) >= _STEPS_LEAST else None

    def longest_s(self, place: Station) -> float:
        """The longest healthy standstill there: jobs whose micro-batches differ much have long ones."""
        return max((stood_s for _, where, stood_s in self._healthy if where is place), default=0.0)
