"""Commands for the training loop: what it computes in a step, and what it gets between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elastrain.pipeline.forward_chains import ChainStage
from elastrain.pipeline.pipeline_plan import BoundaryName, Task
from elastrain.protocol.evaluation_messages import EvaluationName, boundary_name


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Let the training loop compute this run, with losses multiplied by `loss_scale`. Answer if `probed`: `Checked`."""

    step: int
    run: int
    # From the last record, so that a newcomer scales like all others.
    loss_scale: float = 1.0
    probed: bool = False
    audited: bool = False
    """Answer with a second `Checked`, of the whole run."""


# The first micro-batch alone, because the others of a run are added to it in place and cannot be separated.


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Let the training loop compute the first micro-batch of another member's run, as a check. It adds to no gradient.

    Answer: `Checked`.
    """

    step: int
    run: int
    loss_scale: float = 1.0
    whole: bool = False
    """Compute the whole run, for an audit."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Let the training loop compute the forward of one micro-batch through a task. Answers: `Computed`, then `Ready`.

    If the task ends with the loss, the loop's backward follows at once: two `Computed`, the forward's first.
    """

    step: int
    task: Task
    micro_batch: int
    is_split: bool = False
    """Leave the weight gradients of the backward that follows to `WeightGradients`, if the loop can."""
    # From the last record, so that a newcomer scales like all others.
    loss_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Let the training loop compute the backward of a micro-batch after its forward.

    Answers: `BlockDone` of each block of the task if it gets the run's last gradient, `Computed`, then `Ready`.
    """

    step: int
    task: Task
    micro_batch: int
    is_split: bool = False
    """Leave the weight gradients to `WeightGradients`, if the loop can."""


@dataclass(frozen=True, kw_only=True)
class WeightGradients:
    """Let the training loop compute what a split backward has left. The answers are those of a backward.

    A whole backward that came in between has computed them already. Then there is only `Computed`.
    """

    step: int
    task: Task
    micro_batch: int


# Only while the loop has nothing else to do, because no member waits for a shadow.
@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Let the training loop compute blocks that are coming to this member once on zeros, without a trace.

    Answer: `Ready`.
    """

    step: int
    places: tuple[int, ...]
    """Places of the blocks in the graph."""


@dataclass(frozen=True, kw_only=True)
class StateFetched:
    """Give the training loop the states of all shards after `step`, as `TakeFetched` has copied them."""

    step: int


@dataclass(frozen=True, kw_only=True)
class EvaluateBatch:
    """Let the training loop evaluate a batch, or its forward through some blocks. Answer: `BatchEvaluated`."""

    name: EvaluationName
    batch: int
    stage: ChainStage | None = None
    """The blocks to compute, by what has crossed the cut above them; None: the whole model."""

    @property
    def received(self) -> BoundaryName | None:
        """The name of what has crossed that cut; None at the batch."""
        return boundary_name(self.name, self.batch, self.stage.begin) if self.stage and self.stage.begin else None


# Work on the member's buffers, like all commands of `work_commands`.
@dataclass(frozen=True, kw_only=True)
class DropBoundaries:
    """Drop boundary tensors of an evaluation that no member reads any more."""

    names: tuple[BoundaryName, ...]


@dataclass(frozen=True, kw_only=True)
class EvaluationEnded:
    """Give the training loop the sums of its evaluation as text, or the reason why it failed."""

    figures: str
    problem: str


LoopCommand: TypeAlias = (
    Compute | Recompute | Forward | Backward | WeightGradients | WarmUp | StateFetched | EvaluateBatch | EvaluationEnded
)
