"""What the agent decides: a state machine over workers, views and faults. Events in, commands out.

Each method takes an event and the time `now` (monotonic seconds) and returns commands for the agent to carry out, in
order. No socket, process, file or clock may come in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastrain.launcher.faults import RANDOM, Fault
from elastrain.launcher.messages import Failed, Finished, Hello, LostState, Message, Note, Phase, Progress, Suspect
from elastrain.launcher.values import (
    Command,
    End,
    FullPriority,
    JobConfig,
    Kill,
    Log,
    Propose,
    PutSpec,
    Stage,
    Start,
    Tell,
    Worker,
)
from elastrain.membership import (
    Failure,
    Outcome,
    ends_job,
    first_view,
    may_restart,
    most_suspected,
    propose,
    spec_difference,
)
from elastrain.world import Member, View

_WARM_UP = "warm-up "


class Core:
    """Holds the state; see the module's docstring. `choose` picks one of several members for `member:random`."""

    def __init__(self, config: JobConfig, faults: Sequence[Fault], choose: Callable[[Sequence[str]], str]) -> None:
        self.config = config
        self.workers: dict[str, Worker] = {}
        self.view: View | None = None
        self.spec: Mapping[str, Any] | None = None
        self.holders: Mapping[str, Sequence[str]] = {}
        self.window = ""
        self.step: int | None = None
        self.loss: float | None = None
        self.samples: int | None = None
        self.restarts_used = 0
        self.end: End | None = None
        self.reasons: list[str] = []
        self._holders_step = -1
        self._choose = choose
        self._faults = list(faults)
        self._failures: list[Failure] = []
        self._suspicions: dict[str, set[str]] = {}
        self._deadlines_s: dict[str, float] = {}
        """"join", "suspicion", "warm-up MEMBER", or a member that must leave by itself -> monotonic time."""
        self._next_id = 0

    # ---- state that others read

    @property
    def committed(self) -> bool:
        return self.step is not None

    @property
    def steps_lost(self) -> int:
        """Committed steps that some member had to commit again."""
        return max((worker.redone_steps for worker in self.workers.values()), default=0)

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def next_deadline_s(self) -> float | None:
        return min(self._deadlines_s.values(), default=None)

    # ---- events

    def begin(self) -> list[Command]:
        return [self._new_worker(slot, rank=slot, initial=True) for slot in range(self.config.workers)]

    def on_message(self, member: str, message: Message, now: float) -> list[Command]:
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
                return self._on_progress(worker, message)
            case Phase():
                worker.phase = f"{message.phase} of step {message.step}"
                return []
            case Failed():
                return self._on_failed(worker, message, now)
            case LostState():
                return self._finish(1, message.sentence)
            case Finished():
                return self._on_finished(worker, message, now)
            case Note():
                return [Log(event="note", fields={"member": member, **message.fields})]

    def on_view(self, view: View) -> list[Command]:
        """The store holds this view now: ours, or one that was faster."""
        if self.view is not None and view.generation <= self.view.generation:
            return []
        first, self.view = self.view is None, view
        self._deadlines_s.pop("join", None)
        self._reason(f"generation {view.generation}: {view.reason}")
        commands: list[Command] = []
        members = [self.workers[m] for m in view.ids if m in self.workers]
        for worker in members:
            if worker.stage is Stage.READY:
                worker.stage = Stage.MEMBER
                if self._deadlines_s.pop(_WARM_UP + worker.id, None) is not None:
                    commands.append(FullPriority(member=worker.id))
        message = self._view_message(view)
        commands += [Tell(member=worker.id, message=message) for worker in members if worker.alive]
        fields = {"generation": view.generation, "members": list(view.ids), "reason": view.reason}
        commands.append(Log(event="view", fields=fields, say=_describe(view)))
        return commands + (self._arm_random() if first else [])

    def on_death(self, member: str, source: str, at_s: float, now: float) -> list[Command]:
        """Proof that the process is gone (`source`: mutex or pidfd), known at `at_s`. Its exit code may come later."""
        worker = self.workers[member]
        if not worker.alive:
            return []
        worker.stage = Stage.GONE
        self._suspicions.pop(member, None)
        self._deadlines_s.pop(member, None)
        self._deadlines_s.pop(_WARM_UP + member, None)
        fields = {"member": member, "detected_by": source, "detected_s": at_s, "handled_s": now}
        commands: list[Command] = [Log(event="death", fields=fields)]
        in_view = self.view is not None and member in self.view
        # Without others to go on, the exit code decides what this means; so it does before the first commit. And once
        # one has finished, nobody waits for anybody.
        if self.end is None and in_view and self.committed and not self._finishing() and self._alive_in_view():
            commands += self._edit_view()
        return commands

    def on_exit(self, member: str, exit_code: int, now: float) -> list[Command]:
        """The process is reaped; `on_death` came before. `exit_code` < 0 is minus the signal."""
        worker = self.workers[member]
        worker.exit_code = exit_code
        log: list[Command] = [Log(event="exit", fields={"member": member, "exit_code": exit_code})]
        if self.end is not None:
            return log
        if worker.surplus:
            return log + self._end_if_all_left()
        how = f"{member} ended {describe_exit(exit_code)}"
        if worker.finished:
            return log + self._on_peaceful_exit(worker, how)
        if exit_code != 0 and not self.committed:
            return log + self._finish(1, f"{how} before the first commit", self._last_traceback())
        if self.view is not None and not self._alive_in_view() and not self._finishing():
            return log + self._on_nobody_left(worker, how)
        return log + self._replace(worker, how, now) + self._end_if_all_left()

    def on_start_failed(self, member: str, problem: str) -> list[Command]:
        """The process could not even be started. The others can go on without it, unless it is one of the first."""
        worker = self.workers[member]
        worker.stage = Stage.GONE
        self._deadlines_s.pop(_WARM_UP + member, None)
        sentence = f"{member} could not be started: {problem}"
        if worker.initial:
            return self._finish(1, sentence)
        return [Log(event="start_failed", fields={"member": member, "reason": problem}, say=sentence)]

    def on_bad_message(self, member: str, problem: str) -> list[Command]:
        return [Kill(member=member, reason=f"{member} sent what no worker sends: {problem}")]

    def on_channel_closed(self, member: str, now: float) -> list[Command]:
        """Usually it is just ending; if not, a member that can not be told of views is of no use."""
        worker = self.workers[member]
        if self.end is None and worker.alive and not worker.finished:
            self._must_leave(worker, now + self.config.leave_timeout_s)
        return []

    def on_tick(self, now: float) -> list[Command]:
        """Some deadline may have passed."""
        due = [name for name, deadline_s in self._deadlines_s.items() if deadline_s <= now]
        commands: list[Command] = []
        for name in due:
            del self._deadlines_s[name]
            if name == "join":
                commands += self._on_join_timeout()
            elif name == "suspicion":
                commands += self._end_a_suspect()
            elif name.startswith(_WARM_UP):
                commands.append(FullPriority(member=name.removeprefix(_WARM_UP)))
            else:
                self.workers[name].ended_by_us = True
                commands.append(Kill(member=name, reason=f"{name} should have ended by now"))
        return commands

    def stop(self, code: int, sentence: str) -> list[Command]:
        """From outside: a signal, or a fault of the agent itself."""
        return self._finish(code, sentence)

    def inject(self, fault: Fault) -> tuple[str, bool, list[Command]]:
        """The operator asks for a fault: a sentence for the answer, whether it was taken, and what to do."""
        if not self.config.armed:
            return "this run is not armed: start it with --inject (or --faults FILE)", False, []
        if fault.member == RANDOM:
            candidates = [m for m in (self.view.ids if self.view else ()) if self._can_be_hit(m)]
            if not candidates:
                return "there is no member to choose from yet", False, []
            fault = Fault(kind=fault.kind, member=self._choose(candidates), step=fault.step, phase=fault.phase)
        worker = self.workers.get(fault.member)
        if worker is None or not worker.alive:
            alive = ", ".join(w.id for w in self.living)
            return f"there is no living member {fault.member}: there are {alive or 'none'}", False, []
        sentence = f"{fault} is on its way"
        log = Log(event="fault", fields=_fault_fields(fault))
        if fault.at_once:
            return sentence, True, [log, Kill(member=worker.id, reason=f"{worker.id} is killed on request")]
        if worker.stage is Stage.STARTING:
            self._faults.append(fault)
            # The event log shows it when it is handed over.
            return f"{fault} waits for {worker.id} to be ready", True, []
        return sentence, True, [log, Tell(member=worker.id, message=_fault_message(fault))]

    # ---- the parts

    def _on_hello(self, worker: Worker, hello: Hello, now: float) -> list[Command]:
        if worker.stage is not Stage.STARTING or hello.member != worker.id:
            return self.on_bad_message(worker.id, f"a hello of {hello.member} from {worker.id}, {worker.stage}")
        commands: list[Command] = []
        if self.spec is None:
            self.spec = dict(hello.spec)
            commands.append(PutSpec(spec=self.spec))
        difference = spec_difference(self.spec, hello.spec)
        if difference:
            return commands + self._refuse(worker, difference, now)
        worker.stage, worker.address = Stage.READY, hello.address
        commands.append(Log(event="ready", fields={"member": worker.id, "address": hello.address}))
        mine = [f for f in self._faults if f.member == worker.id]
        self._faults = [f for f in self._faults if f.member != worker.id]
        for fault in mine:
            commands.append(Log(event="fault", fields=_fault_fields(fault)))
            commands.append(Tell(member=worker.id, message=_fault_message(fault)))
        if self.view is not None:
            return commands + (self._edit_view() if not self._finishing() else [])
        # Counted from the first hello: a script that never says hello is a plain one and may run as long as it likes.
        self._deadlines_s.setdefault("join", now + self.config.join_timeout_s)
        initial = [w for w in self.workers.values() if w.initial]
        if all(w.stage is Stage.READY for w in initial):
            commands.append(Propose(view=first_view([self._as_member(w) for w in initial])))
        return commands

    def _refuse(self, worker: Worker, difference: str, now: float) -> list[Command]:
        worker.refused = True
        sentence = f"{worker.id} is refused: {difference}"
        commands: list[Command] = [
            Tell(member=worker.id, message={"type": "refused", "reason": sentence}),
            Log(event="refused", fields={"member": worker.id, "reason": difference}, say=sentence),
        ]
        if worker.initial:
            return commands + self._finish(1, sentence)
        self._must_leave(worker, now + self.config.leave_timeout_s)
        return commands

    def _on_suspect(self, by: Worker, message: Suspect, now: float) -> list[Command]:
        target = self.workers.get(message.member)
        if (
            target is None
            or not target.alive
            or target.finished
            or self.view is None
            or message.member not in self.view
        ):
            return []
        self._suspicions.setdefault(target.id, set()).add(by.id)
        # A death is proven within milliseconds; what is still alive after this time has lost its links, not its life.
        self._deadlines_s.setdefault("suspicion", now + self.config.suspicion_s)
        return [Log(event="suspect", fields={"member": target.id, "by": by.id, "reason": message.reason})]

    def _end_a_suspect(self) -> list[Command]:
        member = most_suspected(self.view, self._suspicions) if self.view is not None else None
        if member is None:  # its death has been proven meanwhile
            return []
        by = ", ".join(sorted(self._suspicions[member]))
        return [Kill(member=member, reason=f"{member} lives, but {by} can not reach it: it is ended and replaced")]

    def _on_progress(self, worker: Worker, message: Progress) -> list[Command]:
        if worker.step is not None and message.step <= worker.step:
            worker.redone_steps += worker.step - message.step + 1
        worker.step, worker.phase = message.step, ""
        if self.step is None or message.step > self.step:
            self.step, self.loss, self.samples = message.step, message.loss, message.samples
        if message.holders is not None and message.step >= self._holders_step:
            self.holders, self._holders_step = message.holders, message.step
        if message.window is not None:
            self.window = message.window
        return []

    def _on_failed(self, worker: Worker, message: Failed, now: float) -> list[Command]:
        failure = Failure(
            member=worker.id,
            step=message.step,
            micro_batch=message.micro_batch,
            signature=message.signature,
            traceback=message.traceback,
        )
        verdict = ends_job(failure, self._failures, committed=self.committed)
        self._failures.append(failure)
        fields = {"member": worker.id, "place": failure.place, "signature": failure.signature}
        log = Log(event="failed", fields={**fields, "traceback": failure.traceback}, say=verdict.reason)
        if verdict.yes:
            return [log, *self._finish(1, verdict.reason, failure.traceback)]
        self._reason(verdict.reason)
        self._must_leave(worker, now + self.config.leave_timeout_s)
        return [log]

    def _on_finished(self, worker: Worker, message: Finished, now: float) -> list[Command]:
        first = not self._finishing()
        worker.finished, worker.digest = True, message.digest
        if worker.alive:
            worker.stage = Stage.FINISHED
        commands: list[Command] = [
            Log(event="finished", fields={"member": worker.id, "step": message.step, "digest": message.digest})
        ]
        if first:  # it leaves in peace, so all have the last step: nobody needs to wait for anybody any more
            commands += [Tell(member=other.id, message={"type": "ended"}) for other in self.living]
        if self.view is not None and not self._unfinished(self.view):
            for member in self._alive_in_view():
                self._must_leave(self.workers[member], now + self.config.exit_timeout_s)
        return commands

    def _on_peaceful_exit(self, worker: Worker, how: str) -> list[Command]:
        if worker.exit_code != 0 and not worker.ended_by_us:
            return self._finish(1, f"{how} after it had finished its work")
        if self.view is not None and not self._unfinished(self.view):
            return self._end_late_joiners() + self._end_if_all_left()
        return self._end_if_all_left()

    def _end_late_joiners(self) -> list[Command]:
        commands: list[Command] = []
        for other in self.living:
            if not other.finished and not other.surplus:
                other.surplus = True
                commands.append(Kill(member=other.id, reason=f"{other.id} has nothing left to join"))
        return commands

    def _on_nobody_left(self, worker: Worker, how: str) -> list[Command]:
        """The last living member of the view ended without having finished."""
        if worker.exit_code == 0:
            return self._end_late_joiners() + self._end_if_all_left()
        if self._failures and self._failures[-1].member == worker.id:
            how = f"the script raised on {worker.id} at {self._failures[-1].place}"
        return self._finish(1, f"{how}, and no other member was left: the state is gone", self._last_traceback())

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
            self.restarts_used += 1
            start = self._new_worker(worker.slot, rank=len(self._alive_in_view()), initial=False)
            self._deadlines_s[_WARM_UP + start.member] = now + self.config.warm_up_s
            say = f"{how}; started again as {start.member} ({verdict.reason})"
            return [start, Log(event="restart", fields={"member": start.member, "of": worker.id}, say=say)]
        fields = {"member": worker.id, "reason": verdict.reason}
        say = "" if self.view is None else f"{how}; not started again: {verdict.reason}"
        log = Log(event="no_restart", fields=fields, say=say)
        in_old_view = self.view is not None and worker.id in self.view and not self._finishing()
        return [log, *(self._edit_view() if in_old_view else [])]

    def _end_if_all_left(self) -> list[Command]:
        if self.living:
            return []
        if self._finishing():
            return self._finish(0, f"finished after step {self.step}")
        return self._finish(0, "every worker's script has ended")

    def _edit_view(self) -> list[Command]:
        assert self.view is not None
        proposal = propose(
            self.view,
            holders=self.holders,
            dead=[m for m in self.view.ids if not self.workers[m].alive],
            joining=[self._as_member(w) for w in self.workers.values() if w.stage is Stage.READY],
        )
        if proposal.view is not None:
            return [Propose(view=proposal.view)]
        if proposal.outcome is Outcome.LOST:
            return self._finish(1, proposal.reason, self._last_traceback())
        return []

    def _must_leave(self, worker: Worker, deadline_s: float) -> None:
        self._deadlines_s.setdefault(worker.id, deadline_s)

    def _on_join_timeout(self) -> list[Command]:
        waiting = ", ".join(w.id for w in self.workers.values() if w.initial and w.stage is not Stage.READY)
        ready = sum(w.stage is Stage.READY for w in self.living)
        return self._finish(
            1,
            f"{ready} of {self.config.workers} workers were ready within {self.config.join_timeout_s:g} s of the "
            f"first; missing: {waiting}. See their output, or raise --join-timeout",
        )

    def _finish(self, code: int, sentence: str, detail: str = "") -> list[Command]:
        if self.end is not None:
            return []
        self.end = End(code=code, sentence=sentence, detail=detail)
        self._deadlines_s.clear()
        self._reason(sentence)
        return [self.end]

    def _arm_random(self) -> list[Command]:
        waiting, self._faults = self._faults, []
        commands: list[Command] = []
        for fault in waiting:
            if fault.member == RANDOM:
                commands += self.inject(fault)[2]
            else:
                self._faults.append(fault)
        return commands

    def _new_worker(self, slot: int, *, rank: int, initial: bool) -> Start:
        member = f"m{self._next_id}"
        self._next_id += 1
        self.workers[member] = Worker(id=member, slot=slot, initial=initial)
        return Start(member=member, slot=slot, rank=rank, restarts=self.restarts_used, warm_up=not initial)

    def _as_member(self, worker: Worker) -> Member:
        return Member(id=worker.id, node=self.config.node, address=worker.address)

    def _alive_in_view(self) -> list[str]:
        return [m for m in (self.view.ids if self.view else ()) if self.workers[m].alive]

    def _unfinished(self, view: View) -> list[str]:
        return [m for m in view.ids if self.workers[m].alive and not self.workers[m].finished]

    def _finishing(self) -> bool:
        return any(worker.finished for worker in self.workers.values())

    def _can_be_hit(self, member: str) -> bool:
        return self.workers[member].stage is Stage.MEMBER

    def _view_message(self, view: View) -> dict[str, Any]:
        return {
            "type": "view",
            "generation": view.generation,
            "members": [{"id": m.id, "node": m.node, "address": m.address} for m in view.members],
            "reason": view.reason,
            "holders_known": bool(self.holders),
        }

    def _last_traceback(self) -> str:
        return self._failures[-1].traceback if self._failures else ""

    def _reason(self, text: str) -> None:
        self.reasons = [*self.reasons, text][-8:]


def describe_exit(exit_code: int) -> str:
    """ "with exit code 3", or "by signal 9"."""
    return f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"


def _describe(view: View) -> str:
    return f"generation {view.generation}: {view.reason}; members {' '.join(view.ids)}"


def _fault_message(fault: Fault) -> dict[str, Any]:
    return {"type": "fault", "class": fault.kind, "step": fault.step, "phase": fault.phase}


def _fault_fields(fault: Fault) -> dict[str, Any]:
    return {"class": fault.kind, "member": fault.member, "step": fault.step, "phase": fault.phase}
