"""What the training loop is handed to compute, with its slot, and what it has done to slots enters the books.

In the engine's thread; the books are what the protocol's commands work on, so they hear of the loop first.
"""

from __future__ import annotations

from collections.abc import Callable

from elastrain import protocol as p
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction
from elastrain.runtime.io.loop_channel import Assignment, BoundaryMade, LoopChannel, TaskAssignment, TryAgain
from elastrain.runtime.tensors.executor import Executor


def _nothing() -> None:
    """No memory limit."""


class SlotAssignment:
    """Between the books of a member and its loop."""

    def __init__(self, executor: Executor, handover: LoopChannel, make_room: Callable[[], None] = _nothing) -> None:
        """`make_room`: called before each forward of a pipeline."""
        self._executor, self._handover, self._make_room = executor, handover, make_room

    def give(self, command: p.Compute | p.Recompute | p.Forward | p.Backward) -> None:
        """Let the loop compute it."""
        match command:
            case p.Compute():
                self._handover.give(Assignment(command, self._executor.books.slots.start_run()))
            case p.Recompute():
                self._handover.give(Assignment(command, self._executor.check_slot()))
            case p.Forward() | p.Backward():
                if isinstance(command, p.Forward):
                    self._make_room()
                self._handover.give(self._action(command))

    def give_again(self, told: TryAgain) -> None:
        """What the run has accumulated is void."""
        self._handover.give(Assignment(told.compute, self._executor.books.slots.change()))

    def keep(self, made: BoundaryMade) -> p.Event:
        """Before the core hears of it: it may have it sent at once."""
        books = self._executor.books
        # Of a step that began anew meanwhile: what was wrong in it must not stand for what is made now.
        if made.event.made is not None and not books.slots.is_void:
            books.boundaries.put(made.event.made, made.tensors)
        return made.event

    def note(self, event: p.Event) -> None:
        """What the main thread has done to gradient slots enters the books before the commands that need it."""
        slots = self._executor.books.slots
        match event:
            case p.BlockDone():
                slots.block_done(event)
            case p.Computed():
                slots.computed(event)
            case p.Ready():
                slots.end_run()

    def _action(self, command: p.Forward | p.Backward) -> TaskAssignment:
        books, task = self._executor.books, command.task
        if isinstance(command, p.Forward):
            cut, direction = task.begin, Direction.ACTIVATION
        else:
            cut, direction = task.end, Direction.GRADIENT
        name = BoundaryName(command.step, command.micro_batch, cut, direction)
        # The batch is given to every member; the loss's own member computes its backward with the forward.
        is_given = isinstance(command, p.Forward) and cut == 0
        received = None if is_given else books.boundaries[name]
        return TaskAssignment(command, books.slots.start_action(task), received)
