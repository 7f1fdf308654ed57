"""Stragglers: members that stay hopelessly slow are ended and replaced.

The members themselves give a slow one fewer runs, by the record of each step. The measure here is the time of a
micro-batch, which does not depend on how many a member computes. Each agent judges its own workers. Agents exchange the
times about once a second.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from elastrain.launcher.core.agent_events import AgentPart
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.worker_table import Stage, Worker
from elastrain.launcher.shared.job_values import Command, Kill, Log, TellNodes
from elastrain.launcher.shared.notices import Speeds
from elastrain.protocol.agent_messages import Progress, SharesChanged
from elastrain.protocol.handlers import handles

_STEPS = 5
"""A member's time is the median of so many of its newest steps."""
# The members count as many. With more, one that gets no more runs would stand here with the time before it got slow.
_SLOW, _HOPELESS = 1.75, 7.0
"""Multiples of its peers' time from which on a member is ended: the first if no run is left for it, else the second."""
_LEAST_S = 0.005
"""A smaller difference in time does not count, whatever the ratio is."""
_PERSISTS_S = 10.0
"""Time for which a member must be hopelessly slow before it is killed."""
_TELL_EVERY_S = 1.0


@dataclass(kw_only=True)
class Speed:
    """The speed of one of this node's members."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    since_s: float | None = None
    """Time since which the member is hopelessly slow, or None."""
    ended: bool = False

    @property
    def micro_batch_s(self) -> float | None:
        """Median time of a micro-batch, or None with too few steps."""
        return median(self.times_s) if len(self.times_s) == _STEPS else None


class Stragglers(AgentPart):
    """The measured speeds. `HangDetector` handles members that stand still; these go on, but slowly."""

    def __init__(self, cluster: Cluster, shutdown: Shutdown) -> None:
        self._cluster, self._shutdown = cluster, shutdown
        self._mine: dict[str, Speed] = {}
        self._others_s: dict[str, float] = {}
        """Times of members of other nodes, as their agents report them."""
        self._told_s = 0.0

    @handles(Speeds)
    def on_speeds(self, notice: Speeds) -> list[Command]:
        """Record the micro-batch times of another node's members."""
        self._others_s.update(notice.micro_batch_s)
        return []

    @handles(SharesChanged)
    def on_shares(self, worker: Worker, message: SharesChanged) -> list[Command]:
        """Tell people that the members have agreed on other shares of the runs."""
        self._cluster.progress.explain(message.reason)
        fields = {"member": worker.id, "step": message.step, "reason": message.reason}
        return [Log(event="shares", fields=fields, say=message.reason)]

    def on_progress(self, worker: Worker, message: Progress, now: float) -> list[Command]:
        """Record a committed step with the member's time for a micro-batch, and judge the member."""
        speed = self._mine.setdefault(worker.id, Speed())
        if worker.stage is not Stage.MEMBER or self._shutdown.finishing:
            return []
        if message.micro_batch_s is not None:
            speed.times_s.append(message.micro_batch_s)
        return self._tell(now) + self._judge(worker, speed, now, is_idle=message.micro_batch_s is None)

    def _judge(self, worker: Worker, speed: Speed, now: float, *, is_idle: bool) -> list[Command]:
        mine_s, peers_s = speed.micro_batch_s, self._peers_s(worker.id)
        if mine_s is None or peers_s is None or speed.ended:
            return []
        # A member so slow that it gets no more runs would never be measured again, and is not needed.
        least = _SLOW if is_idle else _HOPELESS
        if mine_s - peers_s <= _LEAST_S or mine_s < least * peers_s:
            speed.since_s = None
            return []
        if speed.since_s is None:
            speed.since_s = now
        if now - speed.since_s < _PERSISTS_S:
            return []
        speed.since_s = None
        return self._end(
            worker, speed, f"{worker.id} takes {mine_s:.3g} s for a micro-batch, the others {peers_s:.3g} s"
        )

    def _end(self, worker: Worker, speed: Speed, how: str) -> list[Command]:
        # The member's state must have another holder, and another member must be left to do its work.
        if self._cluster.is_needed(worker.id):
            return []
        speed.ended = True
        say = f"{how}, and stays that slow: it is ended, and replaced"
        self._cluster.progress.explain(say)
        return [Log(event="straggler", fields={"member": worker.id}), Kill(member=worker.id, reason=say)]

    def _peers_s(self, member: str) -> float | None:
        """Return the median time of the other members of the view, or None if fewer than half are known."""
        mine = {other: speed.micro_batch_s for other, speed in self._mine.items()}
        others = [m for m in self._cluster.ids if m != member]
        known = [mine.get(m) or self._others_s.get(m) for m in others]
        told = [time_s for time_s in known if time_s]
        return median(told) if told and 2 * len(told) >= len(others) else None

    def _tell(self, now: float) -> list[Command]:
        if self._cluster.config.alone or now - self._told_s < _TELL_EVERY_S:
            return []
        self._told_s = now
        here = {w.id: self._mine[w.id].micro_batch_s for w in self._cluster.mine_in_view() if w.id in self._mine}
        told = {member: time_s for member, time_s in here.items() if time_s is not None}
        return [TellNodes(message=Speeds(micro_batch_s=told))] if told else []
