"""What the agent decides: a state machine over workers, nodes, views and faults. Events in, commands out.

Each method takes an event and the time `now` (monotonic seconds) and returns commands for the agent to carry out, in
order. No socket, process, file or clock may come in here.

In layers, a file each: `roll` (what is known), `requests` (faults), `ending`, `parking`, `viewing`, `joining`,
`losing`.
"""

from __future__ import annotations

from elastrain.agent_messages import (
    Diverged,
    Failed,
    Finished,
    FromWorker,
    Hello,
    LostState,
    NoRoom,
    Note,
    Progress,
    Struck,
    Suspect,
)
from elastrain.errors import ConfigError
from elastrain.launcher.faults import make_fault
from elastrain.launcher.losing import Losing
from elastrain.launcher.notices import Ask, Beat, Digested, Ended, Exited, Left, Notice, Over, Raised, Suspected
from elastrain.launcher.roll import MEET, RESTART, WARM_UP
from elastrain.launcher.values import Command, FullPriority, Kill, KillNode, Log, PutBegun, Worker


class Core(Losing):
    """See the module's docstring."""

    def on_message(self, member: str, message: FromWorker, now: float) -> list[Command]:
        """A worker spoke. Words of a worker that is gone are still heard where they tell why."""
        worker = self.workers[member]
        if self.end is not None:
            return [Log(event="note", fields={"member": member, **message.fields})] if isinstance(message, Note) else []
        match message:
            case Hello():
                return self._on_hello(worker, message, now)
            case Suspect():
                return self._on_suspect(worker, message, now)
            case Progress():
                return self._on_progress(worker, message, now)
            case Failed():
                return self._on_failed(worker, message, now)
            case LostState() if self.view is None or member not in self.view:
                return [Log(event="note", fields={"member": member, "reason": message.sentence})]
            case LostState() | Diverged() | NoRoom():
                return self._finish(1, message.sentence)
            case Finished():
                return self._on_finished(worker, message, now)
            case Struck():
                armed, node = self.config.armed, self.config.node
                return [KillNode(reason=f"node {node} is killed on request")] if armed else []
            case Note():
                return [Log(event="note", fields={"member": member, **message.fields})]

    def on_notice(self, node: str, notice: Notice, now: float) -> list[Command]:
        """Another agent spoke."""
        match notice:
            case Beat():
                return []
            case Exited():
                return self._lost_elsewhere([notice.member], f"notice of {node}", now, now)
            case Raised():
                return self._on_raised_elsewhere(notice, now)
            case Suspected():
                return self._suspect(notice.member, notice.by, notice.reason, now)
            case Ended():
                return self._on_ended(now)
            case Digested():
                return self._compare(notice.member, notice.digest)
            case Left():
                return self.on_left(node)
            case Over():
                return self._on_over(notice)
            case Ask():
                return self._on_ask(notice)

    def on_left(self, node: str) -> list[Command]:
        """The notice says so, or the store: a node may go before its agent and this one have met."""
        if node in self.nodes:
            self._left.add((node, self.nodes[node].record.incarnation))
        return self._look_at_digests_again()

    def on_begun(self) -> list[Command]:
        """The store says that a step has been committed."""
        self.begun = True
        return []

    def on_tick(self, now: float) -> list[Command]:
        """Some deadline may have passed."""
        due = [name for name, deadline_s in self._deadlines_s.items() if deadline_s <= now]
        commands: list[Command] = []
        for name in due:
            if self._deadlines_s.pop(name, None) is not None:
                commands += self._on_deadline(name, now)
        return commands

    def _on_deadline(self, name: str, now: float) -> list[Command]:
        match name:
            case "rendezvous":
                return self._on_rendezvous_timeout()
            case "last call":
                return self._try_roster(now, last_call_is_over=True)
            case "join":
                return self._on_join_timeout()
            case "suspicion":
                return self._end_a_suspect(now)
            case "silence":
                return self._on_silence(now)
            case "ask again":
                return self._settle(now)
            case "parked":
                return self._on_parked_too_long()
            case "digests":
                return self._on_digests_late()
        if name.startswith(MEET):
            return self._on_never_met(name.removeprefix(MEET), now)
        if name.startswith(RESTART):
            self.restarts_used -= 1
            return []
        if name.startswith(WARM_UP):
            return [FullPriority(member=name.removeprefix(WARM_UP))]
        self.workers[name].ended_by_us = True
        return [Kill(member=name, reason=f"{name} should have ended by now")]

    def _on_progress(self, worker: Worker, message: Progress, now: float) -> list[Command]:
        first = worker.step is None
        if worker.step is not None and message.step <= worker.step:
            worker.redone_steps += worker.step - message.step + 1
        worker.step = message.step
        if self.step is None or message.step > self.step:
            self.step, self.loss, self.samples = message.step, message.loss, message.samples
        worker.holders = message.holders if message.holders is not None else worker.holders
        if first and worker.replaces:
            self._deadlines_s[RESTART + worker.replaces] = now + self.config.restart_counts_s
        begins: list[Command] = [] if self.begun else [PutBegun()]
        self.begun = True
        slower: list[Command] = [FullPriority(member=worker.id)] if worker.goes_ahead else []
        worker.goes_ahead = False
        # From now on this agent knows who holds what: a loss may have waited for that.
        return begins + slower + (self._settle(now) if first else [])

    def _on_ask(self, ask: Ask) -> list[Command]:
        try:
            fault = make_fault(ask.kind, ask.target, ask.at or None)
        except ConfigError as error:
            return [Log(event="fault_refused", fields={"reason": str(error)})]
        sentence, taken, commands = self.inject(fault)
        return commands if taken else [Log(event="fault_refused", fields={"reason": sentence})]
