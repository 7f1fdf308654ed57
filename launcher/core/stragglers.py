"""Stragglers: members that are slow for a long time get a smaller quota first, and are replaced later.

The measure is the time of a micro-batch, which does not depend on how many a member computes. Each agent judges its own
workers. Agents exchange the times about once a second.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from elastrain.job.world import FULL_QUOTA
from elastrain.launcher.core.agent_events import AgentPart
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Stage, Worker
from elastrain.launcher.shared.job_values import Command, Kill, Log, TellNodes
from elastrain.launcher.shared.notices import Speeds
from elastrain.protocol.agent_messages import Progress
from elastrain.protocol.handlers import handles

_STEPS, _STEPS_LEAST = 15, 8
"""A member's time is the median of its newest steps: at most the first number of them, at least the second."""
_SLOW, _FAST = 1.75, 1.25
"""A member is slow from this multiple of its peers' time on; it has recovered below the second multiple."""
_LEAST_S = 0.005
"""A smaller difference in time does not count, whatever the ratio is."""
_PERSISTS_S = 10.0
"""Time for which a member must be slow, or fast again, before its quota changes; and later before it is killed."""
_TELL_EVERY_S = 1.0


@dataclass(kw_only=True)
class Speed:
    """The speed of one of this node's members."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    since_s: float | None = None
    """Time since which the member deserves another quota than it has, or None."""
    ended: bool = False

    @property
    def micro_batch_s(self) -> float | None:
        """Median time of a micro-batch, or None with too few steps."""
        return median(self.times_s) if len(self.times_s) >= _STEPS_LEAST else None


class Stragglers(AgentPart):
    """The measured speeds. `HangDetector` handles members that stand still; these go on, but slowly."""

    def __init__(self, cluster: Cluster, shutdown: Shutdown, view_changes: ViewChanges) -> None:
        self._cluster, self._shutdown, self._view_changes = cluster, shutdown, view_changes
        self._mine: dict[str, Speed] = {}
        self._others_s: dict[str, float] = {}
        """Times of members of other nodes, as their agents report them."""
        self._told_s = 0.0

    @handles(Speeds)
    def on_speeds(self, notice: Speeds) -> list[Command]:
        """Record the micro-batch times of another node's members."""
        self._others_s.update(notice.micro_batch_s)
        return []

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
        quota = next((m.quota for m in self._cluster.members if m.id == worker.id), FULL_QUOTA)
        if mine_s is None or peers_s is None or speed.ended:
            return []
        ratio = mine_s / peers_s if mine_s - peers_s > _LEAST_S else 1.0
        deserves = deserved_quota(ratio, quota)
        # A member so slow that it gets no more runs would never be measured again, and is not needed.
        lags = quota < FULL_QUOTA if is_idle else quota == 1 and ratio * quota / FULL_QUOTA >= _SLOW
        if deserves == quota and not lags:
            speed.since_s = None
            return []
        if speed.since_s is None:
            speed.since_s = now
        if now - speed.since_s < _PERSISTS_S:
            return []
        speed.since_s = None
        how = f"{worker.id} takes {mine_s:.3g} s for a micro-batch, the others {peers_s:.3g} s"
        return self._end(worker, speed, how) if lags else self._change(worker, deserves, how, now)

    def _change(self, worker: Worker, quota: int, how: str, now: float) -> list[Command]:
        share = (
            "its full share of the runs again" if quota == FULL_QUOTA else f"{quota} quarters of a share of the runs"
        )
        say = f"{how}: it gets {share}"
        log = Log(event="quota", fields={"member": worker.id, "quarters": quota, "reason": say}, say=say)
        self._cluster.progress.explain(say)
        return [log, *self._view_changes.wish_quota(worker.id, quota, now)]

    def _end(self, worker: Worker, speed: Speed, how: str) -> list[Command]:
        # The member's state must have another holder, and another member must be left to do its work.
        if self._cluster.is_needed(worker.id):
            return []
        speed.ended = True
        say = f"{how}, and it stays behind with the smallest share: it is ended, and replaced"
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


def deserved_quota(ratio: float, quota: int) -> int:
    """Return the quota, in quarters, for a member that takes `ratio` times as long as its peers.

    Keeps one that nearly fits.
    """
    fits = max(1, min(FULL_QUOTA, round(FULL_QUOTA / ratio)))
    if quota == FULL_QUOTA:
        return fits if ratio >= _SLOW else FULL_QUOTA
    if ratio < _FAST:
        return FULL_QUOTA
    # Otherwise the quota would alternate between two neighbouring values.
    return fits if ratio * quota / FULL_QUOTA >= _SLOW or fits > quota + 1 else quota
