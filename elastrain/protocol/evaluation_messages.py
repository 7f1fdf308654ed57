"""Messages between members during an evaluation that they share, in the order in which they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastrain.pipeline.forward_chains import ChainStage
from elastrain.pipeline.graph import CrossingTensor
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction


# Not by a count alone: a newcomer begins to count in the body of its first step, as all members do there.
@dataclass(frozen=True, order=True, kw_only=True)
class EvaluationName:
    """Identity of a call of `job.evaluate` or `job.broadcast`, equal on all members."""

    after: int
    """Step that is committed."""
    step: int
    """Step in whose body the call is: `after`, or the next one."""
    number: int
    """Calls before it in the same body."""
    from_rank: int | None = field(default=None, compare=False, repr=False)
    """Rank of the member that gives the value of a broadcast; None: an evaluation.

    It is not compared: members that call different ones at the same place have to find each other.
    """

    @property
    def call(self) -> str:
        """The call, as scripts write it."""
        return "job.evaluate(…)" if self.from_rank is None else f"job.broadcast(…, from_rank={self.from_rank})"


# To all, so that a member that has gone on without this evaluation can say so.
@dataclass(frozen=True, kw_only=True)
class InEvaluation:
    """A notice that the sender's loop is in this evaluation. It is repeated in each view until the result is known."""

    name: EvaluationName
    plan: str
    """Data and batches, in words, for the receiver to compare."""
    batches: int
    done: tuple[tuple[int, str, str], ...]
    """Batches that the sender has computed, with their figures, or the reason why one failed."""


@dataclass(frozen=True, kw_only=True)
class EvaluateBatches:
    """Batches that the receiver shall compute, from the collector."""

    name: EvaluationName
    batches: tuple[int, ...]
    chain: tuple[ChainStage, ...] = ()
    """The chain through which they go, to all its members; empty if the receiver computes them as a whole."""
    over: tuple[int, ...] = ()
    """Earlier batches of this chain whose figures are known: no member reads their boundary tensors any more."""


# Straight to the next member: the collector has told it of the chain, and is not in the way of the tensors. It may come
# before the collector's word, from which the receiver knows its blocks.
@dataclass(frozen=True, kw_only=True)
class BatchBoundary:
    """Boundary tensors of a batch, for the next member of its chain. They are sent with it."""

    name: EvaluationName
    batch: int
    cut: int
    tensors: tuple[CrossingTensor | None, ...]

    @property
    def at(self) -> BoundaryName:
        """The name by which both members keep the tensors."""
        return boundary_name(self.name, self.batch, self.cut)


# To all: whoever publishes a shard has to know all of its readers, and a member that reports later counts as a replica.
@dataclass(frozen=True, kw_only=True)
class BlocksAdopted:
    """A notice that the sender computes these blocks of the graph, too, until the next commit.

    The primaries of the shards in them publish their parameters to it.
    """

    name: EvaluationName
    places: tuple[int, ...]


# Negative in place of the micro-batch, so that the open step's own boundary tensors are never taken for these.
def boundary_name(name: EvaluationName, batch: int, cut: int) -> BoundaryName:
    """Return the name of what crosses a cut for a batch. It is that of no micro-batch of the open step."""
    return BoundaryName(name.after + 1, -1 - batch, cut, Direction.ACTIVATION)


@dataclass(frozen=True, kw_only=True)
class BatchFigures:
    """The figures of a batch as text, or the reason why it failed; for the collector."""

    name: EvaluationName
    batch: int
    figures: str
    problem: str


# It is kept until the next commit: a newcomer asks for it in its first step.
@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The sums as text, or the reason why the evaluation failed. From any member that has it, to those in it."""

    name: EvaluationName
    figures: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class OutsideEvaluation:
    """A notice that the sender's loop began behind this evaluation, and is not waited for."""

    name: EvaluationName
