"""Makes plans: the first one, and the next one after losses and joins with as little movement as possible.

Every function is pure and says why. FLOPs are the only measure here: plans by measured times come later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from elastrain.pipeline.cuts import Had, LineUp, line_up
from elastrain.pipeline.graph import BlockGraph, check_stages
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan, held


@dataclass(frozen=True, kw_only=True)
class PlanWish:
    """What the job asks of every plan: members per pipeline (`--stages`), and the runs of one step."""

    stages: int
    runs: int


@dataclass
class _Line:
    """A pipeline while the next plan is made: who stays in it in order, who comes, and what it was."""

    staying: list[str]
    coming: list[str]
    before: Pipeline | None = None

    @property
    def length(self) -> int:
        return len(self.staying) + len(self.coming)


def pipelines_wanted(graph: BlockGraph, members: int, stages: int) -> int:
    """As many pipelines as members / stages rounds to, a half upwards; at least one, and enough for everybody."""
    # A half upwards: two pipelines of two that lose a member stay two, and the replacement finds its place again.
    rounded = (2 * members + stages) // (2 * stages)
    return min(members, max(1, rounded, ceil(members / len(graph.units))))


def first_plan(graph: BlockGraph, members: Sequence[str], wish: PlanWish) -> PipelinePlan:
    """Plan the start: pipelines of consecutive ranks, as even as possible, the longer ones first.

    Everybody has the whole model then, so that no block moves. Raises ConfigError where there are too few legal cuts.
    """
    # In the first plan too, although its caller may have asked: a plan is never made for cuts that there are not.
    check_stages(graph, wish.stages)
    count = pipelines_wanted(graph, len(members), wish.stages)
    everything = dict.fromkeys(members, frozenset(range(len(graph.blocks))))
    lines, start = [], 0
    for index in range(count):
        length = len(members) // count + (index < len(members) % count)
        lines.append(line_up(graph, [(m, everything[m]) for m in members[start : start + length]]))
        start += length
    return _plan(graph, lines, wish.runs)


def next_plan(
    graph: BlockGraph,
    plan: PipelinePlan,
    members: Sequence[str],
    wish: PlanWish,
    adopted: Mapping[str, Had] | None = None,
) -> PipelinePlan:
    """Plan the next view: what was lost is taken out, who joined goes to the shortest pipeline.

    members: of the view, in rank order. adopted: member -> blocks that recovery gave it besides those of `plan`.
    A pipeline whose members stay the same keeps its cuts. Raises ConfigError as `first_plan` does.
    """
    check_stages(graph, wish.stages)
    # What recovery gave somebody in the open step counts as had: else the next plan would send it once more.
    has = {m: blocks | (adopted or {}).get(m, frozenset()) for m, blocks in held(plan).items() if m in members}
    has.update({m: frozenset((adopted or {}).get(m, frozenset())) for m in members if m not in has})
    ordered = [_cut(graph, line, has) for line in _regrouped(graph, plan, members, wish.stages)]
    return _plan(graph, ordered, wish.runs)


def _regrouped(graph: BlockGraph, plan: PipelinePlan, members: Sequence[str], stages: int) -> list[_Line]:
    """Say who is in which pipeline; cuts and order come later."""
    lines = _survivors(plan, frozenset(members))
    # The number of pipelines first, and then who is in which: a newcomer may be the one that opens another.
    wanted = pipelines_wanted(graph, len(members), stages)
    known = set(plan.members)
    free = [member for member in members if member not in known]
    while len(lines) > wanted:
        # The shortest: fewest members change their blocks.
        free += lines.pop(min(range(len(lines)), key=lambda i: (lines[i].length, -i))).staying
    while len(lines) < wanted:
        lines.append(_Line([], [free.pop(0) if free else _taken(lines)]))
    for member in free:
        # The shortest is the slowest and has the heaviest members: there one more helps most.
        min(lines, key=lambda line: line.length).coming.append(member)
    return _fitting(graph, lines)


def _survivors(plan: PipelinePlan, alive: Collection[str]) -> list[_Line]:
    # Who is left keeps its order: each then has most of the blocks that it is to have.
    lines = [_Line([m for m in pipeline.members if m in alive], [], pipeline) for pipeline in plan.pipelines]
    return [line for line in lines if line.staying]


def _taken(lines: list[_Line]) -> str:
    """Take the last member of the longest pipeline, for a new one."""
    return max(lines, key=lambda line: line.length).staying.pop()


def _fitting(graph: BlockGraph, lines: list[_Line]) -> list[_Line]:
    """Bring members of a chain that has more of them than the legal cuts allow to the shortest."""
    # A member without blocks would compute nothing and hold nothing: everyone has at least one unit.
    most = len(graph.units)
    for line in lines:
        while line.length > most:
            member = (line.coming or line.staying).pop()
            min(lines, key=lambda each: each.length).coming.append(member)
    return lines


def _cut(graph: BlockGraph, line: _Line, has: Mapping[str, Had]) -> LineUp:
    before = line.before
    if before is not None and not line.coming and tuple(line.staying) == before.members:
        # Even where a better cut is known by now: nothing happened to these members, and a move costs a publish.
        heaviest = max(graph.cost(begin, end) for begin, end in before.stretches(len(graph.blocks)).values())
        return LineUp(members=before.members, cuts=before.cuts, heaviest=heaviest, moved=0)
    return line_up(graph, [(m, has[m]) for m in line.staying], [(m, has[m]) for m in line.coming])


def _plan(graph: BlockGraph, lines: Sequence[LineUp], runs: int) -> PipelinePlan:
    bare = [
        Pipeline(members=line.members, cuts=line.cuts, share=0, limits=one_f_one_b(len(line.members))) for line in lines
    ]
    # Shares follow from lengths alone, and not from cuts: which runs a chain takes moves no state.
    shared = shares([len(line.members) for line in lines], runs)
    pipelines = tuple(replace(pipeline, share=share) for pipeline, share in zip(bare, shared, strict=True))
    return PipelinePlan(blocks=len(graph.blocks), pipelines=pipelines)


def one_f_one_b(members: int) -> tuple[int, ...]:
    """The in-flight limits that make the order of 1F1B: each member's depth to the end of its chain, itself counted."""
    # More would fill the bubble of the warm-up a little and cost memory; less would leave members idle in every round.
    return tuple(range(members, 0, -1))


def shares(lengths: Sequence[int], runs: int) -> tuple[int, ...]:
    """Share out the runs by length: a chain of twice as many members takes twice as many runs."""
    found = [0] * len(lengths)
    for _ in range(runs):
        # Whole numbers: (share + 1) / length of the two are compared crosswise; the first of equals takes the run.
        best = 0
        for index in range(1, len(lengths)):
            if (found[index] + 1) * lengths[best] < (found[best] + 1) * lengths[index]:
                best = index
        found[best] += 1
    return tuple(found)
