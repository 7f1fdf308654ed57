"""How this node's workers are lost: deaths, exits, and whether another takes the place.

Exceptions in the user's script, on all nodes: whether one is the script's fault or a machine's.
"""

from __future__ import annotations

from elastrain.decisions.membership import Failure, ends_job, may_restart
from elastrain.launcher.core.agent_events import ChannelClosed, Looked, MutexBroke, WorkerDied, WorkerExited
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, HangDue, HelloDue, KilledDue, LeaveDue, SparedDue, WarmUpDue
from elastrain.launcher.core.hang_detector import HangWatch
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.stragglers import Stragglers
from elastrain.launcher.core.suspicions import Suspicions
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Course, Stage, Worker
from elastrain.launcher.shared.job_values import Command, Log, TakeNumber, TellNodes
from elastrain.launcher.shared.notices import Exited, Raised
from elastrain.protocol.agent_messages import Failed

_TRACEBACK_CHARS_MAX = 1 << 16


class ScriptFailures:
    """Owns what has been raised so far: the same at the same place on two members is the script's fault."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown = deadlines, shutdown
        self._known: list[Failure] = []

    @property
    def blames_the_script(self) -> bool:
        """Whether a worker's error would come again: nothing has been committed, as far as this node knows.

        A node that came late knows too little: its own fault must not end a job that runs.
        """
        return not self._cluster.progress.begun and not self._cluster.late

    def place_of(self, member: str) -> str:
        """The place of the newest failure, if it was that member's; else empty."""
        return self._known[-1].place if self._known and self._known[-1].member == member else ""

    def on_failed(self, worker: Worker, message: Failed, now: float) -> list[Command]:
        failure = Failure(
            member=worker.id,
            step=message.step,
            micro_batch=message.micro_batch,
            signature=message.signature,
            # Told to other agents, in one line of limited length.
            traceback=message.traceback[-_TRACEBACK_CHARS_MAX:],
        )
        self._begin_with(failure)
        commands: list[Command] = [] if self._config.alone else [TellNodes(message=_raised(failure))]
        commands += self._judge(failure)
        if self._shutdown.end is None:  # it prints its traceback first
            self._deadlines.set_first(LeaveDue(worker.id), now + self._config.times.leave_timeout_s)
        return commands

    def on_raised(self, node: str, notice: Raised, now: float) -> list[Command]:
        """Handle an exception: if a second member has raised the same, the job ends everywhere with its traceback."""
        failure = Failure(
            member=notice.member,
            step=notice.step,
            micro_batch=None if notice.micro_batch < 0 else notice.micro_batch,
            signature=notice.signature,
            traceback=notice.traceback,
        )
        if self._shutdown.end is not None or failure in self._known:
            return []
        self._begin_with(failure)
        return self._judge(failure)

    def _begin_with(self, failure: Failure) -> None:
        """Steps before it are committed, whether or not the store has said so here yet."""
        roster = self._cluster.roster
        first = roster.first_step if roster is not None else 0
        self._cluster.progress.begun = self._cluster.progress.begun or failure.step > first

    def notices_for(self, node: str) -> list[Command]:
        """Notices of what this node's workers have raised, for an agent that may have missed them."""
        mine = [failure for failure in self._known if failure.member in self._cluster.workers.by_id]
        return [TellNodes(message=_raised(failure), node=node) for failure in mine]

    def _judge(self, failure: Failure) -> list[Command]:
        verdict = ends_job(failure, self._known, committed=not self.blames_the_script)
        self._known.append(failure)
        self._shutdown.last_traceback = failure.traceback
        self._shutdown.raised.add(failure.member)
        fields = {"member": failure.member, "place": failure.place, "signature": failure.signature}
        # Its own node says it; only the end concerns every screen. A worker shows tracebacks, and no sentences.
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
    )


