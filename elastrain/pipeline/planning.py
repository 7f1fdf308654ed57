"""The planner of pipelines: the first plan, and the next one after losses and joins, with as few moves as possible.

Pure. FLOPs are the only measure of load here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from elastrain.job.run_plan import shares_by_speed
from elastrain.pipeline.cuts import Had, LineUp, line_up
from elastrain.pipeline.graph import BlockGraph, check_stages
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan, held

IS_SPLIT = False
"""Under the limits of 1F1B a split backward fills few bubbles, and costs an action more. The planner may split it."""


@dataclass(frozen=True, kw_only=True)
class PlanWish:
    """The settings that hold for every plan: members per pipeline (`--stages`), and runs per step."""

    stages: int
    runs: int
    is_least: bool = False
    """True if pipelines of fewer members have no room in memory (`--stages auto`)."""


@dataclass
class _Line:
    """A pipeline while the next plan is made: staying members in order, joining members, and the pipeline as it was."""

    staying: list[str]
    coming: list[str]
    before: Pipeline | None = None

    @property
    def length(self) -> int:
        """Number of members."""
        return len(self.staying) + len(self.coming)


def pipelines_wanted(graph: BlockGraph, members: int, wish: PlanWish) -> int:
    """Return members / stages, rounded half up, but at least 1 and enough pipelines that every member gets a unit.

    Where no pipeline may have fewer members, it is rounded down.
    """
    if wish.is_least:
        # Half a pipeline would leave its members more blocks than they have room for.
        return min(members, max(1, members // wish.stages, ceil(members / len(graph.units))))
    # Half rounds up: two pipelines of two that lose a member stay two, and a replacement finds its place again.
    rounded = (2 * members + wish.stages) // (2 * wish.stages)
    return min(members, max(1, rounded, ceil(members / len(graph.units))))


def first_plan(graph: BlockGraph, members: Sequence[str], wish: PlanWish) -> PipelinePlan:
    """Plan the start: pipelines of consecutive ranks, as even as possible, the longer ones first.

    At the start every member has the whole model, so no block moves. Raises ConfigError or CutError if the model has
    too few legal cuts.
    """
    # Checked again here although the caller may have checked: the search below needs enough legal cuts.
    check_stages(graph, wish.stages)
    count = pipelines_wanted(graph, len(members), wish)
    everything = dict.fromkeys(members, frozenset(range(len(graph.blocks))))
    lines, start = [], 0
    for index in range(count):
        length = len(members) // count + (index < len(members) % count)
        lines.append(_pipeline(line_up(graph, [(m, everything[m]) for m in members[start : start + length]])))
        start += length
    return _plan(graph, lines, wish.runs)


def next_plan(
    graph: BlockGraph,
    plan: PipelinePlan,
    members: Sequence[str],
    wish: PlanWish,
    adopted: Mapping[str, Had] | None = None,
) -> PipelinePlan:
    """Plan the next view: lost members are removed, and joined members go to the shortest pipeline.

    A pipeline whose members stay the same keeps its cuts.

    Args:
        graph: The block graph of the model.
        plan: The plan of the view before.
        members: The members of the next view, in rank order.
        wish: Stages and runs of the job.
        adopted: Member -> blocks that a recovery gave it in addition to those of `plan`.

    Raises:
        ConfigError: If `stages` is below 1.
        CutError: If the model has too few legal cuts.
    """
    check_stages(graph, wish.stages)
    # Blocks adopted in the open step count as held, or the next plan would send them once more.
    has = {m: blocks | (adopted or {}).get(m, frozenset()) for m, blocks in held(plan).items() if m in members}
    has.update({m: frozenset((adopted or {}).get(m, frozenset())) for m in members if m not in has})
    ordered = [_cut(graph, line, has) for line in _regrouped(graph, plan, members, wish)]
    return _plan(graph, ordered, wish.runs)


def _regrouped(graph: BlockGraph, plan: PipelinePlan, members: Sequence[str], wish: PlanWish) -> list[_Line]:
    """Assign members to pipelines; cuts and order come later."""
    lines = _survivors(plan, frozenset(members))
    # The number of pipelines is fixed first, because a newcomer may open another pipeline.
    wanted = pipelines_wanted(graph, len(members), wish)
    known = set(plan.members)
    free = [member for member in members if member not in known]
    while len(lines) > wanted:
        # Dissolve the shortest pipeline: there the fewest members change their blocks.
        free += lines.pop(min(range(len(lines)), key=lambda i: (lines[i].length, -i))).staying
    while len(lines) < wanted:
        lines.append(_Line([], [free.pop(0) if free else _taken(lines)]))
    for member in free:
        # The shortest pipeline is the slowest and has the most loaded members, so one more helps most there.
        min(lines, key=lambda line: line.length).coming.append(member)
    return _fitting(graph, _lengthened(lines, wish.stages) if wish.is_least else lines)


def _survivors(plan: PipelinePlan, alive: Collection[str]) -> list[_Line]:
    # Survivors keep their order, so each already has most of the blocks that it will get. A member that stands in
    # several pipelines stays in the first one.
    lines, placed = [], set[str]()
    for pipeline in plan.pipelines:
        lines.append(_Line([m for m in pipeline.members if m in alive and m not in placed], [], pipeline))
        placed.update(pipeline.members)
    return [line for line in lines if line.staying]


def _lengthened(lines: list[_Line], least: int) -> list[_Line]:
    """Move members of longer pipelines to those that have fewer than `least`."""
    # Members of a long pipeline are taken from its end, so that the others keep their places.
    while True:
        shortest, longest = min(lines, key=lambda line: line.length), max(lines, key=lambda line: line.length)
        if shortest.length >= least or longest.length - shortest.length < 2:
            return lines
        shortest.coming.append((longest.coming or longest.staying).pop())


def _taken(lines: list[_Line]) -> str:
    """Remove the last member of the longest pipeline and return it, for a new pipeline."""
    return max(lines, key=lambda line: line.length).staying.pop()


def _fitting(graph: BlockGraph, lines: list[_Line]) -> list[_Line]:
    """Move members of a chain that is longer than the legal cuts allow to the shortest chain."""
    # A member without blocks would compute and hold nothing, so every member needs at least one unit.
    most = len(graph.units)
    for line in lines:
        while line.length > most:
            member = (line.coming or line.staying).pop()
            min(lines, key=lambda each: each.length).coming.append(member)
    return lines


def _cut(graph: BlockGraph, line: _Line, has: Mapping[str, Had]) -> Pipeline:
    before = line.before
    if before is not None and not line.coming and tuple(line.staying) == before.members:
        # The cuts stay even if a better cut exists by now: none of these members was lost, and a move costs a publish.
        return before
    return _pipeline(line_up(graph, [(m, has[m]) for m in line.staying], [(m, has[m]) for m in line.coming]))


def _pipeline(line: LineUp) -> Pipeline:
    limits = one_f_one_b(len(line.members))
    return Pipeline(members=line.members, cuts=line.cuts, share=0, limits=limits, is_split=IS_SPLIT)


def _plan(graph: BlockGraph, lines: Sequence[Pipeline], runs: int) -> PipelinePlan:
    # A chain of twice as many members takes twice as many runs. Moving runs between chains moves no state.
    shared = shares_by_speed(runs, [len(line.members) for line in lines])
    pipelines = tuple(replace(line, share=share) for line, share in zip(lines, shared, strict=True))
    return PipelinePlan(blocks=len(graph.blocks), pipelines=pipelines)


def one_f_one_b(members: int) -> tuple[int, ...]:
    """Return the in-flight limits of 1F1B: for each member, the number of members from it to the end of its chain."""
    # A higher limit would fill a little of the warm-up bubble and cost memory. A lower one would leave members idle.
    return tuple(range(members, 0, -1))
