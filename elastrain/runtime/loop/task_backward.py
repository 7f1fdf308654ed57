"""Backwards of a pipeline's member: the backward of one micro-batch through a task, whole or in two parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from elastrain import protocol as p
from elastrain.errors import DriveFailedError
from elastrain.offload.errors import SpillReadError
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.stubs.passes import Ends, StubPass
from elastrain.runtime.loop.action_timer import ActionTimer, log_action
from elastrain.runtime.loop.boundary_tensors import ActionResult, Counts
from elastrain.runtime.loop.split_backward import backward_of_input, backward_of_weights
from elastrain.runtime.model.statistics import MeasuredLayer

if TYPE_CHECKING:
    from elastrain.runtime.io.loop_channel import TaskAssignment
    from elastrain.runtime.loop.pipelined import Pipelines


@dataclass(frozen=True, kw_only=True)
class ForwardDone:
    """A micro-batch that has gone forward here and not yet backward."""

    passed: StubPass
    measured: list[MeasuredLayer]
    may_split: bool
    """False if a hook wants each part of the backward to be computed once, and at one time."""


@dataclass(frozen=True, kw_only=True)
class LeftGradients:
    """The computation of a micro-batch's weight gradients: a whole backward, or what a split one has left."""

    micro_batch: int
    passed: StubPass
    measured: list[MeasuredLayer]
    weight: float
    so_far: Counts
    """The contribution of its run, up to this micro-batch."""
    compute: Callable[[], Any]


class ActionBackward:
    """A backward of one micro-batch through a task, into the task's slot, or what a split one has left of it."""

    def __init__(self, step: int, assignment: TaskAssignment, pipelines: Pipelines) -> None:
        command = assignment.compute
        kind = ActionKind.WEIGHT if isinstance(command, p.WeightGradients) else ActionKind.BACKWARD
        self._step, self._slot, self._pipelines = step, assignment.slot, pipelines
        self._action = TaskAction(kind, command.micro_batch, command.task)
        self._is_split = not isinstance(command, p.WeightGradients) and command.is_split
        self.timer = ActionTimer(pipelines.parts.handover.landing.port, command.task)
        self._stubs = pipelines.stubs_for(command.task)
        self._micro_batches = pipelines.micro_batches_of(command.task.run)

    def run(
        self, waiting: ForwardDone, weight: float, counts: Counts, ends: Ends, forward: ActionResult | None = None
    ) -> None:
        """Compute the backward and report it. `forward`: the action's own forward, if it was not reported yet."""
        pipelines, action, passed, started_s = self._pipelines, self._action, waiting.passed, time.monotonic()
        so_far = pipelines.count(action, counts)
        self.timer.begin()
        left = self._go_back(waiting, ends, weight, so_far)
        self.timer.end()
        made = pipelines.packed(passed.gradients) if action.task.begin > 0 else None
        if left is not None:
            passed.let_go()
            pipelines.left[action] = left
        took, is_split = self.timer.backward_s, left is not None
        result = ActionResult(action=action, made=made, counts=counts, is_split=is_split, took=took)
        pipelines.tell_made(self._step, *([] if forward is None else [forward]), result)
        log_action(pipelines.parts, self._step, action, started_s)

    def run_left(self) -> None:
        """Compute and report the weight gradients that the micro-batch's backward has left."""
        started_s = time.monotonic()
        self.timer.begin()
        self._add_left()
        self.timer.end()
        self._pipelines.tell_made(self._step, ActionResult(action=self._action, took=self.timer.backward_s))
        log_action(self._pipelines.parts, self._step, self._action, started_s)

    def _go_back(self, waiting: ForwardDone, ends: Ends, weight: float, so_far: Counts) -> LeftGradients | None:
        """Compute the backward. Returns the weight gradients that it has left, or None if it was computed whole."""
        parts, passed, micro_batch = self._pipelines.parts, waiting.passed, self._action.micro_batch
        gradients = partial(
            LeftGradients,
            micro_batch=micro_batch,
            passed=passed,
            measured=waiting.measured,
            weight=weight,
            so_far=so_far,
        )
        if micro_batch == self._micro_batches[0]:
            self._pipelines.drop_left(self._action.task)
        # Forwards that checkpoints recompute are not measured. The forward's own measurements go with the weights.
        parts.model.statistics.give((), {})
        try:
            if self._is_split and waiting.may_split:
                left = self._read_back(passed, lambda: backward_of_input(ends))
                if left is not None:
                    return gradients(compute=partial(backward_of_weights, left))
            self._add_left()  # gradients are added in the order of micro-batches
            self._add(gradients(compute=partial(passed.backward, ends)))
        finally:
            parts.model.statistics.end()
        return None

    def _add_left(self) -> None:
        """Compute what backwards of the task have left, up to this micro-batch."""
        left = self._pipelines.left
        for each in [each for each in left if each.task == self._action.task]:
            if each.micro_batch <= self._action.micro_batch:
                self._add(left.pop(each))

    def _add(self, gradients: LeftGradients) -> None:
        """Add the weight gradients of a micro-batch to the slot."""
        model, is_last = self._pipelines.parts.model, gradients.micro_batch == self._micro_batches[-1]
        if gradients.micro_batch == self._micro_batches[0]:
            # Not before: the runs whose weight gradients are left would keep a copy of the gradients each.
            self._slot.begin_run(self._pipelines.blocks_of(self._action.task))
        model.statistics.give(gradients.measured, self._slot.statistics, gradients.weight)
        model.attach(self._slot, is_discarding=gradients.weight == 0.0)
        try:
            if is_last:
                model.arm(self._block_done(gradients.so_far), self._pipelines.blocks_of(self._action.task))
            self._read_back(gradients.passed, gradients.compute)
            if is_last:
                model.finish()
        finally:
            model.statistics.end()
            model.disarm()
            model.detach()

    def _read_back(self, passed: StubPass, compute: Callable[[], Any]) -> Any:
        """Run a part of a backward, and return its result. Raises DriveFailedError if a drive loses activations.

        Only other members can compute the task again, after this one has ended.
        """
        parts = self._pipelines.parts
        parts.whereabouts.go_on()
        try:
            with parts.backward():
                return self._stubs.go_back(passed, lambda: passed.under_autocast(compute))
        except SpillReadError as fault:
            raise DriveFailedError(f"a task of a pipeline is not computed twice here: {fault}") from fault

    def _block_done(self, so_far: Counts) -> Callable[[int, frozenset[int]], None]:
        parts, step, run = self._pipelines.parts, self._step, self._action.task.run

        def report(block: int, touched: frozenset[int]) -> None:
            parts.whereabouts.go_on()
            parts.reach(step, "backward")
            mask = sum(1 << leaf for leaf in touched)

            def done() -> p.Event:
                return p.BlockDone(step=step, run=run, block=block, contribution=so_far(), touched=mask)

            parts.handover.tell_landed(done)

        return report
