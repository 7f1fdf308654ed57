"""Detection of hanging members: the standstill of each thread and device, and the judgement.

Each agent judges its own workers from outside of their processes. A member is judged only while another one waits for
it and for nothing else. Where all stand still alike (an evaluation, a slow shared disk), no member is at fault. A
hanging member is killed after the stacks of all members are taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastrain.base.thread_status import Station, ThreadStatus
from elastrain.launcher.core.agent_events import AgentPart, Looked, Seen, SeenThread
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, HangDue, KilledDue, SparedDue
from elastrain.launcher.core.progress import Pace
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Stage, Worker
from elastrain.launcher.shared.job_values import Command, Kill, Log, TakeStacks, TellNodes
from elastrain.launcher.shared.notices import Hangs, MemberWaits, Notice, Spared
from elastrain.launcher.shared.times import HangTimes
from elastrain.protocol.agent_messages import Progress, WaitReason
from elastrain.protocol.handlers import handles

_STEPS = 2.5
"""A member that others wait for may stand still for this number of median steps."""
_STEPS_OF_A_JOINER = 20.0
_BEYOND_THE_LONGEST = 1.5
_ENGINE_ROUND_S = 1.0
"""A healthy engine thread moves at least once within this time."""


@dataclass(kw_only=True)
class Standstill:
    """Standstill of one thread. `for_s` counts only time in which the thread could run and its agent was looking."""

    spot: ThreadStatus = field(default_factory=ThreadStatus)
    for_s: float = 0.0
    starved_s: float = 0.0
    was_stopped: bool = False

    def see(self, seen: SeenThread, passed_s: float, *, stopped: bool) -> float:
        """Update from a new observation. Returns the length of the standstill that just ended by itself, else 0."""
        starved_s, self.starved_s = seen.starved_s - self.starved_s, seen.starved_s
        if seen.spot == self.spot:
            # On a loaded machine a healthy thread may stand still because it waits for a processor.
            self.for_s += max(0.0, passed_s - max(0.0, starved_s))
            self.was_stopped |= stopped
            return 0.0
        stood_s = 0.0 if self.was_stopped else self.for_s
        self.spot, self.for_s, self.was_stopped = seen.spot, 0.0, stopped
        return stood_s


@dataclass(kw_only=True)
class Stand:
    """Standstills of one worker: of the training loop, of the engine, and of the device's work."""

    loop: Standstill = field(default_factory=Standstill)
    engine: Standstill = field(default_factory=Standstill)
    device: Standstill = field(default_factory=Standstill)
    stopped: bool = False
    """True if the kernel reports that the process is stopped."""

    def see(self, seen: Seen, passed_s: float, pace: Pace) -> None:
        """Update from a new observation, and record ended standstills in `pace`."""
        loop, engine = self.loop.spot, self.engine.spot
        self.stopped = seen.stopped
        for lane, thread in ((self.loop, seen.loop), (self.device, seen.device)):
            place, stood_s = lane.spot.place, lane.see(thread, passed_s, stopped=seen.stopped)
            if place in (Station.COMPUTING, Station.BETWEEN):
                pace.note(place, stood_s)
        stood_s = self.engine.see(seen.engine, passed_s, stopped=seen.stopped)
        if engine.place is Station.TURNING and loop.place in (Station.COMPUTING, Station.WAITING):
            pace.note(engine.place, stood_s)
        if self.is_device_busy and self.engine.spot.place is Station.TURNING and self.engine.for_s >= _ENGINE_ROUND_S:
            self.device.for_s = 0.0  # a held interpreter lock stops the thread that tells of landings, too

    @property
    def is_device_busy(self) -> bool:
        """True if the device has not finished all work of the job's steps."""
        return self.device.spot.place not in (Station.OUTSIDE, Station.WAITING)

    @property
    def waits_s(self) -> float:
        """Seconds for which the member had nothing left to do, while its engine thread ran; else 0."""
        is_idle = self.loop.spot.place is Station.WAITING and not self.is_device_busy and not self.stopped
        return min(self.loop.for_s, self.device.for_s) if is_idle and self.engine.for_s < _ENGINE_ROUND_S else 0.0


