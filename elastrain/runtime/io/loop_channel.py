"""The two queues between the training loop (main thread) and the engine's thread.

The loop sends events and waits for outcomes; the engine takes the events between two polls of the mesh. All decisions
of the main thread about a step (hyperparameters, state for newcomers) pass through here, so only the engine touches the
executor and the protocol core.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from elastrain import protocol as p
from elastrain.base.thread_status import Station
from elastrain.buffers.captures import KeptBoundary
from elastrain.errors import StoppedError
from elastrain.job.values import Record
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.optimizer import Hyper

LOOK_EVERY_S = 0.5
"""Longest time that either thread waits before it checks whether the engine was stopped."""


@dataclass(frozen=True)
class Assignment:
    """A run to compute (or another member's micro-batch to check), with the slot for its gradients."""

    compute: p.Compute | p.Recompute
    slot: GradientSlot


@dataclass(frozen=True)
class TaskAssignment:
    """One action of a pipeline's task, with the slot for its gradients."""

    compute: p.Forward | p.Backward
    slot: GradientSlot
    received: KeptBoundary | None
    """The tensor that crosses the cut at which the action begins; None at the batch and at the loss."""


@dataclass(frozen=True)
class LoopOver:
    """The end of the loop: nothing more is to be computed."""

    overruled: bool = False
    """True if most members left their loops before this step, so that nothing of it counts."""
    last: Record | None = None
    """The record of the last committed step."""


Outcome: TypeAlias = Assignment | TaskAssignment | p.Advance | p.Enter | LoopOver


@dataclass(frozen=True, kw_only=True)
class StepBegun:
    """The start of a step's micro-batches. Settings made before it count in this step."""

    event: p.Began
    hyper: Hyper
    payload: Callable[[], list[Tensor]]
    """The tensors of the loop's state; called in the engine's thread when a newcomer enters this very step."""


@dataclass(frozen=True)
class TryAgain:
    """A request for another slot, because the gradients of the run are void. The protocol still waits for the run."""

    compute: p.Compute | p.Recompute


@dataclass(frozen=True)
class InitialUnread:
    """A failure to read the initial state. The engine ends with this error."""

    error: Exception


@dataclass(frozen=True)
class BoundaryMade:
    """A finished action and its result, which lies in this member's shared memory."""

    event: p.Computed
    tensors: tuple[Tensor, ...]


Told: TypeAlias = p.Event | StepBegun | TryAgain | InitialUnread | BoundaryMade


class LoopChannel:
    """The channel between two threads: the methods of each half belong to one thread.

    `wake` interrupts the engine's wait. `whereabouts` is told where the loop is.
    """

    def __init__(self, wake: Callable[[], None], whereabouts: LoopHeartbeat | None = None) -> None:
        self.wake = wake
        self.whereabouts = whereabouts or LoopHeartbeat()
        self._told: deque[Told] = deque()
        self._outcomes: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        """None means that nothing more will come (see `_failure`)."""
        self._failure: Exception | None = None
        self._ended = False

    def tell(self, *told: Told) -> None:
        """Send events to the engine, which takes them together. Never blocks."""
        self._told.extend(told)
        self.wake()

    def wait(self) -> Outcome:
        """Wait for the next outcome. Raises the error that ended the engine; StoppedError if it was closed."""
        self.whereabouts.enter(Station.WAITING)
        try:
            outcome = self._wait()
        except Exception:
            self.whereabouts.enter(Station.OUTSIDE)
            raise
        self.whereabouts.enter(_place_after(outcome))
        return outcome

    def _wait(self) -> Outcome:
        while True:
            try:
                outcome = self._outcomes.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                outcome = None
            if outcome is not None:
                return outcome
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StoppedError("the engine has ended")

    def next_work(self) -> Assignment | TaskAssignment | p.Advance | LoopOver:
        """Wait for a run or an action to compute, or for the end of the step."""
        self.tell(p.Ready())
        outcome = self.wait()
        assert not isinstance(outcome, p.Enter)
        return outcome

    def try_again(self, assignment: Assignment) -> Assignment:
        """Ask for another slot for a run whose backward failed. Raises StoppedError if the job has ended meanwhile."""
        self.tell(TryAgain(assignment.compute))
        outcome = self.wait()
        if not isinstance(outcome, Assignment):
            raise StoppedError("the job has ended")
        return outcome

    @property
    def has_ended(self) -> bool:
        """True once the engine has ended and takes nothing more."""
        return self._ended

    @property
    def has_news(self) -> bool:
        """True if the engine has not yet taken everything that was sent."""
        return bool(self._told)

    def take(self) -> Iterator[Told]:
        """Yield what the loop has sent, until nothing is left: boundary tensors first, the rest in order.

        Another member waits for a boundary tensor, but none waits for gradient sums that were sent before it.
        """
        while self._told:
            together = [self._told.popleft() for _ in range(len(self._told))]
            yield from sorted(together, key=lambda told: not isinstance(told, BoundaryMade))

    def give(self, outcome: Outcome) -> None:
        """Give the loop its next outcome."""
        self._outcomes.put(outcome)

    def end(self, failure: Exception | None = None) -> None:
        """End the channel: nothing more will come. `failure` is raised in the main thread; the first one counts."""
        self._failure = self._failure or failure
        self._ended = True
        self._outcomes.put(None)


def _place_after(outcome: Outcome) -> Station:
    match outcome:
        case Assignment() | TaskAssignment():
            return Station.COMPUTING
        case p.Advance() | p.Enter():
            return Station.BETWEEN
        case LoopOver():
            return Station.OUTSIDE
