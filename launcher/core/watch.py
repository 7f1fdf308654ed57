"""Which of this node's members hang, and what follows: the stacks of all members, then the member's end.

Each agent judges its own workers, from outside of their processes. A member is judged only while somebody waits for it
who waits for nothing else: where all stand alike (an evaluation, a slow disk that all share) nobody is to blame.
"""

from __future__ import annotations

from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, HangDue, KilledDue, SparedDue
from elastrain.launcher.core.events import Looked
from elastrain.launcher.core.pace import Pace
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.stages import Stage
from elastrain.launcher.core.standstill import Overdue, Stand, Standstill, overdue
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.notices import Hangs, Notice, SomebodyWaits, Spared
from elastrain.launcher.values import Command, Kill, Log, TakeStacks, TellNodes

_LOOKS_AT_MOST_S = 0.5
"""A longer time between two looks was the agent's own standstill, which is nobody else's fault."""
_WAITS_S = 1.0
"""Who has nothing to do for so long waits for somebody; other agents are told as often."""
_WAITS_COUNT_S = 2.5
"""How long the word of another agent counts."""


class HangWatch:
    """Owns where this node's threads stand, and who was judged."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._times = cluster, cluster.config.hangs
        self._deadlines, self._shutdown = deadlines, shutdown
        self.pace = Pace()
        self._stands: dict[str, Stand] = {}
        self._looked_s: float | None = None
        self._told_s = 0.0
        self._waits_until_s: dict[str, float] = {}
        """By node: how long what it said of waiting counts."""
        self._judged: dict[str, tuple[Standstill, int]] = {}
        """Member -> the thread that stands still, and its count then."""
        self._spared: set[str] = set()
        """Members that would have been ended, if the job could do without their state."""

    def on_look(self, event: Looked, now: float) -> list[Command]:
        """Judge by what the agent has seen on its workers' pages."""
        passed_s = 0.0 if self._looked_s is None else min(now - self._looked_s, _LOOKS_AT_MOST_S)
        self._looked_s = now
        self._stands = {seen.member: self._stands.get(seen.member, Stand()) for seen in event.seen}
        for seen in event.seen:
            self._stands[seen.member].see(seen, passed_s, self.pace)
        if not self._times.hang_timeout_s or self._shutdown.end is not None or self._cluster.view is None:
            return []
        commands = [command for worker in self._watched() for command in self._look_at(worker, now)]
        self._cluster.spared_by_node[self._cluster.config.node] = tuple(sorted(self._spared))
        return commands + self._tell(now)

    def on_waits(self, node: str, notice: SomebodyWaits, now: float) -> list[Command]:
        self._waits_until_s[node] = now + _WAITS_COUNT_S
        return []

    def on_hangs(self, node: str, notice: Hangs, now: float) -> list[Command]:
        """Have stacks taken: a member of another node is about to be ended, and all members' stacks may tell why."""
        return [TakeStacks(reason=notice.reason)]

    def on_spared(self, node: str, notice: Spared, now: float) -> list[Command]:
        """Wait, as that node does, for its members: it says so again for as long as it holds."""
        self._deadlines.set(SparedDue(node), now + _WAITS_COUNT_S)
        is_known = self._cluster.spared_by_node.get(node) == notice.members
        self._cluster.spared_by_node[node] = notice.members
        if is_known:
            return []
        say = (
            f"{', '.join(notice.members)} of {node} stands still, and the job's state is nowhere else: it is waited "
            f"for, up to {self._times.alike_s:g} s, and nobody joins meanwhile"
        )
        self._cluster.progress.explain(say)
        return [Log(event="spared_there", fields={"node": node, "members": list(notice.members)}, say=say)]

    def on_stacks_taken(self, due: HangDue, now: float) -> list[Command]:
        thread, count = self._judged[due.member]
        if thread.spot.count != count:  # it was only slow
            del self._judged[due.member]
            say = f"{due.member} goes on after {thread.for_s:.1f} s: it is not ended"
            return [Log(event="hang_over", fields={"member": due.member}, say=say)]
        self._deadlines.set(KilledDue(due.member), now + self._cluster.config.times.leave_timeout_s)
        return [Kill(member=due.member, reason=f"{due.member} is ended, because it hangs")]

    def _watched(self) -> list[Worker]:
        """The members that are judged: those that compute. Who has finished, or is to end, has other deadlines."""
        mine = self._cluster.mine_in_view()
        return [w for w in mine if w.stage in (Stage.MEMBER, Stage.NEWCOMER) and w.id in self._stands]

    def _look_at(self, worker: Worker, now: float) -> list[Command]:
        if worker.id in self._judged:
            return []
        found = overdue(self._stands[worker.id], pace=self.pace, times=self._times, is_new=worker.progress.step is None)
        if found is None:
            self._spared.discard(worker.id)
            return []
        if found.for_s > max(found.limit_s, self._times.alike_s):
            return self._judge(worker, found, now)
        is_needed = self._cluster.is_needed(worker.id, besides=self._judged)
        # Who alone has the state and is stopped may be all there is, so that nobody waits; yet nothing goes on.
        if not self._somebody_waits(worker.id, now) and not (is_needed and self._stands[worker.id].stopped):
            return []
        return self._spare(worker, found) if is_needed else self._judge(worker, found, now)

    def _somebody_waits(self, member: str, now: float) -> bool:
        here = [stand for other, stand in self._stands.items() if other != member and self._is_member(other)]
        return (
            self._shutdown.finishing
            or any(stand.waits and stand.loop.for_s >= _WAITS_S for stand in here)
            or any(until_s > now for until_s in self._waits_until_s.values())
        )

    def _is_member(self, member: str) -> bool:
        # A newcomer waits for the end of the others' step, however long that takes.
        return self._cluster.workers.by_id[member].stage is Stage.MEMBER

    def _judge(self, worker: Worker, found: Overdue, now: float) -> list[Command]:
        reason = self._sentence(worker, found)
        self._cluster.progress.explain(reason)
        self._judged[worker.id] = found.thread, found.thread.spot.count
        # Together: who waits in a collective of the script would raise there when the one that never came is ended.
        for member in self._judged:
            if member == worker.id or HangDue(member) in self._deadlines:
                self._deadlines.set(HangDue(member), now + self._times.stacks_s)
        fields = {"member": worker.id, "where": found.where, "for_s": found.for_s, "limit_s": found.limit_s}
        log = Log(event="hang", fields={**fields, "step_s": self.pace.step_s, "reason": reason})
        return [log, TellNodes(message=Hangs(reason=reason)), TakeStacks(reason=reason, tell=True)]

    def _spare(self, worker: Worker, found: Overdue) -> list[Command]:
        if worker.id in self._spared:
            return []
        self._spared.add(worker.id)
        say = (
            f"{self._sentence(worker, found)}; the job's state is nowhere else, so it is waited for, "
            f"up to {self._times.alike_s:g} s"
        )
        if self._stands[worker.id].stopped:
            say += f". Let it go on with: kill -CONT {worker.pid}"
        self._cluster.progress.explain(say)
        return [
            Log(event="hang_spared", fields={"member": worker.id, "reason": say}, say=say),
            TakeStacks(reason=say, tell=True),
        ]

    def _sentence(self, worker: Worker, found: Overdue) -> str:
        step = self._stands[worker.id].loop.spot.step
        usual = f" (a step takes {self.pace.step_s:.2g} s)" if self.pace.step_s is not None else ""
        at = f" of step {step}" if step >= 0 else ""
        return f"{worker.id} hangs: no sign of life for {found.for_s:.1f} s{usual}, {found.where}{at}"

    def _tell(self, now: float) -> list[Command]:
        if self._cluster.config.alone or now - self._told_s < _WAITS_S:
            return []
        words: list[Notice] = []
        if any(s.waits and s.loop.for_s >= _WAITS_S and self._is_member(m) for m, s in self._stands.items()):
            words.append(SomebodyWaits())
        if self._spared:
            words.append(Spared(members=tuple(sorted(self._spared))))
        self._told_s = now if words else self._told_s
        return [TellNodes(message=word) for word in words]