@dataclass(frozen=True, kw_only=True)
class Overdue:
    """A thread or device that stands still longer than its limit. `where`: the place in words, for people."""

    where: str
    for_s: float
    limit_s: float
    thread: Standstill
    device: str = ""
    """Name of the device that does not finish its work, as far as anybody can tell."""


def overdue(stand: Stand, *, pace: Pace, times: HangTimes, is_new: bool) -> Overdue | None:
    """Return the thread or device of a worker that stands still for too long, or None. `is_new`: no step is committed.

    The caller checks that other members wait for this worker.
    """
    short_s = max(times.hang_timeout_s, _STEPS * (pace.step_s or 0.0))
    loop, engine, device = stand.loop, stand.engine, stand.device
    if stand.stopped:
        return _over("stopped by a signal or a debugger, in the middle", engine, short_s)
    usual_s = _early_s(pace, times, is_new=is_new) if is_new or pace.step_s is None else short_s
    where, limit_s = _place(loop.spot, usual_s, pace, times)
    works, device_s = _place(replace(device.spot, name="a declared phase"), usual_s, pace, times)
    # Code that holds the interpreter lock in a declared phase, or between steps, also stops the engine thread.
    turning_s = max(usual_s, limit_s, device_s, _BEYOND_THE_LONGEST * pace.longest_s(Station.TURNING))
    if engine.spot.place is Station.TURNING and engine.for_s > turning_s:
        blamed = f"unfinished work of its device {device.spot.name}, " if device.spot.name else ""
        where = f"its engine too ({blamed}a held interpreter lock, or a drive), {where or 'waiting for others'}"
        return _over(where, engine, turning_s, device.spot.name)
    if stand.is_device_busy:  # the loop may wait for the device, and each landing is progress
        where = f"while its device {device.spot.name} does not finish the work that was submitted {works}"
        return _over(where, device, max(limit_s, device_s), device.spot.name)
    may_wait = f", perhaps in a wait for its device {device.spot.name}," if device.spot.name else ""
    return _over(where + may_wait, loop, limit_s) if limit_s else None


def _place(spot: ThreadStatus, usual_s: float, pace: Pace, times: HangTimes) -> tuple[str, float]:
    """Return the place in words, and the limit for standing still there. 0: there is none."""
    learned_s = max(usual_s, _BEYOND_THE_LONGEST * pace.longest_s(spot.place))
    by_place = {
        Station.COMPUTING: ("in a micro-batch", learned_s),
        Station.BETWEEN: ("in the script's code between two steps", max(learned_s, times.between_steps_s)),
        Station.DECLARED: (f"in {spot.name}", spot.allowed_s),
    }
    return by_place.get(spot.place, ("", 0.0))


def _over(where: str, thread: Standstill, limit_s: float, device: str = "") -> Overdue | None:
    found = Overdue(where=where, for_s=thread.for_s, limit_s=limit_s, thread=thread, device=device)
    return found if thread.for_s > limit_s else None


def _early_s(pace: Pace, times: HangTimes, *, is_new: bool) -> float:
    """Return the limit for a first step, which compiles and warms up. Only the duration of other steps can guide it."""
    if pace.step_s is None:
        return times.first_step_s if is_new else times.join_step_s
    return max(times.join_step_s, _STEPS_OF_A_JOINER * pace.step_s)


_LOOKS_AT_MOST_S = 0.5
"""A longer time between two observations was the agent's own standstill, and does not count for the workers."""
_ADVICE = (
    ': code there that takes longer than {:.3g} s belongs into job.evaluate(…), or `with job.phase("…", timeout=…)`'
)
"""The way out for a healthy script that evaluates between two steps, without a word to anybody."""
_WAITS_S = 1.0
"""A member with nothing to do for this time waits for another one. Other agents are told at this interval."""
_WAITS_COUNT_S = 2.5
"""Time for which another agent's report counts."""


