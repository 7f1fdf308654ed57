"""Events of the training loop, which reach the member's machine through the channel from the loop's thread."""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.job.streams import StreamMark
from elastrain.job.values import Check, Contribution, TracedGraph
from elastrain.pipeline.actions import TaskAction
from elastrain.protocol.evaluation_messages import EvaluationName
from elastrain.protocol.messages import Boundary


# Every member captures `state` in every step, since it is unknown when a newcomer comes and which member sends it.
@dataclass(frozen=True, kw_only=True)
class Began:
    """The training loop's entry into `step` with these settings. `state` is what a newcomer needs to enter it too."""

    step: int
    settings: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The training loop's request to go on: it has nothing to compute."""

    # No commit happens without it: the script may still read the parameters that a commit overwrites.


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The training loop's request for its next run, once all work of its present one is submitted to the device.

    The results of the present run still land. The `Ready` behind them tells that it has ended, and asks for nothing.
    """


# By block: the last blocks of the model are reduced while the backward of the first ones still runs.
@dataclass(frozen=True, kw_only=True)
class BlockDone:
    """Completion of the gradient of one block over one run."""

    step: int
    run: int
    block: int
    contribution: Contribution
    touched: int


# Before the runs that read the stream are done, so that it is here when this member votes.
@dataclass(frozen=True, kw_only=True)
class StreamRead:
    """The mark of a stream that the loop has read in this step."""

    step: int
    mark: StreamMark


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Result of a run's first micro-batch alone, from a probed `Compute` or from `Recompute`. None: it was given up."""

    step: int
    run: int
    check: Check | None
    whole: bool = False
    """True if the result is that of the whole run, for an audit."""


# Once, before the loop first asks for work: a member gets no task of a graph that it has not traced.
@dataclass(frozen=True, kw_only=True)
class Traced:
    """End of the tracing pass, only in jobs with pipelines."""

    model: TracedGraph
    gradient_bytes: tuple[int, ...] = ()
    """Per block of the graph: one copy."""
    saved_bytes: tuple[int, ...] = ()
    """Per block of the graph: activations that one micro-batch keeps for its backward."""


# After the `BlockDone`s of the same backward, so that a finished task has all its gradients.
@dataclass(frozen=True, kw_only=True)
class Computed:
    """Completion of a task's action. If the task ends with the loss, `Forward` brings two: forward and backward."""

    step: int
    action: TaskAction
    made: Boundary | None
    """Boundary tensors for other members; None at the batch and at the loss. The driver has the tensors by then."""
    is_last: bool
    """True if the run's last gradients are in the slot. Nothing more is added to the task's gradients."""
    is_split: bool = False
    """True for a backward that has left its weight gradients to a later action."""
    took_s: tuple[float, ...] = ()
    """Seconds of a forward, one number for each block of the task; else the seconds of the action. Empty: unknown."""
    host_s: tuple[float, float] = (0.0, 0.0)
    """Seconds that the loop's thread waited before the action, and that it spent on it and on actions told with it."""


# Between two steps: the states stay as they are until the loop asks for work.
@dataclass(frozen=True, kw_only=True)
class StateWanted:
    """The training loop's request for the whole optimizer state of the committed step. Answer: `StateFetched`."""


# Between two steps, too: no member votes on the open step before its loop asks for work.
@dataclass(frozen=True, kw_only=True)
class EvaluationBegun:
    """The training loop's call of `job.evaluate` or `job.broadcast`.

    Answer, as to each batch: `EvaluateBatch` or `EvaluationEnded`.
    """

    name: EvaluationName
    plan: str
    """Data and batches, in words; equal on all members."""
    batches: int


@dataclass(frozen=True, kw_only=True)
class BatchEvaluated:
    """Result of `EvaluateBatch`: the figures as text, or the reason why it failed."""

    figures: str
    problem: str
    made: Boundary | None = None
    """Boundary tensors, if the batch goes on to another member. The driver has the tensors by then."""


# With the step, because loops that end by a decision of the script may end at different steps.
@dataclass(frozen=True, kw_only=True)
class LoopEnded:
    """End of the training loop, before `step`."""

    step: int
