"""Pace of the job, and share, micro-batch time and memory of each member, as `status` shows them.

Each agent hears its own workers. Agents exchange what they have heard about once a second.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec.structs import asdict, replace

from elastrain.launcher.core.agent_events import AgentPart
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Command, TellNodes
from elastrain.launcher.shared.notices import MemberWork, WorkShared
from elastrain.protocol import agent_messages as am
from elastrain.protocol.handlers import handles

_TELL_EVERY_S = 1.0
_PACE_OVER_S = 60.0
"""The pace counts steps of so many last seconds, and at least the last two steps."""


class StepPace:
    """The times at which this agent first heard of the newest steps."""

    def __init__(self) -> None:
        self._heard: deque[tuple[float, int]] = deque()

    def commit(self, step: int, now: float) -> None:
        """Note a committed step. Repeated reports of a step do not count."""
        if self._heard and step <= self._heard[-1][1]:
            return
        self._heard.append((now, step))
        while len(self._heard) > 2 and self._heard[1][0] < now - _PACE_OVER_S:
            self._heard.popleft()

    def per_minute(self, now: float) -> float | None:
        """Return the steps per minute, or None before the second step.

        A step that takes longer than usual lowers the pace while it lasts.
        """
        if len(self._heard) < 2:
            return None
        (begin_s, first), (end_s, last) = self._heard[0], self._heard[-1]
        usual_s = (end_s - begin_s) / (last - first)
        passed_s = max(end_s - begin_s, now - begin_s - usual_s, 1e-6)
        return 60.0 * (last - first) / passed_s


class MembersWork(AgentPart):
    """The work of all members, as far as this agent has heard."""

    def __init__(self, *, alone: bool) -> None:
        self.until: int | None = None
        """The step before which the loop ends, by the newest report."""
        self.pace = StepPace()
        self._alone = alone
        self._mine: dict[str, MemberWork] = {}
        self._others: dict[str, MemberWork] = {}
        self._told_s = 0.0

    def on_progress(self, worker: Worker, message: am.Progress, now: float) -> list[Command]:
        """Note a committed step of a worker, and tell the other nodes once a second."""
        self.pace.commit(message.step, now)
        if message.micro_batch_s is not None:
            self._note(worker.id, micro_batch_s=message.micro_batch_s)
        if self._alone or now - self._told_s < _TELL_EVERY_S or not self._mine:
            return []
        self._told_s = now
        return [TellNodes(message=WorkShared(members=dict(self._mine)))]

    @handles(am.WorkTold)
    def on_work(self, worker: Worker, message: am.WorkTold) -> list[Command]:
        """Note the report of a worker of this node."""
        self.until = message.until
        memory = {"memory_bytes": message.memory_bytes, "memory_limit_bytes": message.memory_limit_bytes}
        self._note(worker.id, micro_batches=message.micro_batches, **memory)
        return []

    @handles(WorkShared)
    def on_shared(self, notice: WorkShared) -> list[Command]:
        """Note what another node's agent has heard of its members."""
        self._others.update(notice.members)
        return []

    def forget(self, member: str) -> None:
        """Forget a worker that is dead."""
        self._mine.pop(member, None)

    def of(self, member: str) -> dict[str, Any]:
        """Return the newest figures of a member, for `status`; all None if none are known."""
        return asdict(self._mine.get(member) or self._others.get(member) or MemberWork())

    def remaining_s(self, step: int | None, now: float) -> float | None:
        """Return the expected seconds until the loop ends, or None if the end or the pace is not known."""
        per_minute = self.pace.per_minute(now)
        if self.until is None or step is None or not per_minute:
            return None
        return max(0, self.until - 1 - step) * 60.0 / per_minute

    def _note(self, member: str, **told: Any) -> None:
        self._mine[member] = replace(self._mine.get(member, MemberWork()), **told)
