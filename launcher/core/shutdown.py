"""The last net: the digests of the parameters with which members have passed the end, compared over all nodes.

A signal says that this node, or the job, is to stop: members hand over, or write one last checkpoint, first.

How a job ends, and how a node ends while others go on: everything that leads to `End`.
"""

from __future__ import annotations

from elastrain.launcher.core.agent_events import EndStands, StopAsked
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, DigestsDue, HandOverDue, LeaveDue, TogetherDue
from elastrain.launcher.core.worker_table import Course, Stage, Worker
from elastrain.launcher.shared.job_values import Command, End, Kill, Log, Tell, TellNodes
from elastrain.launcher.shared.notices import Digested, Ended, LastWritten, Leaving, Left, Over
from elastrain.protocol.agent_messages import (
    CheckpointEnded,
    Diverged,
    EndReached,
    Finished,
    HandOver,
    LostState,
    NoRoom,
    WriteLast,
)


class FinalDigests:
    """Compares the digests of all members at the end: whatever has parted two of them, such a job has no result."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._by_member: dict[str, str] = {}

    def add(self, member: str, digest: str) -> str:
        """Add a member's digest. Returns a sentence that names two members whose digests differ; empty if none do.

        An empty one is told by a member that has a part of the parameters only.
        """
        known = self._by_member
        known[member] = digest
        other = next((m for m, its in known.items() if its != digest and its and digest), None)
        if other is None:
            return ""
        return (
            f"the parameters at the end differ: {other} has the digest {known[other]}, {member} has {digest}; "
            "neither can be trusted: something outside of the optimizer has changed them on one member, or a device "
            "computes wrongly"
        )

    def to_come(self) -> list[str]:
        """Living members of the view, on nodes that answer and have not left, whose digests are not known yet."""
        cluster = self._cluster
        away, left = cluster.unlinked_nodes(), cluster.peers.left
        # Whoever has left has told its digest before, over the same link; a silent node might never tell it.
        there = [m for m in cluster.members if m.node not in away and (m.node, m.incarnation) not in left]
        return [m.id for m in there if cluster.is_alive(m.id) and m.id not in self._by_member]


class Shutdown:
    """Owns the end, and what is known about how the work ended. Once there is an end, nothing else is decided."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines = deadlines
        self._digests = FinalDigests(cluster)
        self.end: End | None = None
        self.leaving: StopAsked | None = None
        """This node was told to go, and waits for something first: see `Stopping`."""
        self.finishing = False
        """A member of this node or another has passed the end of the job: nobody waits for anybody any more."""
        self.last_words = ""
        """How the last member of the view ended, if it was one of this node's."""
        self.last_traceback = ""
        """The newest that a script has ended with, on any node."""
        self.raised: set[str] = set()
        """Members whose script has raised: what they had was not lost with a machine, and would be lost again."""

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
        """End with this code and sentence. `everywhere`: the job is over on all nodes; else others may go on, unless
        they have said themselves that it `is_over`.
        """
        if self.end is not None:
            return []
        # Nodes that come late must not wait for a job whose work is done, however this node came to its end.
        over = everywhere or is_over or (code == 0 and self.finishing)
        self.end = End(code=code, sentence=sentence, detail=detail, everywhere=everywhere, job_is_over=over, lost=lost)
        if lost and self.leaving is not None:  # the next life is for those that stay
            why = f"{self.leaving.sentence}; meanwhile the job has lost its state: {sentence}"
            self.end = End(code=self.leaving.code, sentence=why, everywhere=False, job_is_over=False)
        # What was waited for must not act on a job that has ended.
        self._deadlines.clear()
        self._cluster.progress.explain(sentence)
        if self._config.alone or not (everywhere or code == 0):
            return [self.end]
        told = Over(code=code, sentence=sentence, detail=detail, lost=lost) if everywhere else Left()
        return [self.end, TellNodes(message=told)]

    def leave(self) -> list[Command]:
        """End the wait: what it was for is done, or takes too long."""
        assert self.leaving is not None
        return self.finish(self.leaving.code, self.leaving.sentence, everywhere=False)

    def on_over(self, node: str, notice: Over, now: float) -> list[Command]:
        # Who said so may be killed before anybody else hears of it: those that come back are not to wait for the job.
        return self.finish(
            notice.code, notice.sentence, notice.detail, everywhere=False, lost=notice.lost, is_over=True
        )

    def on_end(self, event: EndStands, now: float) -> list[Command]:
        over = event.over
        return self._free_and_end(now) if over.code == 0 else self.on_over("", over, now)

    def on_lost_state(self, worker: Worker, message: LostState, now: float) -> list[Command]:
        if worker.id not in self._cluster.ids:  # it says so of a view that stands no more
            return [Log(event="note", fields={"member": worker.id, "reason": message.sentence})]
        return self.finish(1, message.sentence, lost=True)

    def on_verdict(self, worker: Worker, message: Diverged | NoRoom, now: float) -> list[Command]:
        # Where nobody knows which of two states is right, the last one that all agreed upon is on disk.
        return self.finish(1, message.sentence, lost=isinstance(message, Diverged))

    def on_finished(self, worker: Worker, message: Finished, now: float) -> list[Command]:
        first = not self.finishing
        self.finishing = True
        worker.follow(Course.FINISH)
        worker.digest, worker.raised = message.digest, message.raised
        fields = {"member": worker.id, "step": message.step, "digest": message.digest}
        commands: list[Command] = [Log(event="finished", fields=fields)]
        if first:  # it leaves in peace, so all have the last step: nobody needs to wait for anybody any more
            commands += self._free_all()
            commands += [] if self._config.alone else [TellNodes(message=Ended())]
        commands += self._tell_digest(worker)
        commands += self._compare(worker.id, message.digest)
        if self.end is not None:
            return commands
        # A process that hangs after its work must not keep the node, or the other nodes, from ending.
        if self._cluster.view is not None and not self._cluster.unfinished():
            for other in self._cluster.mine_in_view():
                self._deadlines.set_first(LeaveDue(other.id), now + self._config.times.exit_timeout_s)
        return commands

    def _tell_digest(self, worker: Worker) -> list[Command]:
        told = Digested(member=worker.id, digest=worker.digest or "")
        return [] if self._config.alone or worker.raised else [TellNodes(message=told)]

    def on_ended(self, node: str, notice: Ended, now: float) -> list[Command]:
        """Handle a member on another node that has passed the end."""
        return self._free_and_end(now)

    def _free_and_end(self, now: float) -> list[Command]:
        if self.finishing or self.end is not None:
            return []
        self.finishing = True
        commands = self._free_all()
        if not self._cluster.unfinished():
            commands += self._end_surplus() + self.end_if_all_left(now)
        return commands

    def _free_all(self) -> list[Command]:
        # Nobody is started any more, and the number that a place waits for may never come: the last node takes the
        # keys of the job along.
        self._cluster.workers.vacancies.clear()
        return [Tell(member=other.id, message=EndReached()) for other in self._cluster.workers.living]

    def on_overdue(self, due: LeaveDue, now: float) -> list[Command]:
        self._cluster.workers.by_id[due.member].follow(Course.BE_LATE)
        return [Kill(member=due.member, reason=f"{due.member} should have ended by now")]

    def on_peaceful_exit(self, worker: Worker, how: str, now: float) -> list[Command]:
        """Handle the exit of a worker that had finished, or was of no more use."""
        # The script goes on after the job: what fails there is the user's to know, though no state is lost.
        if worker.stage is Stage.LEFT and worker.exit_code != 0:
            after = "an exception in its loop" if worker.raised else "it had finished its work"
            return self.finish(1, f"{how} after {after}")
        told, worker.raised = worker.raised, False
        commands = self._tell_digest(worker) if told else []
        if self._cluster.view is not None and not self._cluster.unfinished():
            commands += self._end_surplus()
        return commands + self.end_if_all_left(now)

    def on_nobody_left(self, worker: Worker, how: str, now: float) -> list[Command]:
        """Handle the end of the view's last living member before its work: the next look at the view ends the job."""
        if worker.exit_code == 0:
            return self._end_surplus() + self.end_if_all_left(now)
        self.last_words = f"{how}, and no other member was left: the state is gone"
        return []

    def _end_surplus(self) -> list[Command]:
        workers = self._cluster.workers
        workers.vacancies.clear()  # numbers on their way start nobody any more
        commands: list[Command] = []
        for other in workers.living:
            if not other.finished and other.stage is not Stage.SURPLUS:
                other.follow(Course.BE_SURPLUS)
                commands.append(Kill(member=other.id, reason=f"{other.id} has nothing left to join"))
        return commands

    def end_if_all_left(self, now: float, how: str = "") -> list[Command]:
        """`how` the last worker of this node ended."""
        workers, alive = self._cluster.workers, self._cluster.alive_in_view()
        if workers.living or workers.vacancies or self.end is not None:
            return []
        if self.finishing:
            return self._end_with_all_digests(now)
        codes = [worker.exit_code for worker in workers.by_id.values()]
        if not self._cluster.progress.begun and codes[-1] and not alive:
            return self.finish(
                1, f"{how} before the first commit, and no worker is left on this node", everywhere=False
            )
        # Plain scripts say nothing of steps or ends: their exit codes are all there is.
        if not any(codes) or not alive:
            return self.finish(0, "every worker's script has ended", everywhere=False)
        return self.finish(1, f"no worker is left on this node; {len(alive)} elsewhere go on", everywhere=False)

    def end_if_nobody_is_left_to_join(self) -> list[Command]:
        """A node that came late, and whose workers were not let in before all others had done the work."""
        cluster = self._cluster
        if cluster.view is None or self.end is not None or cluster.alive_in_view() or not cluster.late:
            return []
        return self.finish(0, "the job ended before this node had joined", everywhere=False)

    def on_digested(self, node: str, notice: Digested, now: float) -> list[Command]:
        return self._compare(notice.member, notice.digest)

    def _compare(self, member: str, digest: str) -> list[Command]:
        difference = self._digests.add(member, digest)
        return self.finish(1, difference) if difference else self.look_at_digests_again()

    def _end_with_all_digests(self, now: float) -> list[Command]:
        """The work is done here. A slower node may still find another result: then this one must not have said 0."""
        to_come = self._digests.to_come()
        if not to_come:
            return self._end_well()
        if DigestsDue() in self._deadlines:
            return []
        self._deadlines.set(DigestsDue(), now + self._config.times.exit_timeout_s)
        return [Log(event="await_digests", fields={"members": to_come})]

    def look_at_digests_again(self) -> list[Command]:
        """Whoever was waited for has told its digest, or can no longer tell it."""
        waits = DigestsDue() in self._deadlines and self.end is None
        return self._end_well() if waits and not self._digests.to_come() else []

    def on_digests_late(self, due: DigestsDue, now: float) -> list[Command]:
        to_come, limit_s = self._digests.to_come(), self._config.times.exit_timeout_s
        say = (
            f"the parameters of {', '.join(to_come)} at the end are not known after {limit_s:g} s: "
            "this node ends without having compared its own with them"
        )
        return [Log(event="digests_missing", fields={"members": to_come}, say=say), *self._end_well()]

    def _end_well(self) -> list[Command]:
        # A node whose own workers were lost before does not know how far the others have come.
        knows = any(worker.finished for worker in self._cluster.workers.by_id.values())
        step = self._cluster.progress.step if knows else None
        return self.finish(0, "finished" if step is None else f"finished after step {step}", everywhere=False)


