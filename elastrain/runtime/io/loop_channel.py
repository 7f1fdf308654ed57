"""The two queues between the training loop (main thread) and the engine's thread.

The loop sends events and waits for outcomes; the engine takes the events between two polls of the mesh. All decisions
of the main thread about a step (hyperparameters, state for newcomers) pass through here, so only the engine touches the
executor and the protocol core.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor

from elastrain import protocol as p
from elastrain.base.thread_status import Station
from elastrain.buffers.captures import KeptBoundary
from elastrain.device.landing import DeviceEvent
from elastrain.errors import StoppedError
from elastrain.job.values import Record
from elastrain.runtime.carrying.landed_results import Landing
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.optimizer import Hyper
from elastrain.snapshot.shard_state import ShardState

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

    compute: p.Forward | p.Backward | p.WeightGradients
    slot: GradientSlot
    received: KeptBoundary | None
    """The tensor that crosses the cut at which the action begins; None at the batch, and for weight gradients."""


@dataclass(frozen=True)
class BatchAssignment:
    """A batch of an evaluation to compute, or its forward through a stage."""

    compute: p.EvaluateBatch
    received: KeptBoundary | None
    """The boundary tensors above the stage; None at the batch."""


@dataclass(frozen=True)
class LoopOver:
    """The end of the loop: nothing more is to be computed."""

    overruled: bool = False
    """True if most members left their loops before this step, so that nothing of it counts."""
    last: Record | None = None
    """The record of the last committed step."""


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
class LoopFailed:
    """A failure to read the initial state, or an error of the device. The engine ends with this error."""

    error: Exception


@dataclass(frozen=True)
class BoundaryMade:
    """A finished action and its result, which lies in this member's shared memory."""

    event: p.Computed | p.BatchEvaluated
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class StatesGiven:
    """The end of a fetch: `LoopChannel.gather` has got the states of all shards."""


Evaluated: TypeAlias = BatchAssignment | p.EvaluationEnded
Outcome: TypeAlias = Assignment | TaskAssignment | p.WarmUp | p.Advance | p.Enter | StatesGiven | Evaluated | LoopOver
Gather: TypeAlias = Callable[[ShardState, Callable[[], bool]], bool]
"""Copies a state, then asks whether it is intact, and returns the answer."""
Told: TypeAlias = p.Event | StepBegun | TryAgain | LoopFailed | BoundaryMade


@dataclass(frozen=True)
class Landed:
    """Results that have landed."""

    make: Callable[[], Told]
    """Makes the event in the engine's thread, which may wait for the device."""
    event: DeviceEvent
    """The event that the engine's stream waits for before it uses the results."""
    is_boundary: bool = False


