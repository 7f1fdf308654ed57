"""Assignment of work and gradient slots to the training loop, and the entry of its results in the buffer book.

Used by the engine's thread. The buffer book gets the loop's results before the core does, because the core's commands
work on the book.
"""

from __future__ import annotations

from collections.abc import Callable

from elastrain import protocol as p
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction
from elastrain.runtime.io.loop_channel import (
    Assignment,
    BatchAssignment,
    BoundaryMade,
    LoopChannel,
    TaskAssignment,
    TryAgain,
)
from elastrain.runtime.tensors.executor import Executor


def _nothing() -> None:
    """Do nothing, as there is no memory limit."""


class SlotAssignment:
    """The connection between a member's buffer book and its training loop."""

    def __init__(self, executor: Executor, handover: LoopChannel, make_room: Callable[[], None] = _nothing) -> None:
        """Connect the two. `make_room` is called before each forward of a pipeline."""
        self._executor, self._handover, self._make_room = executor, handover, make_room

    def give(self, command: p.Compute | p.Recompute | p.Forward | p.Backward | p.WeightGradients | p.WarmUp) -> None:
        """Give the loop a run or an action to compute, with a slot for its gradients, or blocks to warm up."""
        match command:
            case p.WarmUp():
                self._executor.books.slots.start_check()
                self._handover.give(command)
            case p.Compute():
                self._handover.give(Assignment(command, self._executor.books.slots.start_run()))
            case p.Recompute():
                self._executor.books.slots.start_check()
                self._handover.give(Assignment(command, self._executor.check_slot()))
            case p.Forward() | p.Backward() | p.WeightGradients():
                if isinstance(command, p.Forward):
                    self._make_room()
                self._handover.give(self._action(command))

    def evaluate(self, command: p.EvaluateBatch | p.EvaluationEnded) -> None:
        """Give the loop a batch of an evaluation, with the boundary tensors above its blocks, or the end."""
        if isinstance(command, p.EvaluationEnded):
            self._handover.give(command)
            return
        name = command.received
        self._handover.give(BatchAssignment(command, self._executor.books.boundaries[name] if name else None))

    def give_again(self, told: TryAgain) -> None:
        """Give the loop the run again with another slot. The gradients in the old slot are void."""
        self._handover.give(Assignment(told.compute, self._executor.books.slots.change()))

    def keep(self, made: BoundaryMade) -> p.Event:
        """Keep the boundary tensors of a finished action, and return its event for the core.

        They must be kept first, because the core may send them at once.
        """
        books = self._executor.books
        # If the step was restarted meanwhile, its old tensors must not replace the new ones.
        is_void = books.slots.is_void and isinstance(made.event, p.Computed)
        if made.event.made is not None and not is_void:
            books.boundaries.put(made.event.made, made.tensors)
        return made.event

    def note(self, event: p.Event) -> None:
        """Enter the main thread's work on gradient slots in the buffer book, before the commands that need it."""
        slots = self._executor.books.slots
        match event:
            case p.BlockDone():
                slots.block_done(event)
            case p.Computed():
                slots.computed(event)
            case p.Ready():
                slots.end_run()

    def _action(self, command: p.Forward | p.Backward | p.WeightGradients) -> TaskAssignment:
        books, task = self._executor.books, command.task
        if isinstance(command, p.Forward):
            cut, direction = task.begin, Direction.ACTIVATION
        else:
            cut, direction = task.end, Direction.GRADIENT
        name = BoundaryName(command.step, command.micro_batch, cut, direction)
        # A forward from cut 0 reads the batch, which every member has. A backward always needs boundary tensors: the
        # backward of the last task is not assigned, because it runs together with the forward.
        is_given = (isinstance(command, p.Forward) and cut == 0) or isinstance(command, p.WeightGradients)
        received = None if is_given else books.boundaries[name]
        return TaskAssignment(command, books.slots.start_action(task), received)
