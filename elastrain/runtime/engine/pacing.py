"""Timing rules of the engine: priority of the training loop, deadline of a recovery, limit of copies, end of a drain.

No I/O. The clock is a parameter, so that tests need not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from elastrain import protocol as p
from elastrain.runtime.engine.copy_pace import Clock, CopyTraffic, Giver
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.io.loop_channel import LOOK_EVERY_S

BETWEEN_STEPS_S = 0.05
"""Delay of background work between a commit and the next run in seconds, at least. No member computes meanwhile."""
BETWEEN_STEPS_SHARE = 0.25
"""The same as a share of the time from the commit before: in large models the next run begins later."""
BETWEEN_STEPS_MOST_S = 1.0
"""The same in seconds, at most, so that the end of a long recovery delays little."""
HANDED_OVER_S = 0.003
"""Delay of background work in seconds after the training loop got a run, so that the loop gets the interpreter."""
RECOVERY_DEADLINE_S = 10.0
"""Seconds after which a missing report is reported to the agent, which judges the member that should have sent it."""


class EnginePace:
    """The timing rules of one engine.

    giver: the part of the core that gives copies.
    busy: returns the members whose links still have much to send.
    """

    def __init__(
        self,
        giver: Giver,
        loop: LoopHeartbeat,
        *,
        clock: Clock,
        idle_cores: Callable[[], float],
        busy: Callable[[], frozenset[str]],
    ) -> None:
        self.loop = LoopFirst(clock)
        self.recovery = RecoveryDeadline(clock)
        self.copies = CopyTraffic(
            giver, clock=clock, idle_cores=idle_cores, is_computing=lambda: loop.is_computing, busy=busy
        )

    def wait_s(self, *, has_news: bool, has_work_behind: bool) -> float:
        """Return the seconds to wait for the network. `has_work_behind`: background work is left to do."""
        return self.copies.wait_s(self.loop.wait_s(has_news=has_news, has_work_behind=has_work_behind))


class LoopFirst:
    """A short delay of background work, which competes with the training loop for the interpreter."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s = 0.0
        self._committed_s = clock()

    def committed(self) -> None:
        """Hold background work back until the loop gets its next run, or for a quarter of the time of a step.

        Until then all members update, send and receive parameters, and those of one machine share its processors.
        """
        before_s, self._committed_s = self._committed_s, self._clock()
        share_s = BETWEEN_STEPS_SHARE * (self._committed_s - before_s)
        self.let_loop_go_first(min(BETWEEN_STEPS_MOST_S, max(BETWEEN_STEPS_S, share_s)))

    def heard(self, told: p.Event) -> None:
        """Hold background work back if the loop waits for the whole state, which the engine's thread copies."""
        if isinstance(told, p.StateWanted):
            self.let_loop_go_first(BETWEEN_STEPS_MOST_S)

    def let_loop_go_first(self, for_s: float) -> None:
        """Hold background work back for `for_s` seconds."""
        self._until_s = self._clock() + for_s

    def may_work_behind(self) -> bool:
        """Return True if background work is not held back now."""
        return self._clock() >= self._until_s

    def wait_s(self, *, has_news: bool, has_work_behind: bool) -> float:
        """Return the seconds to wait for the network: none with news from the loop, less with background work."""
        if has_news:
            return 0.0
        return min(LOOK_EVERY_S, max(0.0, self._until_s - self._clock())) if has_work_behind else LOOK_EVERY_S


class RecoveryDeadline:
    """The deadline of a recovery, which lasts from a change of the view until the view is in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None

    def begin(self) -> None:
        """Start the deadline."""
        self._since_s = self._clock()

    def end(self) -> None:
        """Stop the deadline, because the view is in order."""
        self._since_s = None

    def is_over(self) -> bool:
        """Return True once the deadline has passed, and start it again."""
        if self._since_s is None or self._clock() - self._since_s < RECOVERY_DEADLINE_S:
            return False
        self.begin()
        return True


Elsewhere = Mapping[int, frozenset[str]]
"""Shard that this member holds -> its holders on other nodes."""


class Departure:
    """The drain of a member whose node was told to leave. It ends the member when no work and no state is lost."""

    def __init__(self) -> None:
        self._is_asked = False
        self._before: Elsewhere | None = None

    def ask(self) -> None:
        """Note that the node was told to leave."""
        self._is_asked = True

    def may_go(self, elsewhere: Elsewhere | None) -> bool:
        """Return True if this member may end after this commit. Call it after each commit.

        Each of its shards then has a holder on another node that was a holder at the last commit, too. Such a holder
        has the current state. `elsewhere`: None while the view changes, because it is unknown which members live.
        """
        before, self._before = self._before, elsewhere
        if not self._is_asked or before is None or elsewhere is None:
            return False
        return all(holders & before.get(shard, frozenset()) for shard, holders in elsewhere.items())
