"""Lost workers of this node: deaths, exits, restarts; and exceptions in the user's script on all nodes.

An exception is blamed either on the script or on a machine. `Failures` decides whether a lost worker is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastrain.decisions.blame import Failure, ends_job
from elastrain.decisions.membership import Ruling, may_restart
from elastrain.launcher.core.agent_events import AgentPart, ChannelClosed, MutexBroke, WorkerDied, WorkerExited
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, KilledDue, LeaveDue
from elastrain.launcher.core.places.spares import has_to_wait, wait_as_spare
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Course, Stage, Worker
from elastrain.launcher.shared.job_values import Command, JobConfig, Kill, Log, TakeNumber, TellNodes
from elastrain.launcher.shared.notices import Exited, Raised
from elastrain.protocol.agent_messages import Failed
from elastrain.protocol.handlers import handles

_TRACEBACK_CHARS_MAX = 1 << 16


class ScriptFailures(AgentPart):
    """The exceptions raised so far. The same error at the same place on two members is blamed on the script."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown = deadlines, shutdown
        self._known: list[Failure] = [*cluster.devices.known]

    def may_blame(self, failure: Failure | None) -> bool:
        """Return True if a worker's error would happen again in a replacement, because nothing is committed yet.

        Always False on a node that came late. Such a node knows too little, and its own fault must not end a running
        job. A device may fail before the first commit of a job that goes on from a checkpoint: its script has worked.
        """
        roster = self._cluster.roster
        has_worked = failure is not None and failure.device and roster is not None and roster.resume is not None
        return not (self._cluster.progress.begun or self._cluster.late or has_worked)

    def newest_of(self, member: str) -> Failure | None:
        """Return the newest failure if it was this member's, else None."""
        return self._known[-1] if self._known and self._known[-1].member == member else None

    @handles(Failed)
    def on_failed(self, worker: Worker, message: Failed, now: float) -> list[Command]:
        """Handle an exception in the script on this node and tell the other agents.

        The job ends if the script is at fault.
        """
        failure = Failure(
            member=worker.id,
            step=message.step,
            micro_batch=message.micro_batch,
            signature=message.signature,
            # Other agents get it in one line of limited length.
            traceback=message.traceback[-_TRACEBACK_CHARS_MAX:],
            device=message.device,
        )
        self._begin_with(failure)
        commands: list[Command] = [] if self._config.alone else [TellNodes(message=_raised(failure))]
        commands += self._judge(failure)
        if self._shutdown.end is None:  # give the worker time to print its traceback
            self._deadlines.set_first(LeaveDue(worker.id), now + self._config.times.leave_timeout_s)
        return commands

    @handles(Raised)
    def on_raised(self, notice: Raised) -> list[Command]:
        """Handle an exception on another node.

        If a second member has raised the same one, the job ends with its traceback.
        """
        failure = Failure(
            member=notice.member,
            step=notice.step,
            micro_batch=None if notice.micro_batch < 0 else notice.micro_batch,
            signature=notice.signature,
            traceback=notice.traceback,
            device=notice.device,
        )
        if self._shutdown.end is not None or failure in self._known:
            return []
        self._begin_with(failure)
        return self._judge(failure)

    def _begin_with(self, failure: Failure) -> None:
        """Mark the job as begun if the failure happened after the first step: the earlier steps are committed."""
        roster = self._cluster.roster
        first = roster.first_step if roster is not None else 0
        if failure.step > first:
            self._cluster.progress.begin()

    def notices_for(self, node: str) -> list[Command]:
        """Return the notices of this node's exceptions, for an agent that may have missed them."""
        mine = [failure for failure in self._known if failure.member in self._cluster.workers.by_id]
        return [TellNodes(message=_raised(failure), node=node) for failure in mine]

    def _judge(self, failure: Failure) -> list[Command]:
        verdict = ends_job(failure, self._known, committed=not self.may_blame(failure))
        self._known.append(failure)
        if failure.device:
            self._cluster.devices.note(failure)
        self._shutdown.note_exception(failure.member, failure.traceback, is_scripts=not failure.device)
        fields = {"member": failure.member, "place": failure.place, "signature": failure.signature}
        fields |= {"device": failure.device} if failure.device else {}
        # Only the failing worker's node prints this; the job's end is printed on every node. Workers print tracebacks,
        # not sentences.
        sentence = f"\n{failure.traceback.rstrip()}" if failure.traceback.count("\n") == 1 else ""
        is_here = failure.member in self._cluster.workers.by_id
        say = verdict.reason + sentence if is_here and not verdict.yes else ""
        log = Log(event="failed", fields={**fields, "traceback": failure.traceback}, say=say)
        if verdict.yes:
            return [log, *self._shutdown.finish(1, verdict.reason, failure.traceback)]
        self._cluster.progress.explain(verdict.reason)
        return [log]


