"""How a job ends, and how a node ends while others go on. A layer of `core`."""

from __future__ import annotations

from elastrain.agent_messages import EndReached, Finished
from elastrain.launcher.notices import Digested, Ended, Left, Over
from elastrain.launcher.requests import Requests
from elastrain.launcher.roll import DIGESTS
from elastrain.launcher.values import Command, End, Kill, Log, Stage, Tell, TellNodes, Worker


class Ending(Requests):
    """Everything that leads to `End`."""

    def stop(self, code: int, sentence: str) -> list[Command]:
        """From outside: a signal, or a fault of the agent itself. Other nodes go on without this one."""
        return self._finish(code, sentence, everywhere=False)

    def _finish(self, code: int, sentence: str, detail: str = "", *, everywhere: bool = True) -> list[Command]:
        if self.end is not None:
            return []
        over = everywhere or (code == 0 and self._finishing())
        self.end = End(code=code, sentence=sentence, detail=detail, everywhere=everywhere, job_is_over=over)
        self._deadlines_s.clear()
        self._reason(sentence)
        if self.config.alone or not (everywhere or code == 0):
            return [self.end]
        told = Over(code=code, sentence=sentence, detail=detail) if everywhere else Left()
        return [self.end, TellNodes(message=told)]

    def _on_over(self, notice: Over) -> list[Command]:
        return self._finish(notice.code, notice.sentence, notice.detail, everywhere=False)

    def on_job_over(self, over: Over, now: float) -> list[Command]:
        """The store says so, before or instead of the notice."""
        return self._on_ended(now) if over.code == 0 else self._on_over(over)

    def _on_finished(self, worker: Worker, message: Finished, now: float) -> list[Command]:
        first = not self._finishing()
        worker.finished, worker.digest = True, message.digest
        if worker.alive:
            worker.stage = Stage.FINISHED
        fields = {"member": worker.id, "step": message.step, "digest": message.digest}
        commands: list[Command] = [Log(event="finished", fields=fields)]
        if first:  # it leaves in peace, so all have the last step: nobody needs to wait for anybody any more
            commands += self._free_all()
            commands += [] if self.config.alone else [TellNodes(message=Ended())]
        commands += [] if self.config.alone else [TellNodes(message=Digested(member=worker.id, digest=message.digest))]
        commands += self._compare(worker.id, message.digest)
        if self.end is not None:
            return commands
        if self.view is not None and not self._unfinished():
            for other in self._mine_in_view():
                self._must_leave(other, now + self.config.exit_timeout_s)
        return commands

    def _compare(self, member: str, digest: str) -> list[Command]:
        """The last net: whatever has parted two members, a job whose results differ has none."""
        self._digests[member] = digest
        other = next((known for known, its in self._digests.items() if its != digest), None)
        if other is None:
            return self._look_at_digests_again()
        return self._finish(
            1,
            f"the parameters at the end differ: {other} has the digest {self._digests[other]}, {member} has {digest}; "
            "neither can be trusted: something outside of the optimizer has changed them on one member, or a device "
            "computes wrongly",
        )

    def _on_ended(self, now: float) -> list[Command]:
        """A member on another node has passed the end."""
        if self._finishing() or self.end is not None:
            return []
        self._work_is_done = True
        commands = self._free_all()
        if not self._unfinished():
            commands += self._end_late_joiners() + self._end_if_all_left(now)
        return commands

    def _free_all(self) -> list[Command]:
        return [Tell(member=other.id, message=EndReached()) for other in self.living]

    def _on_peaceful_exit(self, worker: Worker, how: str, now: float) -> list[Command]:
        if worker.exit_code != 0 and not worker.ended_by_us:
            return self._finish(1, f"{how} after it had finished its work")
        if self.view is not None and not self._unfinished():
            return self._end_late_joiners() + self._end_if_all_left(now)
        return self._end_if_all_left(now)

    def _end_late_joiners(self) -> list[Command]:
        self._vacancies.clear()
        commands: list[Command] = []
        for other in self.living:
            if not other.finished and not other.surplus:
                other.surplus = True
                commands.append(Kill(member=other.id, reason=f"{other.id} has nothing left to join"))
        return commands

    def _on_nobody_left(self, worker: Worker, how: str, now: float) -> list[Command]:
        """The last living member of the view ended without having finished; the next look at the view ends the job."""
        if worker.exit_code == 0:
            return self._end_late_joiners() + self._end_if_all_left(now)
        if self._failures and self._failures[-1].member == worker.id:
            how = f"the script raised on {worker.id} at {self._failures[-1].place}"
        self._last_words = f"{how}, and no other member was left: the state is gone"
        return []

    def _end_if_all_left(self, now: float, how: str = "") -> list[Command]:
        """`how` the last worker of this node ended."""
        if self.living or self._vacancies or self.end is not None:
            return []
        if self._finishing():
            return self._end_with_all_digests(now)
        codes = [worker.exit_code for worker in self.workers.values()]
        if not self.begun and codes[-1] and not self._alive_in_view():
            return self._finish(
                1, f"{how} before the first commit, and no worker is left on this node", everywhere=False
            )
        if not any(codes) or not self._alive_in_view():
            return self._finish(0, "every worker's script has ended", everywhere=False)
        others = len(self._alive_in_view())
        return self._finish(1, f"no worker is left on this node; {others} elsewhere go on", everywhere=False)

    def _end_with_all_digests(self, now: float) -> list[Command]:
        """The work is done here. A slower node may still find another result: then this one must not have said 0."""
        to_come = self._digests_to_come()
        if not to_come:
            return self._end_well()
        if DIGESTS in self._deadlines_s:
            return []
        self._deadlines_s[DIGESTS] = now + self.config.exit_timeout_s
        return [Log(event="await_digests", fields={"members": to_come})]

    def _digests_to_come(self) -> list[str]:
        """Living members of the view, on nodes that answer and have not left, whose digests are not known yet."""
        members = self.view.members if self.view else ()
        unlinked = self._unlinked_nodes()
        there = [m for m in members if m.node not in unlinked and (m.node, m.incarnation) not in self._left]
        return [m.id for m in there if self.is_alive(m.id) and m.id not in self._digests]

    def _look_at_digests_again(self) -> list[Command]:
        """Whoever was waited for has told its digest, or can no longer tell it."""
        waits = DIGESTS in self._deadlines_s and self.end is None
        return self._end_well() if waits and not self._digests_to_come() else []

    def _on_digests_late(self) -> list[Command]:
        to_come, limit_s = self._digests_to_come(), self.config.exit_timeout_s
        say = (
            f"the parameters of {', '.join(to_come)} at the end are not known after {limit_s:g} s: "
            "this node ends without having compared its own with them"
        )
        return [Log(event="digests_missing", fields={"members": to_come}, say=say), *self._end_well()]

    def _end_well(self) -> list[Command]:
        after = "" if self.step is None else f" after step {self.step}"
        return self._finish(0, f"finished{after}", everywhere=False)

    def _end_if_nobody_is_left_to_join(self) -> list[Command]:
        """A node that came late, and whose workers were not let in before all others had left."""
        if self.view is None or self.end is not None or self._alive_in_view() or not self.late:
            return []
        return self._finish(
            0 if self._finishing() else 1, "the job ended before this node had joined", everywhere=False
        )