class LoopChannel:
    """The channel between two threads: the methods of each half belong to one thread.

    `wake` interrupts the engine's wait. `whereabouts` is told where the loop is. `landing` holds results back until the
    device has finished them.
    """

    def __init__(
        self, wake: Callable[[], None], whereabouts: LoopHeartbeat | None = None, landing: Landing | None = None
    ) -> None:
        self.wake = wake
        self.whereabouts = whereabouts or LoopHeartbeat()
        self.landing = landing or Landing()
        self.submitted = self.landing.port.record()
        """The event behind all that the engine had submitted before it gave the last outcome."""
        self._told: deque[Told | Landed] = deque()
        self._outcomes: queue.SimpleQueue[tuple[Outcome, DeviceEvent] | None] = queue.SimpleQueue()
        """None means that nothing more will come (see `_failure`)."""
        self._has_computed = False
        """True if the loop was given a run or an action when it last asked for work."""
        self._gather: Gather = lambda state, is_intact: is_intact()
        """Takes the states that the loop waits for. The engine's thread calls it."""
        self._failure: Exception | None = None
        self._ended = False

    def tell(self, *told: Told) -> None:
        """Send events to the engine, which takes them together. Never blocks."""
        self._told.extend(told)
        self.wake()

    def tell_landed(
        self, *made: Callable[[], Told], after: Sequence[DeviceEvent] = (), is_boundary: bool = False
    ) -> None:
        """Send events about results of the loop's stream once they have landed. Never blocks, and keeps the order.

        Args:
            made: Functions that make the events in the engine's thread; on the host they are called at once.
            after: Events of other streams that have to be reached, too.
            is_boundary: Whether the first event is a `BoundaryMade`.
        """
        self.landing.then(partial(self._tell_landed, made, is_boundary), after)

    def _tell_landed(
        self,
        made: Sequence[Callable[[], Told]],
        is_boundary: bool,
        event: DeviceEvent | None,
        error: Exception | None,
    ) -> None:
        if error is not None:
            self.tell(LoopFailed(error))
        elif event is None:
            self.tell(*(make() for make in made))
        else:
            self._told.extend(Landed(make, event, is_boundary and make is made[0]) for make in made)
            self.wake()

    def wait(self) -> Outcome:
        """Wait for the next outcome. Raises the error that ended the engine; StoppedError if it was closed.

        Later work of the calling thread's stream waits for what the engine had submitted before it gave the outcome.
        """
        self.whereabouts.enter(Station.WAITING)
        try:
            outcome, submitted = self._wait()
        except Exception:
            self.whereabouts.enter(Station.OUTSIDE)
            raise
        self.whereabouts.enter(_place_after(outcome))
        submitted.wait()
        self.submitted = submitted
        return outcome

    def _wait(self) -> tuple[Outcome, DeviceEvent]:
        while True:
            try:
                given = self._outcomes.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                given = None
            if given is not None:
                return given
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StoppedError("the engine has ended")

    def next_work(self) -> Assignment | TaskAssignment | p.WarmUp | p.Advance | LoopOver:
        """Wait for a run or an action to compute, or for the end of the step.

        On a device, ask for it while the present one lands.
        """
        if self._has_computed and not self.landing.port.is_host:
            self.tell(p.Submitted())
        self.tell_landed(p.Ready)
        outcome = self.wait()
        assert not isinstance(outcome, p.Enter | StatesGiven | Evaluated)
        self._has_computed = isinstance(outcome, Assignment | TaskAssignment)
        return outcome

    def gather(self, state: ShardState, is_intact: Callable[[], bool]) -> bool:
        """Give the loop, which waits, a state that it has asked for. See `elastrain.buffers.port.FetchSink`."""
        return self._gather(state, is_intact)

    def fetch_states(self, gather: Gather) -> None:
        """Wait until the states of all shards were given to a function. Call it between two steps.

        The engine's thread calls the function, with states that change later: it copies what it keeps. Raises
        StoppedError if the job has ended meanwhile.
        """
        self._gather = gather
        self.tell(p.StateWanted())
        outcome = self.wait()
        if not isinstance(outcome, StatesGiven):
            raise StoppedError("the job has ended")

    def evaluate(
        self, told: p.EvaluationBegun | p.BatchEvaluated | BoundaryMade, after: Sequence[DeviceEvent] = ()
    ) -> Evaluated:
        """Return the next batch of an evaluation, or its end. Call it between two steps.

        `after`: events to be reached before the engine gets `told`. Raises StoppedError if the job has ended meanwhile.
        """
        self.tell_landed(lambda: told, after=after)
        outcome = self.wait()
        if not isinstance(outcome, Evaluated):
            raise StoppedError("the job has ended")
        return outcome

    def try_again(self, assignment: Assignment) -> Assignment:
        """Ask for another slot for a run whose backward failed. Raises StoppedError if the job has ended meanwhile."""
        self.tell_landed(partial(TryAgain, assignment.compute))
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
        """Yield what the loop has sent, until nothing is left: boundary tensors of each run or action first.

        Another member waits for a boundary tensor, but none waits for gradient sums that were sent before it. All else
        is in order, and nothing is taken before the end of the run or action in front of it.
        """
        while self._told:
            together: list[Told | Landed] = []
            while self._told and not (together and _is_end(together[-1])):
                together.append(self._told.popleft())
            for told in sorted(together, key=lambda each: not _is_boundary(each)):
                if isinstance(told, Landed):
                    told.event.wait()
                    yield told.make()
                else:
                    yield told

    def give(self, outcome: Outcome) -> None:
        """Give the loop its next outcome, which the loop's stream uses behind all work of the engine's stream."""
        self._outcomes.put((outcome, self.landing.port.record()))

    def end(self, failure: Exception | None = None) -> None:
        """End the channel: nothing more will come. `failure` is raised in the main thread; the first one counts."""
        self._failure = self._failure or failure
        self._ended = True
        self._outcomes.put(None)


def _is_end(told: Told | Landed) -> bool:
    return told.make is p.Ready if isinstance(told, Landed) else isinstance(told, p.Ready)


def _is_boundary(told: Told | Landed) -> bool:
    return told.is_boundary if isinstance(told, Landed) else isinstance(told, BoundaryMade)


def _place_after(outcome: Outcome) -> Station:
    match outcome:
        case Assignment() | TaskAssignment() | p.WarmUp():
            return Station.COMPUTING
        case p.Advance() | p.Enter() | StatesGiven() | BatchAssignment() | p.EvaluationEnded():
            return Station.BETWEEN
        case LoopOver():
            return Station.OUTSIDE
