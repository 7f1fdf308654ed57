"""One step as the training loop sees it: an iterator over the micro-batches that this member computes.

It goes on until the step is committed. If a member is lost, it also yields micro-batches that the member left undone.
`check_loss` and `weight_of` check the arguments of `step.backward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
from torch import Tensor

from elastrain import protocol as p
from elastrain.errors import ConfigError, StoppedError
from elastrain.job.values import Record
from elastrain.runtime.io.loop_channel import Assignment, LoopOver, TaskAssignment
from elastrain.runtime.loop.computed_run import Run, StepParts
from elastrain.runtime.loop.pipelined import ActionForward, Pipelines
from elastrain.runtime.loop.tracing import TracingRun
from elastrain.runtime.loop_state.randomness import AFTER
from elastrain.runtime.tensors.tensor_arithmetic import grad_norm

if TYPE_CHECKING:
    from elastrain.runtime.loop_state.loop_state import LoopSnapshot


def check_loss(loss: Any) -> None:
    """Raise ConfigError unless `loss` is a real scalar tensor with a graph."""
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"step.backward() takes the loss of a micro-batch as a tensor with its graph; got {type(loss).__name__}: "
            "pass the loss itself, not loss.item()"
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ConfigError(
            f"step.backward() takes the scalar loss of a model in training; got shape {tuple(loss.shape)}"
            + ("" if loss.requires_grad else " without a gradient: is everything under torch.no_grad()?")
        )
    if not loss.is_floating_point():
        raise ConfigError(f"step.backward() takes a loss of real numbers; got {loss.dtype}: use its .abs() or .real")


def weight_of(weight: Any) -> float:
    """Return the weight of a micro-batch as a float, from any number or from a tensor or array of one element.

    Raises ConfigError if it is no number, not finite, or negative.
    """
    number = _number(weight)
    if number is None:
        raise ConfigError(
            f"step.backward(weight=…) takes one number for the whole micro-batch; got {_what(weight)}: "
            "sum it up, as in weight=mask.sum()"
        )
    if not math.isfinite(number) or number < 0.0:
        raise ConfigError(
            f"step.backward(weight=…) takes a finite number from 0 on, such as the micro-batch's tokens; got {number}"
        )
    return number


def _number(weight: Any) -> float | None:
    if isinstance(weight, Tensor):
        return float(weight.detach()) if weight.numel() == 1 and not weight.is_complex() else None
    if isinstance(weight, np.ndarray):
        return float(weight.item()) if weight.size == 1 and weight.dtype.kind in "biuf" else None
    if isinstance(weight, str | bytes | np.complexfloating) or not isinstance(weight, SupportsFloat):
        return None
    try:
        return float(weight)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _what(weight: Any) -> str:
    if isinstance(weight, Tensor | np.ndarray):
        return f"a {type(weight).__name__} of shape {tuple(weight.shape)} and {weight.dtype}"
    return f"{weight!r}" if isinstance(weight, str | bytes) else f"a {type(weight).__name__}"


class Step:
    """One optimizer step. `number` counts from 0.

    `loss`, `samples`, `skipped`, `grad_norm` and `loss_scale` are known after `for batch in step`.
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

    def _act(self, work: TaskAssignment) -> Iterator[Any]:
        """Compute one action of a pipeline: a forward through the loop's body, or a backward without it."""
        assert self._pipelines is not None
        if isinstance(work.compute, p.Forward):
            self._run = ActionForward(self.number, work, self._pipelines)
            yield from self._run
        else:
            self._pipelines.go_back(self.number, work)

    def _commit(self, record: Record) -> None:
        self._record = record
        if self._pipelines is not None:
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