class HangDetector(AgentPart):
    """The standstills of this node's workers, and the members that were judged to hang."""

    def __init__(
        self, cluster: Cluster, deadlines: Deadlines, *, shutdown: Shutdown, view_changes: ViewChanges
    ) -> None:
        self._cluster, self._times = cluster, cluster.config.hangs
        self._deadlines, self._shutdown, self._view_changes = deadlines, shutdown, view_changes
        self._pace = Pace()
        self._stands: dict[str, Stand] = {}
        self._looked_s: float | None = None
        self._told_s = 0.0
        self._waits_until_s: dict[str, float] = {}
        """Node -> time until which its report that one of its members waits counts."""
        self._judged: dict[str, tuple[Standstill, int]] = {}
        """Member -> the thread that stands still, and the thread's count when it was judged."""
        self._spared: set[str] = set()
        """Members that would be killed if the job could do without their state."""

    def on_progress(self, worker: Worker, message: Progress, now: float) -> list[Command]:
        """Record the duration of a committed step."""
        self._pace.commit(message.step, now)
        return []

    def on_look(self, event: Looked, now: float) -> list[Command]:
        """Judge the workers by what the agent has read in their status pages.

        Once no hanging member is waited for any longer, ready newcomers join.
        """
        before = self._cluster.spared
        commands = self._judge_threads(event, now)
        return commands + (self._view_changes.settle(now) if before and not self._cluster.spared else [])

    def _judge_threads(self, event: Looked, now: float) -> list[Command]:
        passed_s = 0.0 if self._looked_s is None else min(now - self._looked_s, _LOOKS_AT_MOST_S)
        self._looked_s = now
        self._stands = {seen.member: self._stands.get(seen.member, Stand()) for seen in event.seen}
        for seen in event.seen:
            self._stands[seen.member].see(seen, passed_s, self._pace)
        if not self._times.hang_timeout_s or self._shutdown.end is not None or self._cluster.view is None:
            return []
        commands = [command for worker in self._watched() for command in self._look_at(worker, now)]
        self._cluster.spare(self._cluster.config.node, tuple(sorted(self._spared)))
        return commands + self._tell(now)

    @handles(MemberWaits)
    def on_waits(self, node: str, now: float) -> list[Command]:
        """Record that a member of another node waits."""
        self._waits_until_s[node] = now + _WAITS_COUNT_S
        return []

    @handles(Hangs)
    def on_hangs(self, node: str, notice: Hangs) -> list[Command]:
        """Have stacks taken, because a member of another node is about to be killed.

        All members' stacks may show the cause.
        """
        log = Log(event="hang_there", fields={"node": node, "reason": notice.reason, "waits_for": self._waits_for()})
        return [log, TakeStacks(reason=notice.reason)]

    @handles(Spared)
    def on_spared(self, node: str, notice: Spared, now: float) -> list[Command]:
        """Wait for another node's hanging members, as that node does. It repeats the notice as long as that is true."""
        self._deadlines.set(SparedDue(node), now + _WAITS_COUNT_S)
        if not self._cluster.spare(node, notice.members):
            return []
        say = (
            f"{', '.join(notice.members)} of {node} stands still, and the job's state is nowhere else: it is waited "
            f"for, up to {self._times.alike_s:g} s, and no member joins meanwhile"
        )
        self._cluster.progress.explain(say)
        return [Log(event="spared_there", fields={"node": node, "members": list(notice.members)}, say=say)]

    @handles(SparedDue)
    def on_spared_over(self, due: SparedDue, now: float) -> list[Command]:
        """Stop waiting for another node's hanging members, because that node no longer reports them."""
        self._cluster.spare_no_longer(due.node)
        return self._view_changes.settle(now)

    def forget(self, member: str) -> None:
        """Do not kill a member that is dead."""
        self._deadlines.drop(HangDue(member), KilledDue(member))

    @handles(HangDue)
    def on_stacks_taken(self, due: HangDue, now: float) -> list[Command]:
        """Kill the member that was judged to hang, unless it has moved in the meantime."""
        thread, count = self._judged[due.member]
        if thread.spot.count != count:  # it was only slow
            del self._judged[due.member]
            say = f"{due.member} goes on after {thread.for_s:.1f} s: it is not ended"
            return [Log(event="hang_over", fields={"member": due.member}, say=say)]
        self._deadlines.set(KilledDue(due.member), now + self._cluster.config.times.leave_timeout_s)
        return [Kill(member=due.member, reason=f"{due.member} is ended, because it hangs")]

    def _watched(self) -> list[Worker]:
        """Return the members to judge: those that compute.

        Workers that have finished or must exit have other deadlines.
        """
        mine = self._cluster.mine_in_view()
        return [w for w in mine if w.stage in (Stage.MEMBER, Stage.NEWCOMER) and w.id in self._stands]

    def _look_at(self, worker: Worker, now: float) -> list[Command]:
        if worker.id in self._judged:
            return []
        is_new = worker.progress.step is None
        found = overdue(self._stands[worker.id], pace=self._pace, times=self._times, is_new=is_new)
        if found is None:
            self._spared.discard(worker.id)
            return []
        if found.for_s > max(found.limit_s, self._times.alike_s):
            return self._judge(worker, found, now)
        is_needed = self._cluster.is_needed(worker.id, besides=self._judged)
        # A stopped member with the only copy of some state may be all that is left of the view. Then no member waits
        # for it, but the job stands still.
        if not self._somebody_waits(worker.id, now) and not (is_needed and self._stands[worker.id].stopped):
            return []
        return self._spare(worker, found) if is_needed else self._judge(worker, found, now)

    def _somebody_waits(self, member: str, now: float) -> bool:
        here = [stand for other, stand in self._stands.items() if other != member and self._is_member(other)]
        return (
            self._shutdown.finishing
            or any(stand.waits_s >= _WAITS_S for stand in here)
            or any(until_s > now for until_s in self._waits_until_s.values())
        )

    def _is_member(self, member: str) -> bool:
        # A newcomer always waits for the end of the others' step.
        return self._cluster.workers.by_id[member].stage is Stage.MEMBER

    def _judge(self, worker: Worker, found: Overdue, now: float) -> list[Command]:
        reason = self._sentence(worker, found)
        self._cluster.progress.explain(reason)
        self._judged[worker.id] = found.thread, found.thread.spot.count
        # All judged members are killed together. A member that waits in a collective of the script for one that was
        # killed earlier would raise there.
        for member in self._judged:
            if member == worker.id or HangDue(member) in self._deadlines:
                self._deadlines.set(HangDue(member), now + self._times.stacks_s)
        its = {"member": worker.id, "where": found.where, "for_s": found.for_s, "limit_s": found.limit_s}
        told = {"reason": reason, "step_s": self._pace.step_s, "waits_for": self._waits_for()}
        log = Log(event="hang", fields=its | told | ({"device": found.device} if found.device else {}))
        return [log, TellNodes(message=Hangs(reason=reason)), TakeStacks(reason=reason, tell=True)]

    @handles(WaitReason)
    def on_wait_reason(self, worker: Worker, message: WaitReason) -> list[Command]:
        """Record why a worker does not pass its open step."""
        worker.progress.wait(message.reason)
        return []

    def _waits_for(self) -> dict[str, str]:
        """Return member -> why it does not pass its open step, of this node's members that have told."""
        return {worker.id: why for worker in self._cluster.mine_in_view() if (why := worker.progress.waits_for)}

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
        log = Log(event="hang_spared", fields={"member": worker.id, "reason": say}, say=say)
        return [log, TakeStacks(reason=say, tell=True)]

    def _sentence(self, worker: Worker, found: Overdue) -> str:
        stand = self._stands[worker.id]
        spot = (stand.device if found.thread is stand.device else stand.loop).spot
        usual = f" (a step takes {self._pace.step_s:.2g} s)" if self._pace.step_s is not None else ""
        at = f" of step {spot.step}" if spot.step >= 0 else ""
        advice = _ADVICE.format(found.limit_s) if spot.place is Station.BETWEEN and not stand.stopped else ""
        return f"{worker.id} hangs: no sign of life for {found.for_s:.1f} s{usual}, {found.where}{at}{advice}"

    def _tell(self, now: float) -> list[Command]:
        if self._cluster.config.alone or now - self._told_s < _WAITS_S:
            return []
        words: list[Notice] = []
        if any(stand.waits_s >= _WAITS_S and self._is_member(member) for member, stand in self._stands.items()):
            words.append(MemberWaits())
        if self._spared:
            words.append(Spared(members=tuple(sorted(self._spared))))
        self._told_s = now if words else self._told_s
        return [TellNodes(message=word) for word in words]
