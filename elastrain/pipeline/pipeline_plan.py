"""The plan of pipelines as one value; replicas of blocks and routes of runs are functions of it. Pure.

There is no grid and no stage number: pipelines may differ in length, and data parallelism is pipelines of one member.
All derived values depend on the plan alone, so every member computes the same ones. Boundary tensors are named by what
they are, never by the member that made them.
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
        """The blocks of the stretch."""
        return range(self.begin, self.end)


Route = tuple[Task, ...]
"""The tasks of one run, from the batch to the loss. Routes of different runs may be cut at different places."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A chain of members with a share of the runs."""

    # In the order of the blocks, which is the order in which a micro-batch visits the members.
    members: tuple[str, ...]
    cuts: tuple[int, ...]
    """The cut between each two neighbouring members, ascending."""
    # A number is enough: the order of the pipelines says which runs they are, and runs have no state.
    share: int
    """The number of runs of a step that go through this pipeline."""
    limits: tuple[int, ...]
    """In-flight limit of each member: how many micro-batches it may have in flight (see `actions.choose`)."""

    def __post_init__(self) -> None:
        if not len(self.members) == len(self.cuts) + 1 == len(self.limits) or list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(f"a pipeline has one member more than ascending cuts, and a limit for each; got {self}")

    def stretches(self, blocks: int) -> dict[str, tuple[int, int]]:
        """Return the stretch `[begin, end)` of each member. `blocks` is the number of blocks of the model."""
        return dict(zip(self.members, pairwise((0, *self.cuts, blocks)), strict=True))


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """All pipelines of the job: which member holds which blocks and computes which runs."""

    blocks: int
    pipelines: tuple[Pipeline, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """All members, pipeline by pipeline."""
        return tuple(member for pipeline in self.pipelines for member in pipeline.members)

    @property
    def runs(self) -> int:
        """The number of runs of a step."""
        return sum(pipeline.share for pipeline in self.pipelines)

    @property
    def limits(self) -> dict[str, int]:
        """In-flight limit of each member: how many micro-batches it may have in flight."""
        return {m: limit for each in self.pipelines for m, limit in zip(each.members, each.limits, strict=True)}


def replicas(plan: PipelinePlan) -> tuple[tuple[str, ...], ...]:
    """Return, for each block, the members that have its parameters and may compute it, in the plan's order."""
    # The order is fixed, because all members that choose the first of several equals have to choose the same one.
    found: list[list[str]] = [[] for _ in range(plan.blocks)]
    for pipeline in plan.pipelines:
        for member, (begin, end) in pipeline.stretches(plan.blocks).items():
            for block in range(begin, end):
                found[block].append(member)
    return tuple(map(tuple, found))


def held(plan: PipelinePlan) -> dict[str, frozenset[int]]:
    """Return the blocks of which each member is a replica."""
    return {
        member: frozenset(range(begin, end))
        for pipeline in plan.pipelines
        for member, (begin, end) in pipeline.stretches(plan.blocks).items()
    }


def routes(plan: PipelinePlan) -> tuple[Route, ...]:
    """Return the tasks of each run. Each pipeline gets consecutive runs."""
    # Consecutive runs lie under few nodes of the fold: a member adds most of its gradients before it sends anything.
    found: list[Route] = []
    for pipeline in plan.pipelines:
        stretches = pipeline.stretches(plan.blocks)
        for run in range(len(found), len(found) + pipeline.share):
            found.append(tuple(Task(run, begin, end, member) for member, (begin, end) in stretches.items()))
    return tuple(found)


class Direction(StrEnum):
    """The direction of a boundary tensor: activations go from the batch to the loss, gradients go back."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, order=True)
class BoundaryName:
    """The name of everything that crosses one cut for one micro-batch in one direction.

    The maker is not part of the name: any member that makes the tensor makes the same bits, and a reader takes the
    first copy that comes.
    """

    # The step is part of the name, so a late tensor of the step before is never taken for one of this step.
    step: int
    micro_batch: int
    cut: int
    direction: Direction
