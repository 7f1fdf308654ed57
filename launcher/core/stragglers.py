"""Members that are slow for long, compared with their peers: a smaller quota first, then another in their place.

What is compared is the time of a micro-batch, which does not depend on how many a member has. Each agent judges its own
workers; the others' times come from their agents, about once a second.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from elastrain.job.world import FULL_QUOTA
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Stage, Worker
from elastrain.launcher.shared.job_values import Command, Kill, Log, TellNodes
from elastrain.launcher.shared.notices import Speeds
from elastrain.protocol.agent_messages import Progress

_STEPS, _STEPS_LEAST = 15, 8
"""A member's own time is the median of so many of its newest steps."""
_SLOW, _FAST = 1.75, 1.25
"""So many times its peers' time is slow; below the lower number a member has recovered."""
_LEAST_S = 0.005
"""Less than that is no difference, whatever the ratio."""
_PERSISTS_S = 10.0
"""How long a member must be slow, or as fast as the others again, before its quota changes; then before it is ended."""
_TELL_EVERY_S = 1.0


@dataclass(kw_only=True)
class Speed:
    """The speed of one of this node's members."""

    times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    since_s: float | None = None
    """Since when it deserves another quota than it has."""
    ended: bool = False

    @property
    def micro_batch_s(self) -> float | None:
        return median(self.times_s) if len(self.times_s) >= _STEPS_LEAST else None


class Stragglers:
    """Owns what is known of speeds. `HangWatch` is for those that stand still; here they go on, slowly."""

    def __init__(self, cluster: Cluster, shutdown: Shutdown, view_changes: ViewChanges) -> None:
        self._cluster, self._shutdown, self._view_changes = cluster, shutdown, view_changes
        self._mine: dict[str, Speed] = {}
        self._others_s: dict[str, float] = {}
        """Members of other nodes, by the word of their agents."""
        self._told_s = 0.0

    def on_speeds(self, node: str, notice: Speeds, now: float) -> list[Command]:
        self._others_s.update(notice.micro_batch_s)
        return []

    def on_progress(self, worker: Worker, message: Progress, now: float) -> list[Command]:
        """Note that a member has committed a step in which a micro-batch took it so long."""
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
        # So slow that nothing was left for it: it would never be measured again, and nobody needs it.
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
        # What it holds must be elsewhere, and somebody must be left to do its work.
        if self._cluster.is_needed(worker.id):
            return []
        speed.ended = True
        say = f"{how}, and it stays behind with the smallest share: it is ended, and replaced"
        self._cluster.progress.explain(say)
        return [Log(event="straggler", fields={"member": worker.id}), Kill(member=worker.id, reason=say)]

    def _peers_s(self, member: str) -> float | None:
        """The median of all others of the view whose times are known; half of them at least."""
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
    """In quarters, for a member that takes `ratio` times as long as the others; its present one where that is about
    right.
    """
    fits = max(1, min(FULL_QUOTA, round(FULL_QUOTA / ratio)))
    if quota == FULL_QUOTA:
        return fits if ratio >= _SLOW else FULL_QUOTA
    if ratio < _FAST:
        return FULL_QUOTA
    # Between two steps of the scale it would go to and fro.
    return fits if ratio * quota / FULL_QUOTA >= _SLOW or fits > quota + 1 else quota
