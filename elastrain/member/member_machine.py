"""The step protocol of one member: a state machine without I/O and clock, `event -> commands`.

Compute, fold, reduce, commit, apply, publish; and after any change of view: report, complete the highest committed
step, resume. A driver carries the commands out in order and feeds the results back; the simulator and the worker's
engine are two drivers of the same class. docs/index.md follows one failure through it, tests/sim/transcripts shows it.

Here events and messages are routed to the parts, and what has become possible is done in its order. The rules are in
the parts; each that keeps the bits has a planted bug in tests/sim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from elastrain import protocol as p
from elastrain.job.checkpoint_plan import CheckpointPlan
from elastrain.job.placement import Placement
from elastrain.job.values import Record, Report, Shape
from elastrain.member.commit_rules import Committing
from elastrain.member.contract import MemberPart, handles, joined
from elastrain.member.copying import Copying
from elastrain.member.custody_rules import CustodyRules
from elastrain.member.ending import Ending
from elastrain.member.parts import Machine
from elastrain.member.recovering import Recovering
from elastrain.protocol import messages as said

_IN_RECOVERY = Report | said.AskPlan | said.TellPlan
"""Messages that are handled during a recovery."""


class MemberMachine(MemberPart):
    """The protocol core of one member.

    It passes each event to the part that handles it, and applies the rules after it.
    """

    def __init__(self, *, me: str, shape: Shape, checkpoints: CheckpointPlan | None = None) -> None:
        self.machine = Machine(me, shape, checkpoints or CheckpointPlan())
        self.copying = Copying(self.machine)
        self._committing = Committing(self.machine)
        self._recovering = Recovering(self.machine, self._committing)
        rules = (self._committing, self.copying, Ending(self.machine, self._committing))
        self._parts: tuple[MemberPart, ...] = (self, CustodyRules(self.machine), *self.machine.parts, *rules)
        self._handlers = joined((*get_args(p.Event), *get_args(said.Message)), self._parts)

    # ---------------------------------------------------------------------------------------------- for its driver

    def handle(self, event: p.Event) -> list[p.Command]:
        """Handle one event. The driver carries the returned commands out in order before the next event."""
        # A member that leaves will be out of the view soon. Later messages from it would be taken for those of a living
        # member.
        if self.machine.out.is_closed:
            return []
        self._take_in(event)
        self._progress()
        return self.machine.out.take()

    @property
    def shape(self) -> Shape:
        """Sizes and layout of the job, the same on all members."""
        return self.machine.shape

    @property
    def record(self) -> Record | None:
        """The newest record that this member holds; None before the first commit."""
        return self.machine.commit.record

    @property
    def step(self) -> int:
        """The open step."""
        return self.machine.step.number

    @property
    def holders(self) -> Placement:
        """The committed holders that are in this view."""
        return self.machine.commit.roles.live

    def why_not_yet(self) -> str:
        """Return why this member has not voted on the open step, or whose votes are missing if it has."""
        return self._committing.why_not_yet() or self._committing.missing_votes()

    def unreported(self) -> tuple[str, ...]:
        """Return the members of the view whose report is missing, though they should have answered at once."""
        return self.machine.views.unreported(is_newcomer=self.machine.loop.is_outside)

    # ------------------------------------------------------------------------------------------------------ events

    def _take_in(self, event: p.Event) -> None:
        self._handlers[type(event)].hear(event=event)

    @handles(p.Viewed)
    def on_viewed(self, event: p.Viewed) -> None:
        """Go on to the launcher's new view, if that cannot wait for the next commit."""
        if self.machine.views.on_view(event.view):
            self._switch()

    @handles(p.Began)
    def on_began(self, event: p.Began) -> None:
        """Note that the training loop has entered a step."""
        self.machine.loop.on_began(event)
        self.machine.checkpointing.on_began(event.step, event.state)

    @handles(p.Arrived)
    def on_arrival(self, event: p.Arrived) -> None:
        """Handle a message, keep it until it can be handled, or drop it because it is of an older view."""
        views, message = self.machine.views, event.message
        if views.is_stale(event):
            return
        # It is kept, because its sender has gone on and sends it only once.
        if views.is_ahead(event):
            views.hold(event)
            if views.is_left_behind():
                self._switch()
        elif not isinstance(message, _IN_RECOVERY) and (views.is_recovering or self._is_early(message)):
            views.put_off(event)
        else:
            self._handlers[type(message)].hear(source=event.source, message=message, payload=event.payload)

    def _is_early(self, message: said.Message) -> bool:
        # A member that got the last tracing pass earlier than this one may have computed for this member already.
        is_unplanned = isinstance(message, said.Boundary) and self.machine.step.tracing.awaits_plan
        return is_unplanned or self.machine.commit.is_ahead(message)

    @handles(said.Publish)
    def on_publish(self, message: said.Publish, payload: object) -> None:
        """Take published parameters, and pass the commit that they come from."""
        # It may come before the last vote. To learn of the commit is to pass it.
        if message.record is not None and message.step == self.machine.commit.step + 1:
            self._pass(message.record)
        self._committing.take_parameters(message, payload)

    def _replay(self) -> None:
        """Handle the messages that came too early. Some of them may be kept again."""
        # The whole list is taken, so messages that must wait again keep their order in the new list.
        for arrival in self.machine.views.take_waiting():
            if not self.machine.out.is_closed:
                self.on_arrival(arrival)

    # ------------------------------------------------------------------------------------------- one step to the next

    def _switch(self) -> None:
        self._recovering.switch()
        self._replay()

    def _pass(self, record: Record) -> None:
        """Pass a commit of this view, and go on to the next step, or first to the next view."""
        mine, before = self._committing.pass_step(record)
        # The record says that all members know the newer view, so all leave this one after the same step.
        if record.switch:
            self._switch()
        else:
            self._committing.open_next(record, mine, before)
            self._replay()

    def progress(self) -> bool:
        """Carry out a recovery, or the commit of the open step, if it has become possible. Returns True if it did."""
        return self._recover() or self._commit()

    def _recover(self) -> bool:
        """Carry out the recovery once all members have reported, and hand out the first step's plan if it is due."""
        may_decide = self.machine.views.may_decide() and self.machine.step.plan_fetch.has_plan()
        if may_decide and (decision := self._recovering.decide()) is not None:
            self._recovering.complete(decision)
            self._recovering.resume(decision)
            self._replay()
        if is_planned := self._recovering.plan_first():
            self._replay()
        return may_decide or is_planned

    def _commit(self) -> bool:
        record, has_changed = self._committing.decide()
        if record is not None:
            self._pass(record)
        return has_changed

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
        """Return the rule of each part. It does what has become possible, and returns True if it changed any state."""
        return [part.progress for part in self._parts]