PREEMPTED = 128 + 15
"""The code of an agent that has got SIGTERM: a notice that its machine is wanted elsewhere, or a stop of the job."""


class Stopping:
    """Owns whether the last checkpoint is being written; who leaves, and the end, are `Shutdown`'s."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, shutdown: Shutdown) -> None:
        self._cluster, self._times = cluster, cluster.config.leave
        self._deadlines, self._shutdown = deadlines, shutdown
        self._writes_last = False

    def on_stop(self, event: StopAsked, now: float) -> list[Command]:
        """Handle a signal to stop. Where others go on, this node leaves between two steps: no work is lost."""
        shutdown = self._shutdown
        is_first = shutdown.end is None and shutdown.leaving is None and not shutdown.finishing
        may_wait = is_first and self._cluster.progress.begun and bool(self._cluster.unfinished())
        if may_wait and self._times.last_checkpoint_s:
            shutdown.leaving = event
            return [TellNodes(message=Leaving()), *self._look_around(now)]
        if may_wait and event.code == PREEMPTED and self._cluster.others_stay():
            shutdown.leaving = event
            return [*self._hand_over(now), TellNodes(message=Leaving())]
        # Others who were told the same need not wait for the end of a step that nobody goes on from.
        told = [TellNodes(message=Leaving())] if event.code == PREEMPTED and shutdown.end is None else []
        return [*told, *shutdown.finish(event.code, event.sentence, everywhere=False)]

    def on_leaving(self, node: str, now: float) -> list[Command]:
        """Handle a node that goes. Where all do, the whole job is stopped, and nobody is left to hand over to."""
        if node in self._cluster.peers.nodes:
            self._cluster.peers.nodes[node].leaving = True
        if self._shutdown.leaving is None or self._writes_last:
            return []
        if TogetherDue() in self._deadlines:
            return [] if self._cluster.others_go_on() else self._write_last(now)
        if self._cluster.others_stay():
            return []
        # What is not handed over yet would go with this node, and the others' last checkpoint lack it.
        is_awaited = self._times.last_checkpoint_s and self._cluster.unfinished()
        return self._write_last(now) if is_awaited else self._shutdown.leave()

    def on_due(self, due: TogetherDue | HandOverDue, now: float) -> list[Command]:
        """Go on: whoever was told to go as this node was has said so by now, or what was waited for takes too long."""
        assert self._shutdown.leaving is not None
        is_notice = self._shutdown.leaving.code == PREEMPTED
        return self._hand_over(now) if is_notice and isinstance(due, TogetherDue) else self._shutdown.leave()

    def on_written(self, message: CheckpointEnded) -> list[Command]:
        """Handle the last checkpoint, which a member of this node has written."""
        if not message.last or self._shutdown.leaving is None:
            return []
        return [TellNodes(message=LastWritten()), *self._shutdown.leave()]

    def on_others_written(self) -> list[Command]:
        return self._shutdown.leave() if self._writes_last and self._shutdown.leaving is not None else []

    def _look_around(self, now: float) -> list[Command]:
        """Wait until it shows whether only this node is to go or all are: nodes told at the same time say so then."""
        if not self._cluster.others_go_on():
            return self._write_last(now)
        self._deadlines.set(TogetherDue(), now + self._times.together_s)
        return []

    def _write_last(self, now: float) -> list[Command]:
        assert self._shutdown.leaving is not None
        self._writes_last = True
        self._deadlines.drop(TogetherDue())
        self._deadlines.set(HandOverDue(), now + self._times.last_checkpoint_s)
        sentence, at_most_s = self._shutdown.leaving.sentence, self._times.last_checkpoint_s
        say = f"{sentence}: one last checkpoint is written, for which the job waits {at_most_s:g} s at the most"
        log = Log(event="last_checkpoint", fields={"at_most_s": at_most_s}, say=say)
        return [log, *(Tell(member=w.id, message=WriteLast()) for w in self._cluster.unfinished())]

    def _hand_over(self, now: float) -> list[Command]:
        assert self._shutdown.leaving is not None
        mine, sentence = self._cluster.unfinished(), self._shutdown.leaving.sentence
        self._deadlines.set(HandOverDue(), now + self._times.hand_over_s)
        members = ", ".join(w.id for w in mine)
        when = "at the end of a step, once another node has their state; then this one goes"
        say = f"{sentence}: {members} hand over {when}"
        log = Log(event="leaving", fields={"members": [w.id for w in mine]}, say=say)
        return [log, *(Tell(member=w.id, message=HandOver()) for w in mine)]
