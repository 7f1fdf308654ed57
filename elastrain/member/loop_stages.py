"""Stages of the training loop, and the commands that it gets next.

The loop computes in a thread of its own. It asks (`Ready`) and gets one of `Compute`, `Recompute`, `Forward`,
`Backward`, `WeightGradients` and `Advance`. It goes on computing during a recovery.
A loop on a device asks for its next run (`Submitted`) while its present one still lands, which `Ready` tells later.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

from elastrain import protocol as p
from elastrain.job.values import Recovery
from elastrain.member.contract import MemberPart, handles
from elastrain.member.job_end import JobEnd
from elastrain.member.open_step import OpenStep
from elastrain.member.pipeline.assignments import action_of
from elastrain.member.pipeline.replicas import Replicas
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.member.state.runs import OUTSTANDING_MOST
from elastrain.protocol.messages import LoopHandover


class LoopStage(Enum):
    """Stage of the training loop."""

    OUTSIDE = "outside"  # it may not begin yet: parameters or the loop's state are still to come
    ENTERING = "entering"  # it was given the step at which it begins
    BODY = "body"  # in a step, before its micro-batches: the script may still read the parameters of the last one
    WAITING = "waiting"  # it has asked for work and computes nothing
    COMPUTING = "computing"  # it was given a run, of which not everything is submitted
    WARMING = "warming up"  # it has nothing to do, and computes blocks on zeros that are coming to this member
    LEAVING = "leaving"  # the step is committed, the body goes on to the next one
    ENDED = "ended"


TABLE: dict[tuple[LoopStage, type], LoopStage] = {
    (LoopStage.OUTSIDE, p.Enter): LoopStage.ENTERING,
    (LoopStage.ENTERING, p.Began): LoopStage.BODY,
    (LoopStage.BODY, p.Ready): LoopStage.WAITING,
    (LoopStage.WAITING, p.Compute): LoopStage.COMPUTING,
    (LoopStage.WAITING, p.Recompute): LoopStage.COMPUTING,
    (LoopStage.WAITING, p.Forward): LoopStage.COMPUTING,
    (LoopStage.WAITING, p.Backward): LoopStage.COMPUTING,
    (LoopStage.WAITING, p.WeightGradients): LoopStage.COMPUTING,
    (LoopStage.WAITING, p.WarmUp): LoopStage.WARMING,
    (LoopStage.WARMING, p.Ready): LoopStage.WAITING,
    (LoopStage.COMPUTING, p.Ready): LoopStage.WAITING,
    (LoopStage.COMPUTING, p.Submitted): LoopStage.WAITING,
    (LoopStage.WAITING, p.Advance): LoopStage.LEAVING,
    (LoopStage.LEAVING, p.Began): LoopStage.BODY,
    (LoopStage.BODY, p.LoopEnded): LoopStage.ENDED,
}
"""(stage, event of the loop or command to it) -> next stage. A missing pair means that the driver is wrong."""


class LoopStages(MemberPart):
    """Part that owns the loop's stage and step, and the state with which newcomers' loops begin."""

    def __init__(
        self, views: Views, commit: Commit, open_step: OpenStep, replicas: Replicas, end: JobEnd, out: Commands
    ) -> None:
        self.stage = LoopStage.OUTSIDE
        self.step = -1
        """Newest step that the loop has entered."""
        self.settings = ""
        """The script's settings for this step, as the vote carries them."""
        self._views, self._commit, self._open = views, commit, open_step
        self._replicas, self._end, self._out = replicas, end, out
        self._allowed: frozenset[int] = frozenset()
        """Runs that the loop may get during a recovery.

        They were reported as under way, so no other member gets them.
        """
        self._state: tuple[int, str, Any] | None = None
        """(step, state of the loop at its start, tensors that came with it). It is this member's own, or a donor's."""
        self._newcomers: tuple[str, ...] = ()
        """Newcomers to which this member has to send the loop's state."""

    def _move(self, cause: object) -> None:
        stage = TABLE.get((self.stage, type(cause)))
        if stage is None:
            raise ValueError(f"the training loop is {self.stage.value}, so {type(cause).__name__} is out of order")
        self.stage = stage

    # ------------------------------------------------------------------------------------------------------- events

    def on_began(self, event: p.Began) -> None:
        """Note that the loop has entered a step, and with which state."""
        self._move(event)
        self.step = event.step
        self.settings = event.settings
        self._state = (event.step, event.state, None)

    @handles(p.Submitted)
    def on_submitted(self, event: p.Submitted) -> None:
        """Note that the loop asks for work while its device computes the run that it was given."""
        self._move(event)
        self._open.runs.submit()

    def on_ready(self, event: p.Ready) -> None:
        """Note that the oldest run has ended, and that the loop asks for work unless it has asked before."""
        if not self._open.runs.end_running().is_submitted:
            self._move(event)

    def on_ended(self, event: p.LoopEnded) -> None:
        """Note that the loop has ended."""
        self._move(event)

    @handles(LoopHandover)
    def on_handover(self, message: LoopHandover, payload: object) -> None:
        """Keep the state that another member's loop has sent to this newcomer."""
        self._state = (message.step, message.state, payload)

    # ----------------------------------------------------------------------------------------------------- questions

    def has_asked_in(self, step: int) -> bool:
        """Return True if the loop has asked for micro-batches of `step`. The script reads no older parameters then."""
        asked = (LoopStage.WAITING, LoopStage.COMPUTING, LoopStage.WARMING, LoopStage.LEAVING)
        return self.step == step and self.stage in asked

    @property
    def state(self) -> str:
        """The state with which the loop entered its step, or ended before it."""
        return self._state[1] if self._state is not None else ""

    @property
    def is_outside(self) -> bool:
        """True while the loop may not begin yet."""
        return self.stage is LoopStage.OUTSIDE

    @property
    def is_computing(self) -> bool:
        """True while the loop, or its device, computes a run or task."""
        return bool(self._open.runs.outstanding)

    # --------------------------------------------------------------------------------------------- changes of view

    def forget_view(self) -> None:
        """Note the runs that the loop may still get during the recovery."""
        # The report says the same: other members get all runs that are not under way here.
        self._allowed = frozenset(self._open.runs.pending[: self._open.runs.under_way])

    def why_not_yet(self) -> str:
        """Wait until the loop asks for work in the open step. A script may read the old parameters until then."""
        # A commit may free the memory of blocks that do not come after all.
        if self.stage is LoopStage.WARMING:
            return "the training loop warms up blocks that are coming to this member"
        step = self._open.number
        return "" if self.has_asked_in(step) else f"the training loop has not asked for work in step {step} yet"

    def resume(self, recovery: Recovery) -> None:
        """Note the newcomers to which this member has to send the loop's state."""
        # Only the donor sends the state. Otherwise several members would send the same megabytes.
        self._newcomers = recovery.newcomers if recovery.donor == self._views.me else ()

    def progress(self) -> bool:
        """Send newcomers the loop's state, let the loop begin, or answer it. Returns True if it did."""
        return self.hand_over() or self.enter() or self.feed()

    def hand_over(self) -> bool:
        """Send newcomers the loop's state at the start of the next step, once this loop has entered it."""
        # The state of an earlier step would make schedulers repeat a step.
        if not self._newcomers or self._views.is_recovering or self.step != self._commit.step + 1:
            return False
        assert self._state is not None
        self._out.send_all(self._newcomers, LoopHandover(step=self.step, state=self._state[1]))
        self._newcomers = ()
        return True

    # ------------------------------------------------------------------------------------------------ commands to it

    def enter(self) -> bool:
        """Let the loop begin, once this member has parameters and loop state. Returns True if it begins."""
        if not self.is_outside or self._views.is_recovering or not self._commit.parameters.are_here():
            return False
        step = self._commit.step + 1
        # In the job's first step all loops begin alike: from their scripts, or from the loop state in the checkpoint.
        # Later only the state of this very step is valid.
        if not self._commit.is_initial and (self._state is None or self._state[0] != step):
            return False
        _, state, payload = self._state or (step, None, None)
        self._give(p.Enter(step=step, state=state, payload=payload))
        return True

    def feed(self) -> bool:
        """Answer a loop that has asked: let it leave the step, or give it its next run. Returns True if it did."""
        outstanding = len(self._open.runs.outstanding)
        is_full = outstanding >= OUTSTANDING_MOST
        if self.stage is not LoopStage.WAITING or is_full or not self._commit.parameters.are_here():
            return False
        # At the end of the job blocks arrive. They must not appear in the middle of a task.
        if self._end.step is not None and not self._replicas.are_all:
            return False
        if self._commit.record is not None and self.step == self._commit.step:
            if not outstanding:  # the device still reads the step's parameters and the loop's state
                # The loop keeps no plan of its own.
                self._give(p.Advance(record=replace(self._commit.record, plan=self._commit.plan)))
        elif self.step == self._open.runs.step:
            self._give_run()
        return self.stage is not LoopStage.WAITING

    def _give_run(self) -> None:
        is_recovering, running = self._views.is_recovering, self._open.runs.running
        pending = [run for run in self._open.runs.pending if run not in running]
        todo = [run for run in pending if not is_recovering or run in self._allowed]
        if todo:
            self._give(self._open.audits.compute(self._open.check.compute(todo[0])))
        elif not is_recovering and (command := self._open.tasks.next_command()) is not None:
            self._give(command)
        elif not is_recovering and (run := self._open.check.next_run()) is not None:
            self._give(self._open.check.recompute(run))
        elif not is_recovering and (run := self._open.audits.next_run()) is not None:
            self._give(self._open.audits.recompute(run))
        elif not is_recovering and not self._open.runs.outstanding and (places := self._replicas.take_cold()):
            self._give(p.WarmUp(step=self.step, places=places))

    def _give(
        self,
        command: p.Enter | p.Advance | p.Compute | p.Recompute | p.Forward | p.Backward | p.WeightGradients | p.WarmUp,
    ) -> None:
        self._move(command)
        match command:
            case p.WarmUp():
                self._open.runs.start_running(None)
            case p.Compute():
                self._open.runs.start_running(command.run)
            case p.Forward() | p.Backward() | p.WeightGradients():
                self._open.runs.start_running(action_of(command))
            case p.Recompute():
                self._open.runs.start_running(None)
        self._out.do(command)
