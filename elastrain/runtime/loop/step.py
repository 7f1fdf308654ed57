"""One step as the training loop sees it: an iterator over the micro-batches that this member computes.

It goes on until the step is committed. If a member is lost, it also yields micro-batches that the member left undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, SupportsFloat

from torch import Tensor

from elastrain import protocol as p
from elastrain.errors import ConfigError, StoppedError
from elastrain.job.values import Record
from elastrain.runtime.io.loop_channel import Assignment, LoopOver, TaskAssignment
from elastrain.runtime.loop.computed_run import Run, StepParts
from elastrain.runtime.loop.pipelined import ActionForward, Pipelines
from elastrain.runtime.loop.told_numbers import check_loss, check_name, figure_of, weight_of
from elastrain.runtime.loop.tracing import TracingRun
from elastrain.runtime.loop_state.randomness import AFTER
from elastrain.runtime.tensors.tensor_arithmetic import grad_norm

if TYPE_CHECKING:
    from elastrain.runtime.loop_state.loop_state import LoopSnapshot


class Step:
    """One optimizer step. `number` counts from 0.

    `loss`, `samples`, `sums`, `skipped`, `grad_norm` and `loss_scale` are known after `for batch in step`.
    """

    def __init__(
        self,
        number: int,
        parts: StepParts,
        taken: LoopSnapshot,
        entering: Callable[[], None],
        pipelines: Pipelines | None = None,
    ) -> None:
        self.number = number
        self.is_overruled = False
        """True if most members left their loops before this step: it has no effect, and the job has ended."""
        self.undo: list[Tensor] = []
        """The bytes of the loop's state before an overruled step, to restore it after the body has run to its end."""
        self._parts = parts
        self._taken = taken
        self._entering = entering
        """Called once, when the body of the loop reaches its micro-batches."""
        self.committed: Callable[[Record], None] = lambda record: None
        """Called once the step is committed, before the rest of the loop's body runs."""
        self._has_entered = False
        self._pipelines = pipelines
        self._run: Run | TracingRun | ActionForward | None = None
        self._record: Record | None = None
        self._last_record: Record | None = None
        """The record of the previous step, if this one is overruled."""

    def __iter__(self) -> Iterator[Any]:
        if self._record is not None:
            raise ConfigError(f"step {self.number} is committed already: iterate over each step once")
        if not self._has_entered:
            self._has_entered = True
            self._entering()
        if self._pipelines is not None and not self._pipelines.is_traced:
            yield from self._trace(self._pipelines)
        while self._record is None and not self.is_overruled:
            self._parts.untouched.check()
            self._taken.check()
            work = self._parts.handover.next_work()
            if isinstance(work, p.Advance):
                self._commit(work.record)
            elif isinstance(work, LoopOver):
                self._end_uncommitted(work)
            elif isinstance(work, Assignment):
                self._run = Run(self.number, work, self._parts)
                yield from self._run
            else:
                yield from self._act(work)
            # Frees the slot of a check now, before the commit creates states of shards.
            self._run = None
            del work

    def backward(self, loss: Tensor, *, weight: SupportsFloat = 1.0) -> None:
        """Compute the backward of one micro-batch. Call it exactly once per micro-batch.

        The applied gradient is `Σ weight·gradient / Σ weight` over the global batch, on any number of members. If a
        drive does not return saved activations, the iterator yields the micro-batches of the run again. After
        `READ_TRIES` tries it raises DriveFailedError.

        Args:
            loss: Mean loss of the micro-batch.
            weight: Weight of the micro-batch, such as its number of tokens: a number or a tensor of one element, finite
                and not negative. With weight 0 the micro-batch has no effect, even if its loss is NaN. A step in which
                all weights are 0 is skipped.
        """
        if self._run is None or not self._run.backward_is_due:
            raise ConfigError("call step.backward(loss) exactly once per micro-batch, inside `for batch in step`")
        check_loss(loss)
        self._run.backward(loss, weight_of(weight))

    def add(self, name: str, value: Any) -> None:
        """Add to a figure of the step, such as the number of correct answers. Call it before `backward`.

        After the step every member has the sum over the global batch in `sums`. It is folded like the loss, in float64:
        its bits do not depend on which member computed what. A micro-batch counts once, also if another member computes
        it again. A figure has to be a function of parameters, data and step; a time, for example, is none.

        Args:
            name: Name of the figure, up to 100 characters.
            value: A number or a tensor of one element. The loop does not wait for a tensor on a device.
        """
        if self._run is None or not self._run.backward_is_due:
            raise ConfigError(
                f"step.add({name!r}, …) comes inside `for batch in step`, before the step.backward(loss) that sends "
                "off what the micro-batch has counted"
            )
        check_name(name)
        if self._run.figures is not None:
            self._run.figures.note(name, figure_of(name, value))

    @property
    def micro_batch(self) -> int | None:
        """The micro-batch that is being computed, for error reports."""
        return self._run.micro_batch if self._run is not None else None

    @property
    def is_under_way(self) -> bool:
        """True from the entry into `for batch in step` until the step is committed or overruled."""
        return self._has_entered and self._record is None and not self.is_overruled

    @property
    def unfinished_micro_batch(self) -> int | None:
        """The first micro-batch whose work on the device is not known to have landed, for error reports."""
        oldest = self._parts.whereabouts.device.oldest
        return None if oldest is None else oldest.micro_batch

    @property
    def is_committed(self) -> bool:
        """True once the step is committed."""
        return self._record is not None

    @property
    def loss(self) -> float:
        """Weighted mean of the losses over the global batch; NaN if all weights are 0."""
        told = self._committed.contribution
        return told.loss / told.weight if told.weight else math.nan

    @property
    def samples(self) -> int:
        """Number of samples in the global batch."""
        return self._committed.contribution.samples

    @property
    def sums(self) -> dict[str, float]:
        """Sums over the global batch of what `add` was given, by name. Names that no micro-batch added are missing."""
        return dict(self._committed.contribution.sums)

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0, that the first sample of this step belongs to.

        An epoch may end inside a step: the step's other samples then belong to the next epoch.
        """
        return self._parts.loader.order.epoch(self.number)

    @property
    def skipped(self) -> bool:
        """True if the step was committed without changing parameters, because of a NaN, an overflow or no weight."""
        return self._committed.skipped

    @property
    def grad_norm(self) -> float:
        """Global norm of the averaged gradient, before clipping and without the loss scale."""
        return grad_norm(self._committed)

    @property
    def loss_scale(self) -> float:
        """Factor by which the losses of this step were multiplied, besides their weights."""
        return self._committed.scaler.scale

    @property
    def _committed(self) -> Record:
        """The record of this step or, if it is overruled, of the last committed one. Raises ConfigError if none."""
        record = self._last_record if self.is_overruled else self._record
        if record is None:
            raise ConfigError(f"step {self.number} is not committed yet: this is known after `for batch in step`")
        return record

    def _trace(self, pipelines: Pipelines) -> Iterator[Any]:
        """Run the body of the loop one extra time, in this member's first step, to record which blocks it enters."""
        self._run = tracing = pipelines.trace(self.number)
        yield from tracing
        assert tracing.traced is not None
        self._run = None
        self._parts.layers.begin_again()
        pipelines.begin(tracing.traced)

    def _act(self, work: TaskAssignment | p.WarmUp) -> Iterator[Any]:
        """Compute one action of a pipeline: a forward through the loop's body, or all others without it."""
        assert self._pipelines is not None
        if isinstance(work, p.WarmUp):
            self._pipelines.warm_up(work)
            return
        self._pipelines.clock.begin()
        if isinstance(work.compute, p.Forward):
            self._run = ActionForward(self.number, work, self._pipelines)
            yield from self._run
        else:
            self._pipelines.go_back(self.number, work)

    def _commit(self, record: Record) -> None:
        self._record = record
        self._parts.loader.committed(record.findings.marks)
        if self._pipelines is not None:
            assert not isinstance(record.plan, str), "the loop is given the whole plan"
            self._pipelines.end_step(record.plan)
        self._parts.model.statistics.refresh()
        self._parts.randomness.begin(self.number, AFTER)
        self._parts.untouched.settle()
        self._parts.layers.settle()
        self.committed(record)

    def _end_uncommitted(self, over: LoopOver) -> None:
        """End the step without a commit, because most members left their loops before it.

        Raises StoppedError if the job has ended in another way.
        """
        if not over.overruled:
            raise StoppedError("the job has ended")
        self.is_overruled = True
        self.undo = self._taken.payload()
        self._last_record = over.last
        self._parts.model.statistics.refresh()
        self._parts.untouched.settle()
