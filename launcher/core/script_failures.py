"""Exceptions in the user's script, on all nodes: whether one is the script's fault or a machine's."""

from __future__ import annotations

from elastrain.agent_messages import Failed
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, LeaveDue
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.notices import Raised
from elastrain.launcher.values import Command, Log, TellNodes
from elastrain.membership import Failure, ends_job

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
