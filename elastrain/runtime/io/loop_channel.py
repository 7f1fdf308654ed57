"""Between the training loop (main thread) and the engine's thread: what each hands to the other, in two queues.

The loop tells events and waits for outcomes; the engine takes what was told between two looks at the mesh. Whatever the
main thread decides about a step (hyperparameters, state for newcomers) travels through here, so that the engine alone
touches the executor and the protocol core.
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
"""How long the engine waits at most before it looks whether it was stopped."""


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
    """What crosses the cut that it begins at; None at the batch and at the loss."""


@dataclass(frozen=True)
class LoopOver:
    """Nothing more is to be computed."""

    overruled: bool = False
    """Most members have left their loops before this step, of which nothing counts."""
    last: Record | None = None
    """The record of the last committed step."""


Outcome: TypeAlias = Assignment | TaskAssignment | p.Advance | p.Enter | LoopOver


@dataclass(frozen=True, kw_only=True)
class StepBegun:
    """The loop has come to the micro-batches of a step: what it has set until then counts in this step."""

    event: p.Began
    hyper: Hyper
    payload: Callable[[], list[Tensor]]
    """The tensors of the loop's state; called in the engine's thread when a newcomer enters this very step."""


@dataclass(frozen=True)
class TryAgain:
    """What the run has accumulated is void: another slot is wanted. The protocol waits for the run as before."""

    compute: p.Compute | p.Recompute


@dataclass(frozen=True)
class InitialUnread:
    """What the job starts from could not be read: the engine ends with this."""

    error: Exception


@dataclass(frozen=True)
class BoundaryMade:
    """An action is done, and what it made lies in this member's shared memory."""

    event: p.Computed
    tensors: tuple[Tensor, ...]


Told: TypeAlias = p.Event | StepBegun | TryAgain | InitialUnread | BoundaryMade


class LoopChannel:
    """Safe for two threads: the methods of each half belong to one. `wake` interrupts the engine's waiting;
    `whereabouts` hears that the loop waits, and what for it goes on.
    """

    def __init__(self, wake: Callable[[], None], whereabouts: LoopHeartbeat | None = None) -> None:
        self.wake = wake
        self.whereabouts = whereabouts or LoopHeartbeat()
        self._told: deque[Told] = deque()
        self._outcomes: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
        """None: nothing more will come, see `_failure`."""
        self._failure: Exception | None = None
        self._ended = False

    def tell(self, *told: Told) -> None:
        """Hand events to the engine, which takes them together; waits for nothing."""
        self._told.extend(told)
        self.wake()

    def wait(self) -> Outcome:
        """Wait for the next outcome. Raises what ended the engine; StoppedError if it was closed."""
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
        """Another slot for a run whose backward failed. Raises StoppedError if the job has ended meanwhile."""
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
        """Whether something was told that the engine has not taken yet."""
        return bool(self._told)

    def take(self) -> Iterator[Told]:
        """What was told, in order, until nothing is left; boundary tensors before anything else.

        Another member waits for a boundary tensor, and for the sums of gradients that were told before it nobody does.
        """
        while self._told:
            together = [self._told.popleft() for _ in range(len(self._told))]
            yield from sorted(together, key=lambda told: not isinstance(told, BoundaryMade))

    def give(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)

    def end(self, failure: Exception | None = None) -> None:
        """Nothing more will come. `failure` is raised in the main thread; the first one counts."""
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
