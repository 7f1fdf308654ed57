"""The step protocol of one member: a state machine without I/O and clock, `event -> commands`.

Compute, fold, reduce, commit, apply, publish; and after any change of view: report, complete the highest committed
step, resume. A driver carries the commands out in order and feeds the results back; the simulator and the worker's
engine are two drivers of the same class. docs/index.md follows one failure through it, tests/sim/transcripts shows it.

Here events and messages are routed to the parts, and what has become possible is done in its order. The rules are in
the parts; each that keeps the bits has a planted bug in tests/sim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastrain import protocol as p
from elastrain.job.checkpoint_plan import CheckpointPlan
from elastrain.job.placement import Placement
from elastrain.job.values import Record, Report, Shape, Vote
from elastrain.member.commit_rules import Committing
from elastrain.member.copying import Copying
from elastrain.member.ending import Ending
from elastrain.member.parts import Machine
from elastrain.member.recovering import Recovering
from elastrain.protocol import messages as said


class MemberMachine:
    """One member's part in the job."""

    def __init__(self, *, me: str, shape: Shape, checkpoints: CheckpointPlan | None = None) -> None:
        self.machine = Machine(me, shape, checkpoints or CheckpointPlan())
        self.copying = Copying(self.machine)
        self._committing = Committing(self.machine)
        self._recovering = Recovering(self.machine, self._committing)
        self._ending = Ending(self.machine, self._committing)

    # ---------------------------------------------------------------------------------------------- for its driver

    def handle(self, event: p.Event) -> list[p.Command]:
        """Take one event in; the commands are to be carried out in order before the next event."""
        # A member that leaves is out of the view soon: what it still said would be taken for a living member's word.
        if self.machine.out.is_closed:
            return []
        self._take_in(event)
        self._progress()
        return self.machine.out.take()

    @property
    def shape(self) -> Shape:
        return self.machine.shape

    @property
    def record(self) -> Record | None:
        """The newest record that this member holds; None before the first commit."""
        return self.machine.commit.record

    @property
    def step(self) -> int:
        """The step that is being tried."""
        return self.machine.step.number

    @property
    def holders(self) -> Placement:
        """The committed holders that are in this view."""
        return self.machine.commit.roles.live

    def unreported(self) -> tuple[str, ...]:
        """Members of the view for whose report this one waits, though they should have answered at once."""
        return self.machine.views.unreported(is_newcomer=self.machine.loop.is_outside)

    # ------------------------------------------------------------------------------------------------------ events

    def _take_in(self, event: p.Event) -> None:
        m = self.machine
        match event:
            case p.Viewed():
                if m.views.on_view(event.view):
                    self._switch()
            case p.CommitAllowed():
                m.views.may_commit = True
            case p.Arrived():
                self._on_arrival(event)
            case p.BlockDone():
                m.step.reduction.on_block_done(event)
            case p.Computed():
                m.step.tasks.on_computed(event)
            case p.Traced():
                m.step.tracing.on_traced(event)
            case p.Began():
                m.loop.on_began(event)
                m.checkpointing.on_began(event.step, event.state)
            case p.Ready():
                m.loop.on_ready(event)
                m.end.on_asked(m.loop.step)
            case p.LoopEnded():
                m.loop.on_ended(event)
                self._ending.end_loop(event.step)
            case p.JobEnded():
                m.end.let_go()
            case p.InitialRead():
                m.custody.initial.on_read(event)
            case p.CopyBudgetSet():
                m.custody.given.budget_bytes, m.end.has_room_for_all = event.parameters_bytes, event.has_room_for_all
            case p.CheckpointWanted():
                m.checkpointing.on_wanted(event)
            case p.CopiesAllowed():
                self.copying.copy(event.parameters_bytes)
            case _:
                self._on_result(event)

    def _on_result(self, event: p.Event) -> None:
        """What came of a command."""
        m, custody = self.machine, self.machine.custody
        match event:
            case p.GradientsFinished():
                m.step.reduction.on_finished(event)
                if event.step == m.step.number:
                    custody.repair.on_lanes_damaged(event.damaged)
            case p.PartialDamaged() if event.step == m.step.number:
                m.step.reduction.on_damaged(event)
                custody.repair.on_damaged(event, m.shape.shards[event.shard].lanes[event.lane])
            case p.GradientsKept():
                custody.on_gradients_kept(event)
            case p.PartialChecked():
                custody.repair.on_partial_checked(event)
            case p.Checked():
                (m.step.audits if event.whole else m.step.check).on_checked(event)
            case p.AppliedBehind():
                custody.backups.on_applied_behind(event)
            case p.UpdatedAgain():
                custody.backups.on_updated_again(event)
            case p.UpdateTried():
                custody.doubts.on_tried(event)
            case p.StatesDigested():
                custody.announcements.on_digested(event)
            case p.ParametersDigested():
                custody.comparison.on_digested(event)
            case p.DigestedAgain():
                custody.doubts.on_digested_again(event)
            # A recovery decides anew who is to have copies: one that was taken meanwhile is not counted.
            case p.TookCopy() if not m.views.is_recovering:
                custody.taken.on_taken(event)
            case p.PartWritten():
                m.checkpointing.on_part_written(event)
            case p.ManifestWritten():
                m.checkpointing.on_manifest_written(event)

    # ---------------------------------------------------------------------------------------------------- messages

    def _on_arrival(self, arrival: p.Arrived) -> None:
        views = self.machine.views
        if views.is_stale(arrival):
            return
        # Held and not dropped: its sender has gone on, and says it once.
        if views.is_ahead(arrival):
            views.hold(arrival)
            if views.is_left_behind():
                self._switch()
        elif isinstance(arrival.message, Report):
            views.reports[arrival.source] = arrival.message
        elif views.is_recovering or self._is_early(arrival.message):
            views.put_off(arrival)
        else:
            self._on_message(arrival)

    def _is_early(self, message: said.Message) -> bool:
        # Who has heard of the last tracing pass before this member may have computed for it already.
        is_unplanned = isinstance(message, said.Boundary) and self.machine.step.tracing.awaits_plan
        return is_unplanned or self.machine.commit.is_ahead(message)

    def _on_message(self, arrival: p.Arrived) -> None:
        """A message of this view, for the parts that keep the step and its end."""
        m, source, message = self.machine, arrival.source, arrival.message
        match message:
            case said.Partial():
                m.step.reduction.on_partial(source, message, arrival.payload)
            case said.Boundary():
                m.step.tasks.on_boundary(message, arrival.payload)
            case said.HasTraced():
                m.step.tracing.on_told(source, message)
            case said.Ack():
                if message.step == m.step.number:
                    m.step.ballot.acknowledge(source, message.shards)
            case Vote():
                if message.step == m.step.number:
                    m.step.ballot.add(source, message)
            case said.Publish():
                # It may come before the last vote does: learning of the commit is passing it.
                if message.record is not None and message.step == m.commit.step + 1:
                    self._pass(message.record)
                self._committing.take_parameters(message, arrival.payload)
            case said.LoopHandover():
                m.loop.on_handover(message, arrival.payload)
            case said.PartReport():
                m.checkpointing.on_report(source, message)
            case said.WriteInstead():
                m.checkpointing.on_write_instead(message)
            case said.CheckpointOver():
                m.checkpointing.on_over(message)
            case said.EndsBefore():
                self._ending.on_ends_before(source, message)
            case said.TakeLast():
                self._ending.take_last(message.step)
            case said.HasAll():
                m.end.on_has_all(source, message.step)
            case said.GoesOn():
                m.end.on_goes_on(source, message.step)
            case _:
                self._on_custody(arrival)

    def _on_custody(self, arrival: p.Arrived) -> None:
        """A message of this view, for the parts that keep the shards."""
        custody, source, message = self.machine.custody, arrival.source, arrival.message
        match message:
            case said.Gradient():
                custody.backups.on_gradient(source, message, arrival.payload)
            case said.Digests():
                if message.step == self.machine.commit.step:
                    custody.comparison.tell(source, message.parameters)
                custody.backups.on_digests(source, message)
            case said.ShardCopy():
                custody.taken.on_copy(source, message, arrival.payload)
            case said.Copied():
                custody.given.on_copied(source, message)
            case said.Doubt():
                custody.doubts.on_doubt(source, message)
            case said.Trial():
                custody.doubts.on_trial(source, message, arrival.payload)
            case said.Damaged():
                custody.repair.on_told_damaged(message)
            case said.Evidence():
                if message.step == self.machine.commit.step:
                    custody.on_evidence(source, message)

    def _replay(self) -> None:
        """Read what had come too early; some of it may still."""
        # Taken as a whole: what has to wait once more comes to the end of the new list, in its old order.
        for arrival in self.machine.views.take_waiting():
            if not self.machine.out.is_closed:
                self._on_arrival(arrival)

    # ------------------------------------------------------------------------------------------- one step to the next

    def _switch(self) -> None:
        self._recovering.switch()
        self._replay()

    def _pass(self, record: Record) -> None:
        """Pass a commit of this view: go on to the next step, or to the view that it is computed in."""
        mine, before = self._committing.pass_step(record)
        # All have seen the newer view, says the record: so all leave this one after the same step.
        if record.switch:
            self._switch()
        else:
            self._committing.open_next(record, mine, before)
            self._replay()

    def _recover(self) -> bool:
        """Carry out what follows from the reports of all members, and the plan of the first step."""
        may_decide = self.machine.views.may_decide()
        if may_decide and (decision := self._recovering.decide()) is not None:
            self._recovering.complete(decision)
            self._recovering.resume(decision)
            self._replay()
        if is_planned := self._recovering.plan_first():
            self._replay()
        return may_decide or is_planned

    # ---------------------------------------------------------------------------------------------------- progress

    def _progress(self) -> None:
        """Apply the rules until none of them changes anything. Their order does not matter for the result.

        A test applies them in other orders (tests/sim/test_rule_order.py).
        """
        has_changed = True
        while has_changed:
            has_changed = False
            for rule in self._rules():
                # A member that leaves or has failed must not act any more.
                if self.machine.out.is_closed:
                    return
                has_changed |= rule()

    def _rules(self) -> Sequence[Callable[[], bool]]:
        """Return the rules. Each does what has become possible, and returns True if it changed any state."""
        m = self.machine
        return (
            self._recover,
            self._committing.publish_looked,
            self._create,
            self._depart,
            m.loop.hand_over,
            m.step.reduction.finish,
            self.compare,
            self._committing.vote,
            self._commit,
            m.checkpointing.capture,
            self.copying.copy_at_last,
            m.loop.enter,
            self._feed,
            self._ending.go_on,
        )

    def _depart(self) -> bool:
        return self.machine.custody.repair.depart(spoils=self.machine.step.audits.is_convicted)

    def _feed(self) -> bool:
        # In the end blocks come that a task must not see appear.
        m = self.machine
        return (m.replicas.are_all or m.end.step is None) and m.loop.feed()

    def _create(self) -> bool:
        """Let the job start: every holder makes the initial state of its shards, once the parameters are here."""
        m = self.machine
        if m.views.is_recovering or not m.commit.is_initial:
            return False
        if not m.custody.initial.may_be_made():
            return m.custody.initial.read()
        created = m.custody.primaries.create(m.me)
        if m.views.others:
            # As it was made: whoever becomes its primary before the first commit has nothing else to hold it against.
            for shard in created:
                m.custody.comparison.look_at_own(shard)
        m.custody.initial.forget(created)
        m.custody.backups.acknowledge(created)
        return m.custody.announcements.announce_initial() or bool(created)

    def compare(self) -> bool:
        """Compare parameters once this member has computed all that it has to in a step."""
        # Not earlier: parameters that change between the comparison and the last run would be computed with unseen.
        custody = self.machine.custody
        is_due = custody.repair.is_due  # what is computed anew is compared then
        if is_due or self.machine.views.is_recovering or not self._has_computed():
            return False
        has_looked = custody.lone.look_again()
        return (custody.comparison.may_compare() and custody.comparison.go_on()) or has_looked

    def _has_computed(self) -> bool:
        m = self.machine
        return m.loop.step == m.step.number and (m.end.step is not None or m.step.is_done())

    def _commit(self) -> bool:
        record, has_changed = self._committing.decide()
        if record is not None:
            self._pass(record)
        return has_changed
