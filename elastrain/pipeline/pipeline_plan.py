"""The plan of pipelines as one value; replicas of blocks and routes of runs are functions of it. Pure.

There is no grid and no stage number: pipelines may differ in length, and data parallelism is pipelines of one member.
All derived values depend on the plan alone, so every member computes the same ones. Boundary tensors are named by what
they are, never by the member that made them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple


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


class Bound(NamedTuple):
    """A bound that differs from run to run: some groups of runs are cut at `cut`, the others at `deeper`.

    Groups begin at multiples of their size, so all runs of a group lie under one node of the fold. The groups that are
    cut deeper are spread evenly.
    """

    cut: int
    deeper: int
    deep: int
    """The number of groups that are cut at `deeper`, of each `groups` groups."""
    groups: int
    size: int
    """Runs per group."""

    @property
    def position(self) -> float:
        """The mean of the cuts of all runs: 5.3 if three tenths of the runs are cut at 6, and the others at 5."""
        return self.cut + (self.deeper - self.cut) * self.deep / self.groups

    def of(self, run: int, first: int) -> int:
        """Return the cut of one run. `first` is the first run of the pipeline."""
        # Whole numbers, so that all members compute the same cuts.
        group = run // self.size - first // self.size
        # The count of deeper groups so far rises by one exactly at a deeper group.
        is_deep = (group + 1) * self.deep // self.groups > group * self.deep // self.groups
        return self.deeper if is_deep else self.cut


Cuts = tuple[int | Bound, ...]
"""The cut between each two neighbouring members: a number where it is the same for all runs, else a bound."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A chain of members with a share of the runs."""

    # In the order of the blocks, which is the order in which a micro-batch visits the members.
    members: tuple[str, ...]
    cuts: Cuts
    """The cut between each two neighbouring members, ascending. Of two bounds both ends ascend."""
    # A number is enough: the order of the pipelines says which runs they are, and runs have no state.
    share: int
    """The number of runs of a step that go through this pipeline."""
    limits: tuple[int, ...]
    """In-flight limit of each member: how many micro-batches it may have in flight (see `actions.choose`)."""
    is_split: bool = True
    """True if a backward computes the gradient of its input first, and the weight gradients in a later bubble."""

    def __post_init__(self) -> None:
        ends = [(cut, cut) if isinstance(cut, int) else (cut.cut, cut.deeper) for cut in self.cuts]
        ascend = all(a <= c and b <= d and a < d for (a, b), (c, d) in pairwise(ends)) and all(a <= b for a, b in ends)
        if not len(self.members) == len(self.cuts) + 1 == len(self.limits) or not ascend:
            raise ValueError(f"a pipeline has one member more than ascending cuts, and a limit for each; got {self}")

    def stretches(self, blocks: int) -> dict[str, tuple[int, int]]:
        """Return the stretch `[begin, end)` of each member, the union over all runs.

        `blocks` is the number of blocks of the model.
        """
        begins = (0, *(cut if isinstance(cut, int) else cut.cut for cut in self.cuts))
        ends = (*(cut if isinstance(cut, int) else cut.deeper for cut in self.cuts), blocks)
        return dict(zip(self.members, zip(begins, ends, strict=True), strict=True))

    def route(self, run: int, first: int, blocks: int) -> Route:
        """Return the tasks of one run. `first` is the first run of the pipeline."""
        points = [0]
        for cut in self.cuts:
            # Two bounds with the same ends may choose different runs; the second never lies before the first.
            points.append(max(points[-1], cut if isinstance(cut, int) else cut.of(run, first)))
        stretches = pairwise((*points, blocks))
        # A member between two bounds may have no block in some runs. It has no task then.
        return tuple(Task(run, a, b, member) for member, (a, b) in zip(self.members, stretches, strict=True) if a < b)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """All pipelines of the job: which member holds which blocks and computes which runs."""

    blocks: int
    pipelines: tuple[Pipeline, ...]
    """A member may stand in several of them, with the same blocks in each: it takes runs of a lost member then."""
    coming: tuple[Pipeline, ...] = ()
    """Pipelines that follow these once their members have the blocks. Until then they are shadows of these blocks."""
    named: int = -1
    """The step whose record has named the shadows. -1 without shadows."""
    standing: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Members that keep the parameters of blocks which only one other member computes, and these blocks."""

    def __post_init__(self) -> None:
        found: dict[str, tuple[int, int]] = {}
        for pipeline in self.pipelines:
            for member, stretch in pipeline.stretches(self.blocks).items():
                if found.setdefault(member, stretch) != stretch:
                    raise ValueError(f"{member} has blocks {found[member]} in one pipeline and {stretch} in another")

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over the whole plan."""
        return blake2b(repr(self).encode(), digest_size=16, person=b"elastrain-plan").hexdigest()

    @property
    def goal(self) -> PipelinePlan:
        """The plan that follows once the blocks have moved. This plan itself if none moves."""
        return replace(self, pipelines=self.coming, coming=(), named=-1) if self.coming else self

    @property
    def members(self) -> tuple[str, ...]:
        """All members, each once, pipeline by pipeline."""
        return tuple(dict.fromkeys(member for pipeline in self.pipelines for member in pipeline.members))

    @property
    def runs(self) -> int:
        """The number of runs of a step."""
        return sum(pipeline.share for pipeline in self.pipelines)

    def described(self) -> tuple[dict[str, Any], ...]:
        """Return each pipeline with its runs and each member's stretch of blocks, for logs and `elastrain status`."""
        return tuple(
            {"runs": each.share, "blocks": each.stretches(self.blocks), "limits": each.limits}
            for each in self.pipelines
        )

    @cached_property
    def split(self) -> frozenset[str]:
        """The members that split their backwards: those of pipelines that do."""
        return frozenset(member for pipeline in self.pipelines if pipeline.is_split for member in pipeline.members)

    @property
    def limits(self) -> dict[str, int]:
        """In-flight limit of each member: how many micro-batches it may have in flight."""
        found: dict[str, int] = {}
        for pipeline in self.pipelines:
            for member, limit in zip(pipeline.members, pipeline.limits, strict=True):
                found[member] = max(limit, found.get(member, 0))
        return found


def replicas(plan: PipelinePlan) -> tuple[tuple[str, ...], ...]:
    """Return, for each block, the members that compute it in some run, in the plan's order."""
    # The order is fixed, because all members that choose the first of several equals have to choose the same one.
    found: list[dict[str, None]] = [{} for _ in range(plan.blocks)]
    for pipeline in plan.pipelines:
        for member, (begin, end) in pipeline.stretches(plan.blocks).items():
            for block in range(begin, end):
                found[block][member] = None
    return tuple(map(tuple, found))


def held(plan: PipelinePlan) -> dict[str, frozenset[int]]:
    """Return the blocks of which each member is a replica: those of all its runs."""
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
        first = len(found)
        found += [pipeline.route(run, first, plan.blocks) for run in range(first, first + pipeline.share)]
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