_OF_A_LIVING_WORKER = (LeaveDue, HelloDue, WarmUpDue, HangDue, KilledDue)
_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL"}
_SIGNALS |= {11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM"}


class Failures:
    """Decides about losses. A death changes the view at once; the exit code comes later and says what it means."""

    def __init__(
        self,
        cluster: Cluster,
        deadlines: Deadlines,
        *,
        shutdown: Shutdown,
        script: ScriptFailures,
        suspicions: Suspicions,
        view_changes: ViewChanges,
    ) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown, self._script = deadlines, shutdown, script
        self.suspicions, self._view_changes = suspicions, view_changes
        self.watch = HangWatch(cluster, deadlines, shutdown)
        self.stragglers = Stragglers(cluster, shutdown, view_changes)

    def on_look(self, event: Looked, now: float) -> list[Command]:
        """Have the watch judge; whoever has come while a member was waited for joins when that goes on."""
        before = self._cluster.spared
        commands = self.watch.on_look(event, now)
        return commands + (self._view_changes.settle(now) if before and not self._cluster.spared else [])

    def on_spared_over(self, due: SparedDue, now: float) -> list[Command]:
        self._cluster.spared_by_node.pop(due.node, None)
        return self._view_changes.settle(now)

    def on_mutex(self, event: MutexBroke, now: float) -> list[Command]:
        if self._cluster.workers.by_id[event.member].finished:  # it lets it go in peace, and its process ends later
            return []
        return self.on_death(WorkerDied(member=event.member, source="mutex", at_s=event.at_s), now)

    def on_death(self, event: WorkerDied, now: float) -> list[Command]:
        worker = self._cluster.workers.by_id[event.member]
        if not worker.alive:
            return []
        worker.follow(Course.DIE)
        # Whom it did not reach, or who did not reach it, no longer matters: it is out of the next view.
        self.suspicions.forget(worker.id)
        self._deadlines.drop(*(due(worker.id) for due in _OF_A_LIVING_WORKER))
        # The others hear of it before this agent proposes: several proposals at once are answered by one view.
        commands: list[Command] = [death(worker.id, event.source, event.at_s, now)]
        if not self._config.alone and not worker.raised:  # else they would not wait for what its exit code means
            commands.append(TellNodes(message=Exited(member=worker.id)))
        # Without others to go on, the exit code decides what this means. And once one has finished, nobody waits.
        return commands + (self._view_changes.settle(now) if worker.id in self._cluster.ids else [])

    def on_exit(self, event: WorkerExited, now: float) -> list[Command]:
        worker = self._cluster.workers.by_id[event.member]
        worker.exit_code = event.exit_code
        fields = {"member": worker.id, "exit_code": event.exit_code}
        log: list[Command] = [Log(event="exit", fields=fields)]
        return log if self._shutdown.end is not None else log + self._judge_exit(worker, event.exit_code, now)

    def _judge_exit(self, worker: Worker, exit_code: int, now: float) -> list[Command]:
        how = f"{worker.id} ended {describe_exit(exit_code)}"
        if self._shutdown.leaving is not None:
            return [] if self._cluster.unfinished() else self._shutdown.leave()
        if worker.stage in (Stage.LEFT, Stage.DROPPED):
            return self._shutdown.on_peaceful_exit(worker, how, now)
        # An error so early would repeat itself in each replacement: the user should read it at once. But a member
        # that was left out of the view, or came when the work was done, ends with an error because it was told to.
        told_to = worker.stage is Stage.EVICTED or self._shutdown.finishing
        if exit_code > 0 and self._script.blames_the_script and not told_to:
            return self._shutdown.finish(1, f"{how} before the first commit", self._shutdown.last_traceback)
        cluster = self._cluster
        gone = cluster.view is not None and not cluster.alive_in_view() and not self._shutdown.finishing
        # Before the first commit nothing is lost with the last member: a replacement begins the job anew.
        if gone and (self._cluster.progress.begun or exit_code == 0):
            place = self._script.place_of(worker.id)
            how = f"the script raised on {worker.id} at {place}" if place else how
            return self._shutdown.on_nobody_left(worker, how, now) + self._view_changes.settle(now)
        return self._replace(worker, exit_code, how, now) + self._shutdown.end_if_all_left(now, how)

    def _replace(self, worker: Worker, exit_code: int, how: str, now: float) -> list[Command]:
        workers, spared = self._cluster.workers, self._cluster.spared
        # Who has come to wait for a state that nobody can give just now has not failed.
        is_free = bool(spared) and worker.progress.step is None
        verdict = may_restart(
            exit_code=exit_code,
            finishing=self._shutdown.finishing,
            refused=worker.stage is Stage.TURNED_AWAY,
            used=workers.restarts_used - is_free,
            allowed=self._config.max_restarts,
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

    def on_channel_closed(self, event: ChannelClosed, now: float) -> list[Command]:
        """Expect the worker's end: usually it is just ending, and one that cannot be told of views is of no use."""
        worker = self._cluster.workers.by_id[event.member]
        if self._shutdown.end is None and worker.alive and not worker.finished:
            self._deadlines.set_first(LeaveDue(worker.id), now + self._config.times.leave_timeout_s)
        return []


def death(member: str, source: str, at_s: float, now: float) -> Log:
    return Log(event="death", fields={"member": member, "detected_by": source, "detected_s": at_s, "handled_s": now})


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words: "with exit code 3", or "by SIGKILL"."""
    if exit_code >= 0:
        return f"with exit code {exit_code}"
    return f"by {_SIGNALS.get(-exit_code, f'signal {-exit_code}')}"
