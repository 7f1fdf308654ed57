"""The work of a pipeline's member: forwards and backwards of single micro-batches through the blocks of its tasks.

For the main thread. The protocol chooses the next action and its blocks. Here the user's loop body runs with stubs in
place of all other blocks, and boundary tensors are copied into memory that peers read. On a device the loop's thread
waits for nothing: the losses and the boundary tensors are told once they have landed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastrain import protocol as p
from elastrain.base.thread_status import Station
from elastrain.buffers.captures import KeptBoundary
from elastrain.job.values import Contribution, TracedGraph
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, routes
from elastrain.pipeline.stubs.passes import StubPass
from elastrain.pipeline.stubs.stubs import Stubs
from elastrain.pipeline.stubs.trace import TracedModel
from elastrain.runtime.carrying.run_losses import RunLosses
from elastrain.runtime.io.loop_channel import TaskAssignment
from elastrain.runtime.loop.action_timer import ActionTimer, LoopClock, log_action
from elastrain.runtime.loop.boundary_tensors import ActionResult, Counts, Packed, packed, unpacked
from elastrain.runtime.loop.computed_run import StepParts, counted, load, scaled, went_by
from elastrain.runtime.loop.split_backward import HookWatch, has_backward_hooks
from elastrain.runtime.loop.task_backward import ActionBackward, ForwardDone, LeftGradients
from elastrain.runtime.loop.tracing import TracingRun, places_of
from elastrain.runtime.model.flats import Allocate

_NONE = Contribution()
_NO_LOSS = torch.zeros((), device="cpu")
"""A loss in place of one whose value is known otherwise."""


@dataclass(frozen=True, kw_only=True)
class PipelineWish:
    """The parameters of a job with pipelines: the model, its stages, and the allocator of boundary tensors."""

    model: nn.Module
    stages: int
    allocate: Allocate
    traced: Callable[[TracedModel, tuple[int, ...]], None] | None = None
    """Called with the traced model and the place of each block of the layout, if memory is limited."""


class Pipelines:
    """The part of a member in pipelines, for the whole job: traced model, stubs, and micro-batches in flight."""

    def __init__(self, wish: PipelineWish, parts: StepParts) -> None:
        self.parts = parts
        self._wish = wish
        self._traced: TracedModel | None = None
        self._stubs: Stubs | None = None
        self._blocks: tuple[int, ...] = ()
        """The place in the graph of each block of the layout."""
        self._waiting: dict[tuple[Task, int], ForwardDone] = {}
        self.left: dict[TaskAction, LeftGradients] = {}
        """Backward -> the weight gradients that it has left, in the order of micro-batches."""
        self._sums: dict[Task, RunLosses] = {}
        """Task -> contributions of the micro-batches of its run that have gone backward so far."""
        self._plan: PipelinePlan | None = None
        self.clock = LoopClock()

    @property
    def is_traced(self) -> bool:
        """True once the model was traced."""
        return self._traced is not None

    def trace(self, step: int) -> TracingRun:
        """Return the tracing pass, the first work of a member. Pass its result to `begin`."""
        return TracingRun(step, self.parts, self._wish.model, self._wish.stages)

    def begin(self, traced: TracedModel) -> None:
        """Keep the traced model, and tell the protocol its graph."""
        self._traced = traced
        self._blocks = places_of(self.parts.model.layout.blocks, traced.graph)
        if self._wish.traced is not None:
            self._wish.traced(traced, self._blocks)
        self.parts.log("traced", blocks=list(traced.graph.blocks), legal_cuts=list(traced.graph.legal_cuts))
        graph = TracedGraph(graph=traced.graph, places=self._blocks)
        gradient_bytes = [0] * len(traced.graph.blocks)
        for block, place in enumerate(self._blocks):
            gradient_bytes[place] += self.parts.model.gradients.bytes_of(block)
        told = p.Traced(model=graph, gradient_bytes=tuple(gradient_bytes), saved_bytes=traced.saved)
        self.parts.handover.tell_landed(lambda: told)

    def go_back(self, step: int, assignment: TaskAssignment) -> None:
        """Compute the backward of a micro-batch whose boundary gradient has arrived, or what a split one has left."""
        command, received = assignment.compute, assignment.received
        # So that an activation checkpoint that restores no generator draws the numbers of its forward.
        self.parts.randomness.begin_backward(step, command.micro_batch)
        backward = ActionBackward(step, assignment, self)
        if isinstance(command, p.WeightGradients):
            with backward.timer.around(self.parts.computing):
                backward.run_left()
            return
        assert received is not None, "a backward without the loss has a gradient"
        waiting = self._waiting.pop((command.task, command.micro_batch))
        ends = waiting.passed.ends(self.received(received, command.task.end))
        with backward.timer.around(self.parts.computing):
            counts = received.contribution or _NONE
            backward.run(waiting, counts.weight, lambda: counts, ends)

    def warm_up(self, command: p.WarmUp) -> None:
        """Compute blocks of which this member is a shadow once on zeros. Nothing but compiled code stays of it."""
        parts, started_s = self.parts, time.monotonic()
        parts.whereabouts.enter(Station.COMPUTING, command.step)
        parts.model.blocks.show([block for block, place in enumerate(self._blocks) if place in command.places])
        try:
            problems = self._standing().warm_up(command.places)
        finally:
            parts.model.blocks.show(())
            # A tied weight has a view of its own in each forward.
            parts.model.ties.forward_is_over()
        parts.log("warmed_up", step=command.step, blocks=list(problems), started_s=started_s, problems=problems)

    def drop_left(self, task: Task) -> None:
        """Drop the weight gradients that an earlier attempt at the task has left."""
        self.left = {action: its for action, its in self.left.items() if action.task != task}

    def end_step(self, plan: PipelinePlan | None) -> None:
        """End a committed step. `plan`: plan of the next step. In between, uses of absent blocks are refused."""
        self._plan = plan
        for kept in (self._waiting, self.left, self._sums):
            kept.clear()
        if plan is not None:
            self._standing().finish()

    def expected(self, me: str) -> tuple[int, ...]:
        """Return the micro-batches that go through this member in an undisturbed step, or () without a plan."""
        if self._plan is None:
            return ()
        runs = [task.run for route in routes(self._plan) for task in route if task.member == me]
        return tuple(m for run in runs for m in self.micro_batches_of(run))

    @property
    def has_plan(self) -> bool:
        """True if there is a plan of pipelines."""
        return self._plan is not None

    def close(self) -> None:
        """Remove the stubs from the model, unless blocks stay absent. A second call does nothing."""
        if self._stubs is not None and not self.parts.model.blocks.are_left_partial:
            self._stubs.close()

    @property
    def graph_blocks(self) -> int:
        """Number of blocks in the graph."""
        assert self._traced is not None
        return len(self._traced.graph.blocks)

    def micro_batches_of(self, run: int) -> range:
        """Return the micro-batches of a run."""
        return self._shape(0).micro_batches_of(run)

    def blocks_of(self, task: Task) -> tuple[int, ...]:
        """Return the blocks of the layout that the task computes, ascending."""
        return tuple(block for block, place in enumerate(self._blocks) if place in task.blocks)

    def stubs_for(self, task: Task) -> Stubs:
        """Make the model compute the task's blocks, with stubs in place of all others. Returns the stubs."""
        stubs = self._standing()
        stubs.hold(task.begin, task.end)
        return stubs

    def _standing(self) -> Stubs:
        """Return the stubs at the entries of all blocks. They are made at the first plan, when blocks may be absent."""
        if self._stubs is None:
            assert self._traced is not None
            enter = self.parts.randomness.enter_compiled
            self._stubs = Stubs(self._wish.model, self._traced, 0, self.graph_blocks, self._is_here, enter)
        return self._stubs

    def _is_here(self, place: int) -> bool:
        held = self.parts.model.blocks
        return all(held.has(block) for block, its in enumerate(self._blocks) if its == place)

    def may_split(self, watch: HookWatch) -> bool:
        """Return True if nothing but the graph decides whether a micro-batch's backward can be split.

        A memory limit does not count the gradients that a split backward keeps, so under one all are whole.
        """
        return self._wish.traced is None and not watch.has_found and not has_backward_hooks(self._wish.model)

    def wait(self, action: TaskAction, waiting: ForwardDone) -> None:
        """Keep a micro-batch until its boundary gradient arrives."""
        self._waiting[action.task, action.micro_batch] = waiting

    def count(self, action: TaskAction, counts: Counts) -> Counts:
        """Add the contribution of a micro-batch to its run's sum, and return the sum so far."""
        if action.micro_batch == self.micro_batches_of(action.task.run)[0]:
            self._sums[action.task] = RunLosses(self.parts.handover.landing.port)
        losses = self._sums[action.task]
        losses.add(_NO_LOSS, lambda _: counts())
        return partial(losses.sum_of, losses.count)

    def received(self, kept: KeptBoundary, cut: int) -> list[Tensor | None]:
        """Return the tensors that crossed a cut, on the devices where they lay."""
        assert self._traced is not None
        after = self.parts.handover.submitted
        return unpacked(kept.message.tensors, kept.tensors, self._traced.devices[cut], after)

    def packed(self, tensors: Sequence[Tensor | None]) -> Packed:
        """Copy tensors that cross a cut to memory that peers read."""
        return packed(tensors, self._wish.allocate)

    def tell_made(self, step: int, *results: ActionResult) -> None:
        """Report finished actions once they have landed, and so have the copies of what they made."""
        copied = [event for result in results if result.made is not None for event in result.made.copied]
        results = (replace(results[0], host_s=self.clock.end()), *results[1:])
        reports = (partial(result.report, self._shape(step)) for result in results)
        # In one call, because each call wakes the engine, which would take the interpreter before the last is told.
        self.parts.handover.tell_landed(*reports, after=copied, is_boundary=True)

    def _shape(self, step: int) -> StepShape:
        micro_batches, length = self.parts.loader.micro_batches, self.parts.run_length
        return StepShape(number=step, micro_batches=micro_batches, run_length=length, blocks=self.graph_blocks)


