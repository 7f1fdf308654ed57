"""The step protocol of one member: a state machine without I/O and clock, `event -> commands`.

Compute, fold, reduce, commit, apply, publish; and after any change of view: report, complete the highest committed
step, resume. docs/index.md follows one failure through it. A driver carries the commands out in order and feeds the
results back; the simulator and the worker's engine are two drivers of the same class.

The layers below (standing, reduction, backing, checking, committing, leaving) do the step and the end; here are views,
messages, recovery and the training loop's side. The methods named `_may_…` and `_is_…` are the rules that keep the
bits; each has a planted bug in tests/sim.
"""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.leaving import Leaving
from elastrain.messages import (
    Ack,
    Copied,
    Digests,
    Doubt,
    EndsBefore,
    Evidence,
    GoesOn,
    Gradient,
    LoopHandover,
    Message,
    Partial,
    Publish,
    ShardCopy,
)
from elastrain.placement import target
from elastrain.recovery import decide
from elastrain.standing import NEVER
from elastrain.values import Recovery, Report, Unrecoverable, Vote
from elastrain.world import View


class Lifecycle(Leaving):
    """One member's part in the job."""

    # --------------------------------------------------------------------------------------------------- the one entry

    def handle(self, event: p.Event) -> list[p.Command]:
        """Take one event in; the commands are to be carried out in order before the next event."""
        if self._over:
            return []
        match event:
            case p.Viewed():
                self._on_view(event.view)
            case p.Arrived():
                self._on_arrival(event)
            case p.Began():
                self._on_began(event)
            case p.Ready():
                self._ready = True
                self._asked = self.begun
                self._go_on()
                self._end_run()
            case p.BlockDone():
                self._on_run_done(event)
            case p.Checked():
                self._on_checked(event)
            case p.GradientsFinished():
                self._on_finished(event)
            case p.AppliedBehind():
                self._on_applied_behind(event)
            case p.StatesDigested():
                self._on_digested(event)
            case p.ParametersDigested():
                self._on_parameters_digested(event)
            case p.UpdatedAgain():
                self._on_updated_again(event)
            case p.DigestedAgain():
                self._on_digested_again(event)
            case p.TookCopy():
                self._on_took_copy(event)
            case p.LoopEnded():
                self._finishing = event.step
            case p.CopyBudgetSet():
                self.copy_budget_bytes = event.parameters_bytes
            case p.JobEnded():
                self._let_go()
        self._progress()
        out, self._out = self._out, []
        return out

    # ----------------------------------------------------------------------------------------------------------- views

    def _on_view(self, view: View) -> None:
        if self.newest is not None and view.generation <= self.newest.generation:
            return
        if self.me not in view:
            if self.view is not None:  # a newcomer is not in the views before its own
                self._do(p.Leave(evicted=True))
                self._over = True
            return
        self.newest = view
        if self._must_switch_now(view) or self._is_left_behind():
            self._switch()

    def _must_switch_now(self, view: View) -> bool:
        """A view that only adds members waits for the commit whose record names it, for everyone alike."""
        return self.view is None or bool(set(self.view.ids) - set(view.ids))

    def _is_let_in_later(self) -> bool:
        """Whether this member waits to come in: only in the first view do all begin together."""
        return not self.entered and self.view is not None and self.view.generation > 1

    def _is_left_behind(self) -> bool:
        """One of this view has gone on to a view that this member knows: nothing can be committed here without it.

        A newcomer has not gone on, it begins there: its report waits for the commit that lets it in.
        """
        view, newest = self.view, self.newest
        assert view is not None
        assert newest is not None
        return any(view.generation < a.generation <= newest.generation and a.source in view for a in self._later)

    def _switch(self) -> None:
        """Stop reading anything of older generations, and say where this member stands."""
        assert self.newest is not None
        self.view = self.newest
        self.recovering = True
        self.attempt.forget_view()
        self._reports = {}
        self._copying.clear()
        self._followers.clear()
        for held in self.held.values():
            held.owed.clear()
            held.askers.clear()
        self._done.clear()
        self._going.clear()
        self._told.clear()
        self._broken.clear()
        self._forget_comparison()
        self._announced = False
        self._later = [a for a in self._later if not self._is_stale(a)]
        self._do(p.EditMesh(view=self.view))
        report = self._report()
        self._allowed = frozenset(report.pending[: report.fixed])
        self._reports[self.me] = report
        for member in self._others:
            self._send(member, report)
        self._replay_later()

    def _report(self) -> Report:
        attempt = self.attempt
        under_way = 1 if attempt.running is not None else 0
        return Report(
            committed=self.committed,
            record=self.record,
            base=self.base,
            parameters=tuple(self.parameters),
            held=tuple((s, h.version, self._gradients_of(s)) for s, h in sorted(self.held.items())),
            begun=self.begun if self.entered else -1,
            finishing=self._finishing is not None,
            pending=tuple(attempt.pending),
            fixed=min(len(attempt.pending), 1 + under_way),
            own=tuple(tuple(sorted(partials.nodes)) for partials in attempt.own),
            folded=tuple((s, lane, tuple(sorted(f.nodes))) for (s, lane), f in sorted(attempt.folds.items())),
        )

    def _gradients_of(self, shard: int) -> tuple[int, ...]:
        """Steps whose finished gradient is here, kept as a backup or folded as the primary."""
        folded = {self.attempt.step} if shard in self.attempt.finished else set()
        return tuple(sorted({*self.held[shard].kept, *folded}))

    # -------------------------------------------------------------------------------------------------------- messages

    def _is_stale(self, arrival: p.Arrived) -> bool:
        return self.view is not None and arrival.generation < self.view.generation

    def _on_arrival(self, arrival: p.Arrived) -> None:
        if self._is_stale(arrival):
            return
        if self.view is None or arrival.generation > self.view.generation:
            if self.newest is None or arrival.generation > self.newest.generation:
                self._do(p.ReadView(generation=arrival.generation))
            self._later.append(arrival)
            if self.view is not None and self._is_left_behind():
                self._switch()
        elif isinstance(arrival.message, Report):
            self._on_report(arrival.source, arrival.message)
        elif self._is_early(arrival.message):
            self._later.append(arrival)
        else:
            self._dispatch(arrival)

    def _is_early(self, message: Message) -> bool:
        """Whether the message belongs to a state that this member reaches later, on its own or by another message."""
        if self.recovering:
            return True
        match message:
            case Partial() | Gradient() | Ack() | Vote():
                return message.step > self.committed + 1
            case Digests() | ShardCopy() | Copied() | Doubt() | Evidence():
                return message.step > self.committed
            case _:
                return False

    def _replay_later(self) -> None:
        waiting, self._later = self._later, []
        for arrival in waiting:
            if not self._over:
                self._on_arrival(arrival)

    def _dispatch(self, arrival: p.Arrived) -> None:
        message, source = arrival.message, arrival.source
        match message:
            case Partial():
                self._on_partial(message, arrival.payload)
            case Gradient():
                self._on_gradient(source, message, arrival.payload)
            case Ack():
                if message.step == self.attempt.step:
                    for shard in message.shards:
                        self.attempt.acks.setdefault(shard, set()).add(source)
            case Vote():
                if message.step == self.attempt.step:
                    self.attempt.votes[source] = message
            case Publish():
                self._on_publish(message, arrival.payload)
            case Digests():
                self._on_digests(source, message)
            case ShardCopy():
                if message.step == self.committed:
                    self._do(
                        p.TakeCopy(
                            step=message.step,
                            shard=message.shard,
                            payload=arrival.payload,
                            source=source,
                            digest=message.digest,
                        )
                    )
            case Copied():
                self._on_copied(source, message)
            case Doubt():
                self._on_doubt(source, message)
            case Evidence():
                self._on_evidence(source, message)
            case LoopHandover():
                self._loop_state = (message.step, message.state, arrival.payload)
            case EndsBefore():
                self._done[source] = message.step
                self._go_on()
            case GoesOn():
                self._going[source] = message.step

    # -------------------------------------------------------------------------------------------------------- recovery

    def _on_report(self, source: str, report: Report) -> None:
        self._reports[source] = report

    def _may_decide(self) -> bool:
        """Reports of all members of the view: a missing one means the next view, never a guess."""
        return self.recovering and self.view is not None and set(self._reports) >= set(self.view.ids)

    def _recover(self) -> None:
        if not self._may_decide():
            return
        assert self.view is not None
        decision = decide(self.view, self._reports, self.shape)
        if isinstance(decision, Unrecoverable):
            if self._finishing is not None and self._may_leave_without_state():
                self._let_go()
            else:
                self._fail("StateLostError", decision.reason)
            return
        self._complete(decision)
        self._resume(decision)

    def unreported(self) -> tuple[str, ...]:
        """Members of the view who owe their report: those who are in it answer at once.

        Nobody owes it to a newcomer, in whose view the others are at the end of their step, however long that takes.
        """
        if not self.recovering or self.view is None or self._is_let_in_later():
            return ()
        return tuple(m for m in self.view.ids if m not in self._reports)

    def _may_leave_without_state(self) -> bool:
        """At the end of the job only parameters count: members that left in peace took their shards along."""
        return all(r.finishing and set(r.parameters) == {r.committed} for r in self._reports.values())

    def _complete(self, decision: Recovery) -> None:
        """Bring apply and publish of the highest committed step to their end, again where need be."""
        if self.committed < decision.committed:
            if self.base is not None and decision.record is not None:
                self._pass(decision.record)
            else:
                self._arrive(decision)
        assert self.view is not None
        self.base, self.now = decision.base, decision.now
        self.goal = target(self.now, self.shape.sizes, self.view.nodes, self.shape.backups)
        self._plan_copies()
        for shard in sorted(set(self.held)):
            if self.me not in self.now[shard].all:
                self._drop(shard)
        for shard in sorted(self.bound - set(self._mine())):  # before the first commit, holders may change places
            self.bound.discard(shard)
            self._do(p.Unbind(shard=shard))
        for shard in self._mine():
            self._take_over(shard, decision)
        self._publish_lacking(decision)
        self._compute_unverified(decision)

    def _arrive(self, decision: Recovery) -> None:
        self.record, self.committed = decision.record, decision.committed
        self._missing = None
        self._forget_comparison()
        self.attempt = self._new_attempt(decision.committed + 1)

    def _take_over(self, shard: int, decision: Recovery) -> None:
        """Make the state of the highest committed step in the model's own memory, as the shard's primary."""
        held = self._held(shard)
        if held.version == NEVER and self.committed < 0:  # it is created when the initial parameters are here
            return
        if shard in self.bound and held.version == self.committed:
            return
        if held.version == self.committed:
            self._bind(shard)
        else:
            assert decision.record is not None
            touched = {shard: held.kept[self.committed].touched}
            self._replace_parameters(shard, p.Apply(record=decision.record, shards=(shard,), touched=touched))
            self._applied(shard)

    def _publish_lacking(self, decision: Recovery) -> None:
        assert self.view is not None
        if self.committed < 0:
            if self.me == decision.source:
                self.parameters = [-1] * len(self.parameters)
                self._missing = None
                self._publish(dict(decision.lacking), None)
            return
        mine = set(self._mine())
        wanted = {m: tuple(s for s in lacking if s in mine) for m, lacking in decision.lacking.items()}
        self._publish(wanted, decision.record)

    def _compute_unverified(self, decision: Recovery) -> None:
        mine = self._mine()
        if self.committed >= 0:
            unverified = frozenset().union(*decision.unverified.values())
            self._compute_digests([s for s in mine if s in unverified], mine, self.now)

    def _resume(self, decision: Recovery) -> None:
        """Survivors' partials stay valid; only what nobody has is computed again."""
        assert self.view is not None
        attempt = self.attempt
        attempt.hand(decision.runs[self.me])
        if decision.redone == self.shape.runs:  # nobody has begun
            self._plan_checks(decision.runs, decision.newcomers)
        mine = set(self._mine())
        for key in [key for key in attempt.folds if key[0] not in mine]:
            del attempt.folds[key]
        for shard in mine:
            kept = self.held[shard].kept.get(attempt.step) if shard in self.held else None
            if kept is not None and shard not in attempt.finished:
                attempt.finished[shard] = kept
        self.recovering = False
        self._newcomers = decision.newcomers if decision.donor == self.me else ()
        self._do(p.Resumed(view=self.view, recovery=decision))
        for block, node in sorted(attempt.sent):
            self._deliver(block, node, dict(decision.folded))
        self._forward_gradients([s for s in sorted(mine) if s in attempt.finished])
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self._on_run_done(event)
        self._deliver_unsent()
        self._ask_again()
        self._replay_later()

    # ---------------------------------------------------------------------------------------- the training loop's side

    def _on_began(self, event: p.Began) -> None:
        self.begun = event.step
        self.entered = True
        self._settings = event.settings
        self._loop_state = (event.step, event.state, None)

    def _end_run(self) -> None:
        attempt = self.attempt
        if attempt.running is not None:
            attempt.end(attempt.running)

    def _progress(self) -> None:
        """Whatever has become possible, in an order that cannot matter for the result."""
        before = -1
        while not self._over and before != len(self._out):
            before = len(self._out)
            self._recover()
            self._create()
            self._pay_loop_state()
            self._finish_folds()
            self._compare_parameters()
            self._vote()
            self._commit()
            self._rebalance()
            self._enter()
            self._feed()
            self._say_done()
            self._judge_end()
            self._leave()

    def _create(self) -> None:
        """The job starts: every holder makes the initial state of its shards, once the parameters are here."""
        if self.recovering or self.committed >= 0 or not self._parameters_are_here():
            return
        fresh = tuple(s for s, h in enumerate(self.now) if self.me in h.all and self._held(s).version == NEVER)
        if fresh:
            bound = tuple(s for s in fresh if self.now[s].primary == self.me)
            self.bound.update(bound)
            for shard in fresh:
                self._held(shard).version = -1
            self._do(p.Create(shards=fresh, bound=bound))
            self._acknowledge(fresh)
        if not self._announced:
            self._announced = True
            self._compute_digests((), self._mine(), self.now)

    def _pay_loop_state(self) -> None:
        if self._newcomers and not self.recovering and self.begun == self.committed + 1:
            assert self._loop_state is not None
            for member in self._newcomers:
                self._send(member, LoopHandover(step=self.begun, state=self._loop_state[1]))
            self._newcomers = ()

    def _enter(self) -> None:
        if self.entered or self.recovering or not self._parameters_are_here():
            return
        step = self.committed + 1
        if step == 0 or (self._loop_state is not None and self._loop_state[0] == step):
            self.entered = True
            _, state, payload = self._loop_state or (step, None, None)
            self._do(p.Enter(step=step, state=state, payload=payload))

    def _feed(self) -> None:
        """Give the training loop its next run, or let it leave the step. It goes on computing during a recovery."""
        if not self._ready or not self._parameters_are_here():
            return
        if self.record is not None and self.begun == self.committed:
            self._ready = False
            self._do(p.Advance(record=self.record))
            return
        todo = [r for r in self.attempt.pending if not self.recovering or r in self._allowed]
        if self.begun == self.attempt.step and todo:
            self._ready = False
            self._compute(todo[0])
        elif self.begun == self.attempt.step and not self.recovering and (run := self._to_check()) is not None:
            self._ready = False
            self._recompute(run)

    def _compute(self, run: int) -> None:
        attempt = self.attempt
        attempt.running = run
        is_probe = attempt.probes.get(self.me) == run
        if is_probe:
            attempt.awaited.add(run)
        self._do(p.Compute(step=attempt.step, run=run, loss_scale=self._scaler().scale, probed=is_probe))
