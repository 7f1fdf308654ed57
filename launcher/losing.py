"""How workers and nodes are lost: deaths, exits, suspicion, silence, failures of the script. A layer of `core`."""

from __future__ import annotations

from collections.abc import Sequence

from elastrain.agent_messages import Failed, Suspect
from elastrain.launcher.joining import Joining
from elastrain.launcher.notices import Digested, Ended, Exited, Raised, Suspected
from elastrain.launcher.roll import MEET, WARM_UP
from elastrain.launcher.values import Command, Log, Node, Propose, Stage, TakeNumber, TellNodes, Worker
from elastrain.membership import Failure, ends_job, may_restart, without_a_suspect

_TRACEBACK_CHARS_MAX = 1 << 16


class Losing(Joining):
    """What is proof, what is only silence, and what follows."""

    # ---- this node's workers

    def on_death(self, member: str, source: str, at_s: float, now: float) -> list[Command]:
        """Proof that the process is gone (`source`: mutex or pidfd), known at `at_s`. Its exit code may come later."""
        worker = self.workers[member]
        if not worker.alive:
            return []
        worker.stage = Stage.GONE
        self._suspicions.pop(member, None)
        self._deadlines_s.pop(member, None)
        self._deadlines_s.pop(WARM_UP + member, None)
        commands: list[Command] = [_death(member, source, at_s, now)]
        if not self.config.alone:
            commands.append(TellNodes(message=Exited(member=member)))
        in_view = self.view is not None and member in self.view
        # Without others to go on, the exit code decides what this means. And once one has finished, nobody waits.
        return commands + (self._settle(now) if in_view else [])

    def on_exit(self, member: str, exit_code: int, now: float) -> list[Command]:
        """The process is reaped; `on_death` came before. `exit_code` < 0 is minus the signal."""
        worker = self.workers[member]
        worker.exit_code = exit_code
        log: list[Command] = [Log(event="exit", fields={"member": member, "exit_code": exit_code})]
        if self.end is not None:
            return log
        if worker.surplus:
            return log + self._end_if_all_left(now)
        how = f"{member} ended {describe_exit(exit_code)}"
        if worker.finished:
            return log + self._on_peaceful_exit(worker, how, now)
        if exit_code > 0 and self.blames_the_script:
            return log + self._finish(1, f"{how} before the first commit", self._last_traceback())
        gone = self.view is not None and not self._alive_in_view() and not self._finishing()
        if gone and (self.begun or exit_code == 0):
            return log + self._on_nobody_left(worker, how, now) + self._settle(now)
        return log + self._replace(worker, how, now) + self._end_if_all_left(now, how)

    def _replace(self, worker: Worker, how: str, now: float) -> list[Command]:
        assert worker.exit_code is not None
        verdict = may_restart(
            exit_code=worker.exit_code,
            finishing=self._finishing(),
            refused=worker.refused,
            used=self.restarts_used,
            allowed=self.config.max_restarts,
        )
        if verdict.yes:
            self.restarts += 1
            self.restarts_used += 1
            self._vacancies.append((worker.slot, worker.id))
            say = f"{how}; another is started in its place ({verdict.reason})"
            return [Log(event="replace", fields={"member": worker.id, "reason": verdict.reason}, say=say), TakeNumber()]
        fields = {"member": worker.id, "reason": verdict.reason}
        say = "" if self.view is None else f"{how}; not started again: {verdict.reason}"
        return [Log(event="no_restart", fields=fields, say=say), *self._settle(now)]

    def on_channel_closed(self, member: str, now: float) -> list[Command]:
        """Usually it is just ending; if not, a member that can not be told of views is of no use."""
        worker = self.workers[member]
        if self.end is None and worker.alive and not worker.finished:
            self._must_leave(worker, now + self.config.leave_timeout_s)
        return []

    # ---- workers elsewhere

    def _lost_elsewhere(self, members: Sequence[str], source: str, at_s: float, now: float) -> list[Command]:
        """Proof that members of other nodes are gone."""
        new = [m for m in members if m not in self.workers and m not in self._dead_elsewhere]
        self._dead_elsewhere.update(new)
        in_view = [m for m in new if self.view is not None and m in self.view]
        if not in_view or self.end is not None:
            return []
        commands: list[Command] = [_death(m, source, at_s, now) for m in in_view]
        return commands + self._settle(now)

    def on_link(self, name: str, *, up: bool, reason: str, now: float, closed: bool = False) -> list[Command]:
        """The agent of another node answers, or no longer does. `closed`: its machine says that it is gone."""
        node = self.nodes.get(name)
        if self.end is not None or node is None or node.linked == up:
            return []
        node.linked, node.suspected = up, closed and not up
        node.met = node.met or up
        log = Log(event="link", fields={"node": name, "up": up, "reason": reason})
        if not up and not node.leased:
            return [log, *self._on_node_dead(node, f"its lease is gone, and {reason}", now)]
        if not up and not closed:
            self._deadlines_s.setdefault("silence", now + self.config.silence_grace_s)
        return [log, *(self._news_for(name) if up else []), *self._settle(now)]

    def _news_for(self, name: str) -> list[Command]:
        """What the agent there may have missed while it could not be reached."""
        gone = [m for m in (self.view.ids if self.view else ()) if m in self.workers and not self.workers[m].alive]
        finished = [worker for worker in self.workers.values() if worker.finished]
        # Digests first: nobody waits for that of a member that is known to be gone.
        commands: list[Command] = [TellNodes(message=_digested(worker), node=name) for worker in finished]
        commands += [TellNodes(message=Exited(member=member), node=name) for member in gone]
        mine = [failure for failure in self._failures if failure.member in self.workers]
        commands += [TellNodes(message=_raised(failure), node=name) for failure in mine]
        return commands + ([TellNodes(message=Ended(), node=name)] if self._finishing() else [])

    def _on_silence(self, now: float) -> list[Command]:
        for node in self.nodes.values():
            node.suspected = not node.linked
        return self._settle(now)

    def on_record_gone(self, name: str, now: float) -> list[Command]:
        """A node's lease has ended: proof of its death, unless its agent answers (the store may have been away)."""
        node = self.nodes.get(name)
        if self.end is not None or node is None:
            return []
        node.leased = False
        log = Log(event="lease_gone", fields={"node": name, "linked": node.linked})
        if node.linked:
            return [log]
        if not node.met:
            self._deadlines_s[MEET + name] = now + self.config.meet_s
            return [log]
        return [log, *self._on_node_dead(node, "its lease is gone", now)]

    def _on_never_met(self, name: str, now: float) -> list[Command]:
        """Its lease ended, and it had time to answer."""
        node = self.nodes.get(name)
        if node is None:
            return self._on_absent(name, now)
        if node.leased or node.met:
            return []
        return self._on_node_dead(node, "its lease is gone, and its agent was never reached", now)

    def _on_absent(self, name: str, now: float) -> list[Command]:
        """A node of the view that has no key and does not answer: it was gone before this one came."""
        if self.store_away_since_s is not None:
            self._deadlines_s[MEET + name] = now + self.config.absent_s
            return []
        members = [member.id for member in (self.view.members if self.view else ()) if member.node == name]
        return self._lost_elsewhere(members, "no key, no answer", now, now)

    def _on_node_dead(self, node: Node, why: str, now: float) -> list[Command]:
        name = node.record.name
        self.nodes.pop(name, None)
        if self.end is not None:
            return []
        commands: list[Command] = [Log(event="node_dead", fields={"node": name, "reason": why})]
        if self.view is None:  # the others begin without it
            return commands + self._settle(now)
        members = [member.id for member in self.view.members if member.node == name]
        return commands + self._lost_elsewhere(members, "lease", now, now)

    # ---- suspicion

    def _on_suspect(self, by: Worker, message: Suspect, now: float) -> list[Command]:
        if message.dead and message.member not in self.workers:
            # Its own watcher of the other's robust mutex has told it.
            return self._lost_elsewhere([message.member], f"mutex, seen by {by.id}", now, now)
        commands = self._suspect(message.member, by.id, message.reason, now)
        if commands and not self.config.alone:
            notice = Suspected(member=message.member, by=by.id, reason=message.reason)
            commands.append(TellNodes(message=notice))
        return commands

    def _suspect(self, member: str, by: str, reason: str, now: float) -> list[Command]:
        worker = self.workers.get(member)
        if self.view is None or member not in self.view or self._finishing() or not self.is_alive(member):
            return []
        if worker is not None and worker.finished:
            return []
        self._suspicions.setdefault(member, set()).add(by)
        # A death is proven within milliseconds; what is still alive after this time has lost its links, not its life.
        self._deadlines_s.setdefault("suspicion", now + self.config.suspicion_s)
        return [Log(event="suspect", fields={"member": member, "by": by, "reason": reason})]

    def _end_a_suspect(self, now: float) -> list[Command]:
        """One agent chooses, and the store takes one view of each generation: two members are never ended at once.

        Who still does not reach another says so again.
        """
        if self._proposing:  # what stands next may already be without one of them
            self._deadlines_s["suspicion"] = now + self.config.suspicion_s
            return []
        suspicions, self._suspicions = self._suspicions, {}
        if self.view is None or self._finishing() or self.first_answering_node() != self.config.node:
            return []
        unlinked = self._unlinked_nodes()
        proposal = without_a_suspect(
            self.view,
            suspicions,
            holders=self.holders,
            answering={m.id for m in self.view.members if self.is_alive(m.id) and m.node not in unlinked},
            begun=self.begun,
        )
        if proposal.view is None:  # deaths have been proven meanwhile
            return []
        self._proposing = True
        return [
            Log(event="end_suspect", fields={"reason": proposal.reason}, say=proposal.reason),
            Propose(view=proposal.view),
        ]

    # ---- failures of the script

    def _on_failed(self, worker: Worker, message: Failed, now: float) -> list[Command]:
        failure = Failure(
            member=worker.id,
            step=message.step,
            micro_batch=message.micro_batch,
            signature=message.signature,
            # Told to other agents, in one line of limited length.
            traceback=message.traceback[-_TRACEBACK_CHARS_MAX:],
        )
        # Steps before it are committed, whether or not the store has said so.
        self.begun = self.begun or message.step > 0
        commands: list[Command] = [] if self.config.alone else [TellNodes(message=_raised(failure))]
        commands += self._judge_failure(failure)
        if self.end is None:
            self._must_leave(worker, now + self.config.leave_timeout_s)
        return commands

    def _on_raised_elsewhere(self, notice: Raised, now: float) -> list[Command]:
        """Whichever node the second member of the same failure is on, the job ends on all with its traceback."""
        failure = Failure(
            member=notice.member,
            step=notice.step,
            micro_batch=None if notice.micro_batch < 0 else notice.micro_batch,
            signature=notice.signature,
            traceback=notice.traceback,
        )
        known = self.end is not None or failure in self._failures
        return [] if known else self._judge_failure(failure)

    def _judge_failure(self, failure: Failure) -> list[Command]:
        verdict = ends_job(failure, self._failures, committed=not self.blames_the_script)
        self._failures.append(failure)
        fields = {"member": failure.member, "place": failure.place, "signature": failure.signature}
        # Its own node says it; only the end concerns every screen.
        say = verdict.reason if failure.member in self.workers and not verdict.yes else ""
        log = Log(event="failed", fields={**fields, "traceback": failure.traceback}, say=say)
        if verdict.yes:
            return [log, *self._finish(1, verdict.reason, failure.traceback)]
        self._reason(verdict.reason)
        return [log]


def _raised(failure: Failure) -> Raised:
    return Raised(
        member=failure.member,
        step=failure.step,
        micro_batch=-1 if failure.micro_batch is None else failure.micro_batch,
        signature=failure.signature,
        traceback=failure.traceback,
    )


def _digested(worker: Worker) -> Digested:
    return Digested(member=worker.id, digest=worker.digest)


def _death(member: str, source: str, at_s: float, now: float) -> Log:
    return Log(event="death", fields={"member": member, "detected_by": source, "detected_s": at_s, "handled_s": now})


def describe_exit(exit_code: int) -> str:
    """ "with exit code 3", or "by signal 9"."""
    return f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