def _raised(failure: Failure) -> Raised:
    return Raised(
        member=failure.member,
        step=failure.step,
        micro_batch=-1 if failure.micro_batch is None else failure.micro_batch,
        signature=failure.signature,
        traceback=failure.traceback,
        device=failure.device,
    )


UNKNOWN_EXIT = -255
"""In place of an exit code that another launcher has taken. No signal has this number."""
_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL"}
_SIGNALS |= {11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM"}


class Failures(AgentPart):
    """Decisions about lost workers.

    A death changes the view at once; the exit code, which comes later, tells the cause.
    """

    def __init__(
        self,
        cluster: Cluster,
        deadlines: Deadlines,
        *,
        shutdown: Shutdown,
        script: ScriptFailures,
        view_changes: ViewChanges,
        parts: Sequence[AgentPart],
    ) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown, self._script = deadlines, shutdown, script
        self._view_changes, self._parts = view_changes, parts

    @handles(LeaveDue)
    def on_overdue(self, due: LeaveDue) -> list[Command]:
        """Kill a worker that has not exited in time."""
        self._cluster.workers.by_id[due.member].follow(Course.BE_LATE)
        return [Kill(member=due.member, reason=f"{due.member} should have ended by now")]

    @handles(KilledDue)
    def on_killed(self, due: KilledDue, now: float) -> list[Command]:
        """Consider a killed worker dead. No thread of it runs, however long the kernel keeps the process."""
        return self.on_death(WorkerDied(member=due.member, source="sigkill", at_s=now), now)

    def forget(self, member: str) -> None:
        """Do not wait for the exit of a dead worker."""
        self._deadlines.drop(LeaveDue(member))

    @handles(MutexBroke)
    def on_mutex(self, event: MutexBroke, now: float) -> list[Command]:
        """Handle a broken robust mutex as the member's death, unless the member has finished its work."""
        # a worker that has finished releases the mutex, and its process ends later
        if self._cluster.workers.by_id[event.member].finished:
            return []
        return self.on_death(WorkerDied(member=event.member, source="mutex", at_s=event.at_s), now)

    @handles(WorkerDied)
    def on_death(self, event: WorkerDied, now: float) -> list[Command]:
        """Handle the proof of a worker's death: tell the other agents and change the view."""
        worker = self._cluster.workers.by_id[event.member]
        if not worker.alive:
            return []
        worker.follow(Course.DIE)
        for part in self._parts:
            part.forget(worker.id)
        # Other agents are told before this one proposes. The store takes one view if several agents propose.
        commands: list[Command] = [death(worker.id, event.source, event.at_s, now)]
        if not self._config.alone and not worker.raised:  # else they would not wait until the exit code is known
            commands.append(TellNodes(message=Exited(member=worker.id)))
        # Without other members, the exit code decides what the death means. After a member has finished, no view is
        # needed.
        return commands + (self._view_changes.settle(now) if worker.id in self._cluster.ids else [])

    @handles(WorkerExited)
    def on_exit(self, event: WorkerExited, now: float) -> list[Command]:
        """Handle the exit code of a worker. It decides about a replacement, or about the end of the job or node."""
        worker, exit_code = self._cluster.workers.by_id[event.member], event.exit_code
        if exit_code == UNKNOWN_EXIT and worker.finished:
            exit_code = int(worker.raised)
        worker.exit(exit_code)
        fields = {"member": worker.id, "exit_code": exit_code}
        log: list[Command] = [Log(event="exit", fields=fields)]
        return log if self._shutdown.end is not None else log + self._judge_exit(worker, exit_code, now)

    def _judge_exit(self, worker: Worker, exit_code: int, now: float) -> list[Command]:
        how = f"{worker.id} ended {describe_exit(exit_code)}"
        if self._shutdown.leaving is not None:
            return [] if self._cluster.unfinished() else self._shutdown.leave()
        if worker.stage in (Stage.LEFT, Stage.DROPPED):
            return self._shutdown.on_peaceful_exit(worker, how, now)
        self._note_loss(worker, exit_code, now)
        if self._is_without_steps() and (ruling := may_start_all_again(exit_code, self._config)) is not None:
            how = f"{how}: {ruling.reason}"
            return self._shutdown.start_again(how) if ruling.yes else self._shutdown.finish(1, how)
        # An error before the first commit would repeat itself in each replacement, so the user should read it at once.
        # But a member that was left out of the view, or came when the work was done, exits with an error because it was
        # told to.
        told_to = worker.stage is Stage.EVICTED or self._shutdown.finishing
        failure = self._script.newest_of(worker.id)
        if exit_code > 0 and self._script.may_blame(failure) and not told_to:
            return self._shutdown.finish(1, f"{how} before the first commit", self._shutdown.last_traceback)
        cluster = self._cluster
        gone = cluster.view is not None and not cluster.alive_in_view() and not self._shutdown.finishing
        # Before the first commit the last member takes no state along: a replacement starts the job again.
        if gone and (self._cluster.progress.begun or exit_code == 0):
            barred = self._why_no_more(worker)
            if barred and self._config.alone:
                return self._shutdown.finish(1, barred, self._shutdown.last_traceback)
            how = barred or (str(failure) if failure is not None else how)
            return self._shutdown.on_nobody_left(worker, how, now) + self._view_changes.settle(now)
        why = self._why_no_more(worker)
        if worker.stage is Stage.EVICTED and not why and not cluster.workers.living and has_to_wait(cluster):
            return wait_as_spare(cluster)
        commands = self._replace(worker, exit_code, how, now)
        if self._shutdown.finishing and not cluster.unfinished():
            commands += self._shutdown.end_surplus()
        return commands + self._shutdown.end_if_all_left(now, how, why)

    def _note_loss(self, worker: Worker, exit_code: int, now: float) -> None:
        """Count the loss of a worker for the quarantine, unless the end says nothing about this node."""
        # An error of a script without `job.steps` may be that of a peer, whose node notes the cause.
        is_peers = exit_code > 0 and self._is_without_steps()
        is_told_to = worker.stage is Stage.TURNED_AWAY or self._shutdown.finishing
        if exit_code and not is_peers and not is_told_to:
            self._cluster.quarantine.note(now)

    def _why_no_more(self, worker: Worker) -> str:
        """Return why no worker is to be started in this one's slot, or ""."""
        return self._cluster.quarantine.reason() or self._cluster.devices.nothing_left(worker.slot)

    def _is_without_steps(self) -> bool:
        """Return True if no worker of the job is known to handle losses, as scripts with `job.steps` do."""
        cluster = self._cluster
        is_ready = any(record.ready for record in cluster.peers.known())
        return not (cluster.view is not None or cluster.late or is_ready or cluster.workers.handle_losses)

    def _replace(self, worker: Worker, exit_code: int, how: str, now: float) -> list[Command]:
        workers, spared = self._cluster.workers, self._cluster.spared
        # A newcomer that died while waiting for state that no member could give is not at fault.
        is_free = bool(spared) and worker.progress.step is None
        verdict = may_restart(
            exit_code=exit_code,
            finishing=self._shutdown.finishing,
            refused=worker.stage is Stage.TURNED_AWAY,
            used=workers.restarts_used - is_free,
            allowed=self._config.restarts_allowed,
            barred=self._why_no_more(worker),
        )
        fields = {"member": worker.id, "reason": verdict.reason}
        if verdict.yes:
            workers.restart(worker, counts=not is_free)
            why = (
                f"it waited for the state of {', '.join(spared)}: no restart is used up" if is_free else verdict.reason
            )
            say = f"{how}; another is started in its place ({why})"
            return [Log(event="replace", fields=fields, say=say), TakeNumber()]
        say = "" if self._cluster.view is None else f"{how}; not started again: {verdict.reason}"
        return [Log(event="no_restart", fields=fields, say=say), *self._view_changes.settle(now)]

    @handles(ChannelClosed)
    def on_channel_closed(self, event: ChannelClosed, now: float) -> list[Command]:
        """Set a deadline for the worker's exit.

        Usually the worker is just exiting; without a channel it cannot be used.
        """
        worker = self._cluster.workers.by_id[event.member]
        self._cluster.workers.connect()
        if self._shutdown.end is None and worker.alive and not worker.finished:
            self._deadlines.set_first(LeaveDue(worker.id), now + self._config.times.leave_timeout_s)
        return []


def may_start_all_again(exit_code: int, config: JobConfig) -> Ruling | None:
    """Decide whether all workers of a script without `job.steps` are started again, because one has ended.

    Returns None if its end is no reason for that: it has ended well, or by an error, which repeats itself, and the user
    has not asked for restarts. `exit_code` < 0 is minus the signal.
    """
    used, allowed = config.life.restarts, config.restarts_allowed
    if exit_code == 0 or (exit_code > 0 and config.max_restarts is None):
        return None
    if used >= allowed:
        return Ruling(yes=False, reason=f"all {allowed} restarts are used up (--max-restarts)")
    return Ruling(yes=True, reason=f"all workers are started again (restart {used + 1} of {allowed})")


def death(member: str, source: str, at_s: float, now: float) -> Log:
    """Return the log entry of a member's death. `source`: how it was detected."""
    return Log(event="death", fields={"member": member, "detected_by": source, "detected_s": at_s, "handled_s": now})


def describe_exit(exit_code: int) -> str:
    """Return in words how a process ended: "with exit code 3", or "by SIGKILL"."""
    if exit_code == UNKNOWN_EXIT:
        return "in a way that only its launcher knows"
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    return f"by {_SIGNALS.get(-exit_code, f'signal {-exit_code}')}"
