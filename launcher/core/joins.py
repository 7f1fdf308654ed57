"""Workers that join: their start, their hello, and their first commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastrain.base.resume import changes, refusal
from elastrain.decisions.membership import spec_difference
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, HelloDue, LeaveDue, RestartDue, WarmUpDue
from elastrain.launcher.core.places.spares import computing, has_to_wait, wait_as_spare
from elastrain.launcher.core.rendezvous import Rendezvous
from elastrain.launcher.core.requested_faults import FaultRequests
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Course, Stage, Worker
from elastrain.launcher.shared.job_values import (
    Command,
    FullPriority,
    Kill,
    Log,
    PutBegun,
    PutDue,
    PutSpec,
    Roster,
    Start,
    TakeNumber,
    Tell,
)
from elastrain.protocol.agent_messages import FirstCommitAllowed, FirstCommitDue, Hello, Progress, Refused
from elastrain.protocol.handlers import handles


class Joins(ev.AgentPart):
    """The spec that all members must have in common, and the workers whose hello waits for it."""

    def __init__(
        self,
        cluster: Cluster,
        deadlines: Deadlines,
        *,
        shutdown: Shutdown,
        rendezvous: Rendezvous,
        view_changes: ViewChanges,
        faults: FaultRequests,
    ) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown, self._rendezvous = deadlines, shutdown, rendezvous
        self._view_changes, self._faults = view_changes, faults
        self.spec: Mapping[str, Any] | None = None
        self._unchecked: list[tuple[Worker, Hello]] = []
        self._slowest_hello_s: float | None = None
        """Longest time from start to hello of any worker of this node so far."""

    @handles(ev.RosterStands)
    def on_roster(self, event: ev.RosterStands, now: float) -> list[Command]:
        """Start this node's workers, now that the store holds the roster."""
        if event.roster is None:
            return self._rendezvous.on_roster_refused(now)
        self._rendezvous.doubt(event.restored, now)
        if self._cluster.roster is not None or self._shutdown.end is not None:
            return self._on_another_roster(event.roster)
        commands = self._rendezvous.take_roster(event.roster)
        first = self._cluster.first_rank
        if first is None:
            return commands + self._begin_late()
        begins = event.roster.first_member + first
        starts = [
            self._start(slot, number=begins + slot, rank=first + slot, now=now) for slot in range(self._config.workers)
        ]
        return [*commands, *self._say_start(event.roster, first), *starts]

    def _on_another_roster(self, roster: Roster) -> list[Command]:
        """End this node if another job's roster is in the store, put after the store had lost its data."""
        if roster == self._cluster.roster:
            return []
        there = ", ".join(record.name for record in roster.nodes)
        sentence = (
            f"the store has lost its data, and {there} have begun the job anew in it: this node, of the job before, "
            "ends. Start it again to take part"
        )
        return self._shutdown.finish(1, sentence, everywhere=False)

    def _say_start(self, roster: Roster, first: int) -> list[Command]:
        """Return the line that says what the job starts from. Only the first node of the roster prints it."""
        if first or not roster.start:
            return []
        step = roster.resume.step if roster.resume is not None else None
        return [Log(event="resume", fields={"step": step, "reason": roster.start}, say=roster.start)]

    def _begin_late(self) -> list[Command]:
        present, places = self._cluster.peers.present(), self._config.places
        if len(present) > places.nodes + places.spares:  # the operator has not allowed this node
            there = ", ".join(record.name for record in present if record.name != self._config.node)
            spares = f" and its spares, {places.spares} at most" if places.spares else ""
            sentence = f"the job has all its {places.nodes} nodes{spares} ({there}): raise MAX in --nnodes to add more"
            return self._shutdown.finish(1, sentence, everywhere=False)
        if has_to_wait(self._cluster):
            return wait_as_spare(self._cluster)
        self._cluster.workers.open_slots(self._config.workers)
        return [TakeNumber() for _ in range(self._config.workers)]

    @handles(ev.NumberTaken)
    def on_number(self, event: ev.NumberTaken, now: float) -> list[Command]:
        """Start the worker for which the store has assigned a number."""
        if self._shutdown.end is not None or (vacancy := self._cluster.workers.fill_vacancy()) is None:
            return []
        rank = self._expected_rank(vacancy.slot)
        start = self._start(vacancy.slot, number=event.number, rank=rank, replaces=vacancy.of, now=now)
        self._deadlines.set(HelloDue(start.member), now + self._hello_within_s())
        self._deadlines.set(WarmUpDue(start.member), now + self._config.times.warm_up_s)
        log = Log(event="restart", fields={"member": start.member, "of": vacancy.of})
        return [start, *([log] if vacancy.of else [])]

    def _expected_rank(self, slot: int) -> int:
        """Return the rank that a worker started in this slot will probably get. It is never 0 while a member lives."""
        cluster, roster, first = self._cluster, self._cluster.roster, self._cluster.first_rank
        assert roster is not None
        there = cluster.alive_in_view()
        if not there:  # with no member before it, the ranks are those of the roster, and nodes that came late follow
            return (roster.workers if first is None else first) + slot
        return len(there) + sum(worker.id not in there for worker in cluster.workers.living)

    def _start(self, slot: int, *, number: int, rank: int, now: float, replaces: str = "") -> Start:
        cluster, roster = self._cluster, self._cluster.roster
        assert roster is not None
        # The first workers wait for each other anyway. Later ones warm up at low priority beside those that train.
        member, initial = f"m{number}", not cluster.late and cluster.view is None
        cluster.workers.add(Worker(id=member, slot=slot, initial=initial, started_s=now, replaces=replaces))
        names = [record.name for record in roster.nodes]
        return Start(
            member=member,
            slot=slot,
            rank=rank,
            restarts=self._config.life.restarts + cluster.workers.restarts,
            warm_up=not initial,
            world_size=max(roster.workers, rank + 1),
            group_rank=names.index(self._config.node) if self._config.node in names else len(names),
            group_world_size=max(len(names), len(computing(cluster)) + 1),
            wrong=self._faults.take_wrong(replaces),
            resume=roster.resume,
            devices=cluster.devices.told(slot),
        )

    @handles(ev.WorkerStarted)
    def on_started(self, event: ev.WorkerStarted) -> list[Command]:
        """Record the process id of a started worker."""
        self._cluster.workers.by_id[event.member].run_as(event.pid)
        return []

    @handles(ev.StartFailed)
    def on_start_failed(self, event: ev.StartFailed) -> list[Command]:
        """Handle a failed start. The job goes on without the worker, unless it is one of the first workers."""
        worker = self._cluster.workers.by_id[event.member]
        worker.follow(Course.DIE)
        self.forget(worker.id)
        sentence = f"{worker.id} could not be started: {event.problem}"
        if worker.initial:
            return self._shutdown.finish(1, sentence)
        return [Log(event="start_failed", fields={"member": worker.id, "reason": event.problem}, say=sentence)]

    def forget(self, member: str) -> None:
        """Do not wait for a dead worker's hello any longer."""
        self._deadlines.drop(WarmUpDue(member), HelloDue(member))

    @handles(WarmUpDue)
    def on_warm_up_over(self, due: WarmUpDue) -> list[Command]:
        """Give a joining worker full priority. Until it is a member, the state has fewer copies."""
        return [FullPriority(member=due.member)]

    @handles(Hello)
    def on_hello(self, worker: Worker, message: Hello, now: float) -> list[Command]:
        """Compare a worker's hello with the spec.

        The first hello of the job becomes the spec, if the store accepts it.
        """
        if worker.stage is not Stage.STARTING or message.member != worker.id:
            problem = f"a hello of {message.member} from {worker.id}, {worker.state}"
            return self.on_misspoke(ev.WorkerMisspoke(member=worker.id, problem=problem))
        self._deadlines.drop(HelloDue(worker.id))
        self._slowest_hello_s = max(self._slowest_hello_s or 0.0, now - worker.started_s)
        if self.spec is not None:
            return self._admit(worker, message, self.spec, now)
        # Several nodes may put the spec of their first hello. The store keeps the one that came first.
        self._unchecked.append((worker, message))
        return [PutSpec(spec=dict(message.spec))] if len(self._unchecked) == 1 else []

    def _hello_within_s(self) -> float:
        """Return the time that a newcomer has for its hello, based on earlier starts of the same script."""
        if self._slowest_hello_s is None:
            return self._config.hangs.first_step_s
        return max(self._config.times.join_timeout_s, 3 * self._slowest_hello_s)

    @handles(HelloDue)
    def on_hello_late(self, due: HelloDue, now: float) -> list[Command]:
        """Kill a newcomer that has not said hello in time, for example because it hangs in its imports."""
        worker, within_s = self._cluster.workers.by_id[due.member], self._hello_within_s()
        if worker.stage is not Stage.STARTING or self._shutdown.end is not None:
            return []
        if self._cluster.view is None:  # a plain script never says hello, and the first workers have their own deadline
            self._deadlines.set(due, now + within_s)
            return []
        reason = (
            f"{worker.id} has not said hello within {now - worker.started_s:.0f} s of its start: it is ended. See its "
            "output, or raise --join-timeout"
        )
        return [Kill(member=worker.id, reason=reason)]

    @handles(ev.SpecStands)
    def on_spec(self, event: ev.SpecStands, now: float) -> list[Command]:
        """Compare the waiting workers with the spec that the store holds."""
        if self.spec is not None or self._shutdown.end is not None:
            return []
        self.spec = event.spec
        waiting, self._unchecked = self._unchecked, []
        commands: list[Command] = self._say_changes(event.spec)
        for worker, hello in waiting:
            if worker.stage is Stage.STARTING:
                commands += self._admit(worker, hello, event.spec, now)
        return commands

    def _say_changes(self, spec: Mapping[str, Any]) -> list[Command]:
        """Return a line about changes of the spec since the checkpoint, if the operator has accepted changes."""
        roster = self._cluster.roster
        if roster is None or roster.resume is None or not roster.resume.accepts_changes:
            return []
        found = changes(roster.resume, spec)
        step, told = roster.resume.step, "; ".join(found)
        return [Log(event="changed", fields={"step": step, "changes": found}, say=f"accepted: {told}")] if found else []

    @handles(ev.WorkerMisspoke)
    def on_misspoke(self, event: ev.WorkerMisspoke) -> list[Command]:
        """Kill a worker that has sent what no worker sends."""
        return [Kill(member=event.member, reason=f"{event.member} sent what no worker sends: {event.problem}")]

    def _admit(self, worker: Worker, hello: Hello, spec: Mapping[str, Any], now: float) -> list[Command]:
        roster = self._cluster.roster
        resume = roster.resume if roster is not None else None
        difference = spec_difference(spec, hello.spec, late=not worker.initial)
        difference = difference or (refusal(resume, spec) if resume is not None else "")
        if difference:
            return self._refuse(worker, difference, now)
        if objection := self._cluster.devices.objection(worker.id):
            return self._refuse(worker, objection, now, for_device=len(self._cluster.workers.living) > 1)
        worker.fit(hello.address)
        commands: list[Command] = [Log(event="ready", fields={"member": worker.id, "address": hello.address})]
        commands += self._faults.hand_over(worker)
        if self._cluster.view is None and worker.initial:
            self._rendezvous.expect_the_others(now)
        return commands + self._view_changes.settle(now)

    def _refuse(self, worker: Worker, difference: str, now: float, *, for_device: bool = False) -> list[Command]:
        worker.follow(Course.UNFIT)
        sentence = f"{worker.id} is refused: {difference}"
        # The job cannot begin without one of its first workers, unless only that one's device is bad. A refused
        # newcomer only fails to join.
        ends = worker.initial and not for_device
        commands: list[Command] = [
            Tell(member=worker.id, message=Refused(reason=sentence)),
            # If the refusal ends the job, the end prints it.
            Log(event="refused", fields={"member": worker.id, "reason": difference}, say="" if ends else sentence),
        ]
        if ends:
            return commands + self._shutdown.finish(1, sentence)
        self._deadlines.set_first(LeaveDue(worker.id), now + self._config.times.leave_timeout_s)
        return commands

    @handles(FirstCommitDue)
    def on_first_commit_due(self, worker: Worker, now: float) -> list[Command]:
        """Let a member make the first commit once the store has recorded that it is due.

        Otherwise other nodes could consider the member dead and start the job again.
        """
        progress = self._cluster.progress
        is_first = progress.wait_to_commit(worker.id)
        # A job on one node has no others.
        if self._config.alone or progress.due or progress.begun:
            return self._allow_first_commit(now)
        return [PutDue(), *self._view_changes.settle(now)] if is_first else []

    @handles(ev.FirstCommitStands)
    def on_first_commit(self, event: ev.FirstCommitStands, now: float) -> list[Command]:
        """Handle the store's record that the first commit has been made, or that it is due."""
        if event.is_made:
            self._cluster.progress.begin()
            return []
        return self._allow_first_commit(now)

    def _allow_first_commit(self, now: float) -> list[Command]:
        """Let the waiting members make the first commit, unless they are not in the current view."""
        to_commit = self._cluster.progress.let_commit_first()
        waiting = [worker.id for worker in self._cluster.mine_in_view() if worker.id in to_commit]
        told: list[Command] = [Tell(member=member, message=FirstCommitAllowed()) for member in waiting]
        return told + (self._view_changes.settle(now) if waiting else [])

    def on_progress(self, worker: Worker, message: Progress, now: float) -> list[Command]:
        """Handle the report of a committed step. The first one of a worker completes its join."""
        first, ahead = worker.progress.step is None, worker.stage is Stage.NEWCOMER
        worker.progress.take(message)
        worker.follow(Course.COMMIT)
        self._cluster.progress.take(message)
        # The restart of a replacement that dies before its first commit counts forever. Otherwise a crash loop would
        # not end.
        if first and worker.replaces and worker.replaces not in self._cluster.workers.uncounted:
            self._deadlines.set(RestartDue(worker.replaces), now + self._config.times.restart_counts_s)
        begins: list[Command] = [] if self._cluster.progress.begun else [PutBegun()]
        self._cluster.progress.begin()
        slower: list[Command] = [FullPriority(member=worker.id)] if ahead else []
        # This agent now knows the holders of all shards. A view change after a loss may have waited for that.
        return begins + slower + (self._view_changes.settle(now) if first else [])

    @handles(RestartDue)
    def on_restart_forgotten(self) -> list[Command]:
        """Stop counting an old restart against the limit."""
        self._cluster.workers.forget_restart()
        return []
