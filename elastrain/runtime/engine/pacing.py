"""When the engine does what: the training loop goes first after a commit and a hand-over; a recovery has a deadline;
copies to new holders take what time they may.

The clock is a parameter, so that tests need not wait.

When a member whose node is told to go may end: no work is lost with it, and no state. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastrain.runtime.engine.copy_pace import Clock, CopyTraffic, Giver
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.io.loop_channel import LOOK_EVERY_S

BETWEEN_STEPS_S = 0.05
"""How long background work waits at most between a commit and the next run: nobody computes meanwhile."""
HANDED_OVER_S = 0.003
"""How long it lets the training loop have the interpreter when that has got a run."""
RECOVERY_DEADLINE_S = 10.0
"""A report that has not come by then is reported to the agent, who judges its sender."""


class EnginePace:
    """Owns the three clocks of an engine, whose core gives copies as `giver`."""

    def __init__(self, giver: Giver, loop: LoopHeartbeat, *, clock: Clock, idle_cores: Callable[[], float]) -> None:
        self.loop = LoopFirst(clock)
        self.recovery = RecoveryDeadline(clock)
        self.copies = CopyTraffic(giver, clock=clock, idle_cores=idle_cores, is_computing=lambda: loop.is_computing)

    def wait_s(self, *, has_news: bool, has_work_behind: bool) -> float:
        """How long to wait for the network."""
        return self.copies.wait_s(self.loop.wait_s(has_news=has_news, has_work_behind=has_work_behind))


class LoopFirst:
    """Background work competes with the training loop for the interpreter: for a moment it is held back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = 0.0

    def let_loop_go_first(self, for_s: float) -> None:
        self._until_s = self._clock() + for_s

    def may_work_behind(self) -> bool:
        return self._clock() >= self._until_s

    def wait_s(self, *, has_news: bool, has_work_behind: bool) -> float:
        """How long to wait for the network."""
        if has_news:
            return 0.0
        return min(LOOK_EVERY_S, max(0.0, self._until_s - self._clock())) if has_work_behind else LOOK_EVERY_S


class RecoveryDeadline:
    """Runs from a change of the view to the moment at which the view is in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None

    def begin(self) -> None:
        self._since_s = self._clock()

    def end(self) -> None:
        self._since_s = None

    def is_over(self) -> bool:
        """True once per deadline: it then runs anew."""
        if self._since_s is None or self._clock() - self._since_s < RECOVERY_DEADLINE_S:
            return False
        self.begin()
        return True


Elsewhere = Mapping[int, frozenset[str]]
"""Each shard that this member holds -> its holders on other nodes."""


class Departure:
    """Owns whether the node is to go, and who held what elsewhere at the last commit."""

    def __init__(self) -> None:
        self._is_asked = False
        self._before: Elsewhere | None = None

    def ask(self) -> None:
        """The node is told to go."""
        self._is_asked = True

    def may_go(self, elsewhere: Elsewhere | None) -> bool:
        """After each commit: each shard has a holder elsewhere that was one at the last commit, too, and so knows it.

        elsewhere: None while views change, when nobody knows who lives.
        """
        before, self._before = self._before, elsewhere
        if not self._is_asked or before is None or elsewhere is None:
            return False
        return all(holders & before.get(shard, frozenset()) for shard, holders in elsewhere.items())
