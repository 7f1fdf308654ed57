"""The plan of pipelines as one value; replicas of blocks and routes of runs are functions of it.

There is no grid and no stage number: pipelines may differ in length, and data parallelism is pipelines of one member.
What follows from a plan follows from it alone, so that every member comes to the same.

Names of boundary tensors: what crosses a cut for one micro-batch, by what it is and never by who made it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


@dataclass(frozen=True, order=True)
class Task:
    """A stretch of consecutive blocks, `[begin, end)`, of one run on one member."""

    run: int
    begin: int
    end: int
    member: str

    @property
    def blocks(self) -> range:
        return range(self.begin, self.end)


Route = tuple[Task, ...]
"""The tasks of one run, from the batch to the loss. A route is per run: later ones may be cut at other places."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A chain of members with a share of the runs."""

    # In the order of the blocks, which is the order in which a micro-batch visits them.
    members: tuple[str, ...]
    cuts: tuple[int, ...]
    """Between each two members, ascending: where the one ends and the next begins."""
    # A number and no list of runs: which runs they are follows from the order of the pipelines, and runs have no state.
    share: int
    """How many runs of a step go through it."""
    limits: tuple[int, ...]
    """By member: how many micro-batches it may have in flight (see `actions.choose`)."""

    def __post_init__(self) -> None:
        if not len(self.members) == len(self.cuts) + 1 == len(self.limits) or list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(f"a pipeline has one member more than ascending cuts, and a limit for each; got {self}")

    def stretches(self, blocks: int) -> dict[str, tuple[int, int]]:
        """Member -> the blocks `[begin, end)` that it computes, of `blocks` in all."""
        return dict(zip(self.members, pairwise((0, *self.cuts, blocks)), strict=True))


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """All pipelines: who holds which blocks and computes which runs."""

    blocks: int
    pipelines: tuple[Pipeline, ...]

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(member for pipeline in self.pipelines for member in pipeline.members)

    @property
    def runs(self) -> int:
        return sum(pipeline.share for pipeline in self.pipelines)

    @property
    def limits(self) -> dict[str, int]:
        """Member -> how many micro-batches it may have in flight."""
        return {m: limit for each in self.pipelines for m, limit in zip(each.members, each.limits, strict=True)}


def replicas(plan: PipelinePlan) -> tuple[tuple[str, ...], ...]:
    """By block: the members that have its parameters and may compute it, in the plan's order."""
    # In the plan's order, because whoever chooses the first of several equals has to come to the same member.
    found: list[list[str]] = [[] for _ in range(plan.blocks)]
    for pipeline in plan.pipelines:
        for member, (begin, end) in pipeline.stretches(plan.blocks).items():
            for block in range(begin, end):
                found[block].append(member)
    return tuple(map(tuple, found))


def held(plan: PipelinePlan) -> dict[str, frozenset[int]]:
    """Member -> the blocks of which it is a replica."""
    return {
        member: frozenset(range(begin, end))
        for pipeline in plan.pipelines
        for member, (begin, end) in pipeline.stretches(plan.blocks).items()
    }


def routes(plan: PipelinePlan) -> tuple[Route, ...]:
    """By run: its tasks. Each pipeline gets consecutive runs."""
    # Consecutive runs lie under few nodes of the fold: a member adds most of what it has before it sends anything.
    found: list[Route] = []
    for pipeline in plan.pipelines:
        stretches = pipeline.stretches(plan.blocks)
        for run in range(len(found), len(found) + pipeline.share):
            found.append(tuple(Task(run, begin, end, member) for member, (begin, end) in stretches.items()))
    return tuple(found)


class Direction(StrEnum):
    """Which way a boundary tensor goes: activations from the batch to the loss, gradients back."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, order=True)
class BoundaryName:
    """Everything that crosses one cut for one micro-batch in one direction.

    Without the maker: who makes it again makes the same bits, and whoever reads it takes the first copy that comes.
    """

    # The step is part of the name: a late tensor of the step before must never be taken for one of this step.
    step: int
    micro_batch: int
    cut: int
    direction: Direction
