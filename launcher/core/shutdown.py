"""The end of the job or of this node: comparison of final digests, and the decision to end."""

from __future__ import annotations

from elastrain.launcher.core.agent_events import AgentPart, EndStands, StopAsked
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, DigestsDue, LeaveDue
from elastrain.launcher.core.progress import FinalDigests
from elastrain.launcher.core.worker_table import Course, Stage, Worker
from elastrain.launcher.shared.job_values import Command, End, Kill, Log, Tell, TellNodes
from elastrain.launcher.shared.notices import Digested, Ended, Left, Over
from elastrain.protocol import agent_messages as am
from elastrain.protocol.handlers import handles


class Shutdown(AgentPart):
    """The end, and how the work ended. After the end is set, nothing else is decided."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._digests = deadlines, FinalDigests()
        self.end: End | None = None
        self.leaving: StopAsked | None = None
        """The request to leave while this node still waits for something (see `Stopping`), else None."""
        self.finishing = False
        """True if a member of any node has passed the end of the job. Members then no longer wait for each other."""
        self.last_words = ""
        """Description of the end of the view's last member, if that was on this node."""
        self.last_traceback = ""
        """The newest traceback of a script's exception, on any node."""
        self.raised: set[str] = set()
        """Members whose script has raised an exception. A new start of the job would fail in the same way."""

    def finish(
        self,
        code: int,
        sentence: str,
        detail: str = "",
        *,
        everywhere: bool = True,
        lost: bool = False,
        is_over: bool = False,
    ) -> list[Command]:
        """End this node, or the whole job (`everywhere`). `is_over`: another node has said that the job is over."""
        if self.end is not None:
            return []
        # Nodes that come late must not wait for a job whose work is done.
        over = everywhere or is_over or (code == 0 and self.finishing)
        self.end = End(code=code, sentence=sentence, detail=detail, everywhere=everywhere, job_is_over=over, lost=lost)
        if lost and self.leaving is not None:  # the job goes on from a checkpoint without this node
            why = f"{self.leaving.sentence}; meanwhile the job has lost its state: {sentence}"
            self.end = End(code=self.leaving.code, sentence=why, everywhere=False, job_is_over=False)
        # Passed deadlines must not act on a job that has ended.
        self._deadlines.clear()
        self._cluster.progress.explain(sentence)
        if self._config.alone or not (everywhere or code == 0):
            return [self.end]
        told = Over(code=code, sentence=sentence, detail=detail, lost=lost) if everywhere else Left()
        return [self.end, TellNodes(message=told)]

    def start_again(self, sentence: str, *, everywhere: bool = True) -> list[Command]:
        """End this life of the job: another one starts all workers again. `everywhere`: tell the other nodes."""
        if self.end is not None:
            return []
        self.end = End(code=1, sentence=sentence, everywhere=everywhere, lost=True, again=True)
        self._deadlines.clear()
        self._cluster.progress.explain(sentence)
        told = TellNodes(message=Over(code=1, sentence=sentence, lost=True, again=True))
        return [self.end, told] if everywhere and not self._config.alone else [self.end]

    def note_exception(self, member: str, traceback: str, *, is_scripts: bool) -> None:
        """Record an exception of a member: of its script, or of its device, which may compute in a new start."""
        self.last_traceback = traceback
        self.raised.update((member,) if is_scripts else ())

    def begin_to_leave(self, asked: StopAsked) -> None:
        """Record the request to leave, because this node still waits for something."""
        self.leaving = asked

    def leave(self) -> list[Command]:
        """End this node: what it waited for is done, or has taken too long."""
        assert self.leaving is not None
        return self.finish(self.leaving.code, self.leaving.sentence, everywhere=False)

    @handles(Over)
    def on_over(self, node: str, notice: Over, now: float) -> list[Command]:
        """End this node, because another node says that the job is over."""
        # Stored again, because the other node may be killed before any node that comes back hears of it.
        if notice.again and self.leaving is None:
            return self.start_again(notice.sentence, everywhere=False)
        return self.finish(
            notice.code, notice.sentence, notice.detail, everywhere=False, lost=notice.lost, is_over=True
        )

    @handles(EndStands)
    def on_end(self, event: EndStands, now: float) -> list[Command]:
        """Handle the end of the job as the store tells it."""
        over = event.over
        return self.on_ended(now) if over.code == 0 else self.on_over("", over, now)

    @handles(am.LostState)
    def on_lost_state(self, worker: Worker, message: am.LostState, now: float) -> list[Command]:
        """End the job, because no living member holds some state. Outdated reports are only logged."""
        if worker.id not in self._cluster.ids:  # the report is about an old view
            return [Log(event="note", fields={"member": worker.id, "reason": message.sentence})]
        return self.finish(1, message.sentence, lost=True)

    @handles(am.Diverged, am.NoRoom)
    def on_verdict(self, worker: Worker, message: am.Diverged | am.NoRoom, now: float) -> list[Command]:
        """End the job: two members differ (the last good state is on disk), or the plan does not fit into memory."""
        return self.finish(1, message.sentence, lost=isinstance(message, am.Diverged))

    @handles(am.Finished)
    def on_finished(self, worker: Worker, message: am.Finished, now: float) -> list[Command]:
        """Handle a worker that has passed the end of the job. The first one frees all others."""
        first = not self.finishing
        self.finishing = True
        worker.finish(message.digest, raised=message.raised)
        fields = {"member": worker.id, "step": message.step, "digest": message.digest}
        commands: list[Command] = [Log(event="finished", fields=fields)]
        if first:  # it has the last step, so all members have it, and no member needs to wait for another
            commands += self._free_all()
            commands += [] if self._config.alone else [TellNodes(message=Ended())]
        commands += self._tell_digest(worker)
        commands += self._compare(worker.id, message.digest)
        if self.end is not None:
            return commands
        # A process that hangs after its work must not keep any node from ending.
        if self._cluster.view is not None and not self._cluster.unfinished():
            for other in self._cluster.mine_in_view():
                self._deadlines.set_first(LeaveDue(other.id), now + self._config.times.exit_timeout_s)
        return commands

    def _tell_digest(self, worker: Worker) -> list[Command]:
        told = Digested(member=worker.id, digest=worker.digest or "")
        return [] if self._config.alone or worker.raised else [TellNodes(message=told)]

    @handles(Ended)
    def on_ended(self, now: float) -> list[Command]:
        """Handle a member on another node that has passed the end."""
        if self.finishing or self.end is not None:
            return []
        self.finishing = True
        commands = self._free_all()
        if not self._cluster.unfinished():
            commands += self.end_surplus() + self.end_if_all_left(now)
        return commands

    def _free_all(self) -> list[Command]:
        # No more workers are started. The number for a vacancy may never come, because the last node removes the keys.
        self._cluster.workers.start_no_more()
        return [Tell(member=other.id, message=am.EndReached()) for other in self._cluster.workers.living]

    def on_peaceful_exit(self, worker: Worker, how: str, now: float) -> list[Command]:
        """Handle the exit of a finished or surplus worker. An error after its work still fails the job."""
        if worker.stage is Stage.LEFT and worker.exit_code != 0:
            after = "an exception in its loop" if worker.raised else "it had finished its work"
            return self.finish(1, f"{how} after {after}")
        commands = self._tell_digest(worker) if worker.release_digest() else []
        if self._cluster.view is not None and not self._cluster.unfinished():
            commands += self.end_surplus()
        return commands + self.end_if_all_left(now)

    def on_nobody_left(self, worker: Worker, how: str, now: float) -> list[Command]:
        """Handle the exit of the last living member before the end of its work. The view's next edit ends the job."""
        if worker.exit_code == 0:
            return self.end_surplus() + self.end_if_all_left(now)
        self.last_words = f"{how}, and no other member was left: the state is gone"
        return []

    def end_surplus(self) -> list[Command]:
        """End workers that have no member left to get the state from."""
        commands: list[Command] = []
        self._cluster.workers.start_no_more()
        for other in self._cluster.workers.living:
            if not other.finished and other.stage is not Stage.SURPLUS:
                other.follow(Course.BE_SURPLUS)
                commands.append(Kill(member=other.id, reason=f"{other.id} has nothing left to join"))
        return commands

    def end_if_all_left(self, now: float, how: str = "", why: str = "") -> list[Command]:
        """End this node if no worker is left. `how` the last one ended, `why` no other one is started, or ""."""
        workers, alive = self._cluster.workers, self._cluster.alive_in_view()
        if workers.living or workers.vacancies or self.end is not None:
            return []
        if self.finishing:
            return self._end_with_all_digests(now)
        if self._cluster.peers.record.spare:
            return []
        codes = [worker.exit_code for worker in workers.by_id.values()]
        if not self._cluster.progress.begun and codes[-1] and not alive:
            how = f"{how} before the first commit, and no worker is left on this node"
            return self.finish(1, how, everywhere=False)
        # Plain scripts report no steps and no end, only exit codes.
        if not any(codes) or not alive:
            return self.finish(0, "every worker's script has ended", everywhere=False)
        why = why or "no worker is left on this node"
        return self.finish(1, f"{why}; {len(alive)} elsewhere go on", everywhere=False)

    def end_if_nobody_is_left_to_join(self) -> list[Command]:
        """End a node that came late if the other nodes finished the job before its workers could join."""
        cluster = self._cluster
        if cluster.view is None or self.end is not None or cluster.alive_in_view() or not cluster.late:
            return []
        if any(worker.finished for worker in cluster.workers.by_id.values()):  # its exit code ends this node
            return []
        return self.finish(0, "the job ended before this node had joined", everywhere=False)

    @handles(Digested)
    def on_digested(self, notice: Digested) -> list[Command]:
        """Compare the final digest of a member on another node."""
        return self._compare(notice.member, notice.digest)

    def _compare(self, member: str, digest: str) -> list[Command]:
        difference = self._digests.add(member, digest)
        return self.finish(1, difference) if difference else self.look_at_digests_again()

    def _end_with_all_digests(self, now: float) -> list[Command]:
        """End, or wait for the digests of slower nodes first: this node must not return 0 if a result differs."""
        to_come = self._digests.missing(_reachable(self._cluster))
        if not to_come:
            return self._end_well()
        if DigestsDue() in self._deadlines:
            return []
        self._deadlines.set(DigestsDue(), now + self._config.times.exit_timeout_s)
        return [Log(event="await_digests", fields={"members": to_come})]

    def look_at_digests_again(self) -> list[Command]:
        """End if all digests that this node waits for have come, or can no longer come."""
        waits = DigestsDue() in self._deadlines and self.end is None
        return self._end_well() if waits and not self._digests.missing(_reachable(self._cluster)) else []

    @handles(DigestsDue)
    def on_digests_late(self) -> list[Command]:
        """End without the missing digests."""
        to_come, limit_s = self._digests.missing(_reachable(self._cluster)), self._config.times.exit_timeout_s
        say = (
            f"the parameters of {', '.join(to_come)} at the end are not known after {limit_s:g} s: "
            "this node ends without having compared its own with them"
        )
        return [Log(event="digests_missing", fields={"members": to_come}, say=say), *self._end_well()]

    def _end_well(self) -> list[Command]:
        # A node whose own workers were lost earlier does not know the last step.
        knows = any(worker.finished for worker in self._cluster.workers.by_id.values())
        step = self._cluster.progress.step if knows else None
        return self.finish(0, "finished" if step is None else f"finished after step {step}", everywhere=False)


def _reachable(cluster: Cluster) -> list[str]:
    """Return the living members on nodes that answer and have not left."""
    away, left = cluster.unlinked_nodes(), cluster.peers.left
    # A node that has left sent its digests before, on the same link. A silent node might never send them.
    there = [m for m in cluster.members if m.node not in away and (m.node, m.incarnation) not in left]
    return [m.id for m in there if cluster.is_alive(m.id)]