class ActionForward:
    """The forward of one micro-batch through a task. Iterate over it for the batch, and call `backward` once.

    If the task ends with the loss, the backward follows at once. Else it comes when its boundary gradient has arrived.
    """

    def __init__(self, step: int, assignment: TaskAssignment, pipelines: Pipelines) -> None:
        command = assignment.compute
        assert isinstance(command, p.Forward)
        self.backward_is_due, self._loss_scale = False, command.loss_scale
        self._step, self._assignment, self._pipelines = step, assignment, pipelines
        self._action = TaskAction(ActionKind.FORWARD, command.micro_batch, command.task)
        self._pass: StubPass | None = None
        self._losses = RunLosses(pipelines.parts.handover.landing.port)
        self._timer = ActionTimer(pipelines.parts.handover.landing.port, command.task)
        self._watch = HookWatch()

    @property
    def micro_batch(self) -> int:
        """The micro-batch that is being computed, for error reports."""
        return self._action.micro_batch

    def __iter__(self) -> Iterator[Any]:
        parts, action, step = self._pipelines.parts, self._action, self._step
        data = load(parts, step, action.micro_batch)
        started_s = time.monotonic()
        parts.whereabouts.enter(Station.COMPUTING, step, action.micro_batch)
        parts.randomness.begin(step, action.micro_batch)
        # For new blocks: layers in eval mode compute with their running statistics.
        parts.model.statistics.refresh()
        parts.model.statistics.begin()
        stubs = self._pipelines.stubs_for(action.task)
        self._pass = stubs.begin(self._received(), self._timer.enter)
        self.backward_is_due = True
        parts.reach(step, "forward")
        with self._timer.around(parts.computing), self._watch:
            yield data
        stubs.finish()
        if self.backward_is_due:
            raise went_by(f"micro-batch {action.micro_batch} of step {step}")
        log_action(parts, step, action, started_s)

    def backward(self, loss: Tensor, weight: float) -> None:
        """End the forward when the loop calls `step.backward`. Computes the backward, too, if the task has the loss."""
        parts, action, passed = self._pipelines.parts, self._action, self._pass
        assert passed is not None
        parts.untouched.check_gradients()
        self.backward_is_due = False
        self._timer.end()
        self._pipelines.stubs_for(action.task).loss_is_made()
        passed.backward_is_called(loss.device.type)
        may_split = self._pipelines.may_split(self._watch)
        waiting = ForwardDone(passed=passed, measured=parts.model.statistics.take(), may_split=may_split)
        parts.model.statistics.end()
        if action.task.end < self._pipelines.graph_blocks:
            self._pipelines.wait(action, waiting)
            made = self._pipelines.packed(passed.going)
            self._pipelines.tell_made(self._step, ActionResult(action=action, made=made, took=self._timer.forward_s))
            return
        self._losses.add(loss, partial(counted, parts.loader.order, self._step, action.micro_batch, weight=weight))
        backward = ActionBackward(self._step, self._assignment, self._pipelines)
        counts, whole = partial(self._losses.sum_of, 1), scaled(loss, weight * self._loss_scale)
        forward = ActionResult(action=action, took=self._timer.forward_s)
        backward.run(waiting, weight, counts, [(whole, None)], forward=forward)

    @property
    def figures(self) -> RunLosses | None:
        """The collector of figures. None if the task does not end with the loss: values may be fakes there."""
        return self._losses if self._action.task.end == self._pipelines.graph_blocks else None

    def _received(self) -> Sequence[Tensor | None]:
        kept = self._assignment.received
        return () if kept is None else self._pipelines.received(kept, self._action.task.begin)
