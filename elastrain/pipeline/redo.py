"""What is computed again after a loss: per run, the blocks that nobody alive has or is about to have, and no others.

One pure function of the reports of all members of the new view: every member comes to the same. A block counts as there
when its gradient of the run is folded, or whole with a living member, or when a living task is going to make it.

How much of what is handed out after a loss was computed before: for people. Nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.open_tasks import StepShape, TaskProgress, needs, will_make
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction, PipelinePlan, Task, routes

BlockRun = tuple[int, int]
"""(block, run)"""


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What a living member says of its tasks in the open step after a change of view."""

    tasks: tuple[TaskProgress, ...] = ()
    """Those with something left to compute: they stay where they are."""
    kept: frozenset[BoundaryName] = frozenset()
    """Boundary tensors that it made or received."""
    own: frozenset[BlockRun] = frozenset()
    """Whose gradients it has whole, folded or not."""


@dataclass(frozen=True, kw_only=True)
class LossSituation:
    """All that the redo is decided over, the same on every member."""

    graph: BlockGraph
    shape: StepShape
    replicas: tuple[tuple[str, ...], ...]
    """By block, as of the last commit; lost members may be among them."""
    folded: frozenset[BlockRun]
    reports: Mapping[str, TaskReport]
    """Of every member of the view that may compute, in rank order: of a newcomer only once it has traced."""


@dataclass(frozen=True, kw_only=True)
class Resend:
    """A boundary tensor that is kept and that somebody lacks."""

    name: BoundaryName
    giver: str
    taker: str


@dataclass(frozen=True, kw_only=True)
class Redo:
    """What follows from a loss for the open step."""

    tasks: tuple[Task, ...]
    """New ones, by run and block."""
    resends: tuple[Resend, ...]
    adopted: Mapping[str, tuple[int, ...]]
    """Member -> missing blocks without a living replica of which it becomes one. Their holders publish to it first."""
    reason: str


def redo(situation: LossSituation) -> Redo:
    """Decide what is computed again, by whom, and which kept tensors are sent again."""
    # Living tasks stay where they are, begun or not: moving them would compute something twice and send it again.
    living = tuple(progress for report in situation.reports.values() for progress in report.tasks)
    runs = range(situation.shape.runs)
    missing = [_missing(situation, run, [p for p in living if p.task.run == run]) for run in runs]
    # Blocks without a replica are given away before any stretch is: a stretch may need them.
    adopted = _adopted(situation, frozenset().union(*missing))
    handing = _Handing(situation, adopted, _loads(situation, living))
    tasks = [
        task for run in runs for begin, end in _stretches(missing[run]) for task in handing.hand_out(run, begin, end)
    ]
    resends = _resends(situation, [*living, *(TaskProgress(task=task) for task in tasks)])
    pairs = sum(task.end - task.begin for task in tasks)
    reason = f"{pairs} of {situation.shape.blocks * situation.shape.runs} (block, run) pairs handed out again"
    if adopted:
        named = ", ".join(f"{member} takes {len(blocks)}" for member, blocks in adopted.items())
        reason += f"; blocks without a living replica: {named}"
    return Redo(tasks=tuple(tasks), resends=resends, adopted=adopted, reason=reason)


def _missing(situation: LossSituation, run: int, living: Sequence[TaskProgress]) -> frozenset[int]:
    """The blocks that have to be computed again for this run."""
    blocks = range(situation.shape.blocks)
    # By block and run: a member may have died in the middle of a backward, with its last blocks handed over.
    there = {block for block in blocks if (block, run) in situation.folded}
    there |= {block for report in situation.reports.values() for block, of_run in report.own if of_run == run}
    there |= {block for progress in living for block in progress.task.blocks}
    missing = set(blocks) - there
    comes = _Coming(situation, run, living)
    # Each round adds blocks or ends, so that it ends.
    while True:
        # What is there already may be computed again on the way to a kept tensor: it is dropped when it comes.
        grown = missing | _waited_for(living, comes, missing)
        grown |= {b - 1 for b in grown if b - 1 not in grown and not comes.has(b, Direction.ACTIVATION, grown)}
        grown |= {b + 1 for b in grown if b + 1 not in grown and not comes.has(b + 1, Direction.GRADIENT, grown)}
        if grown == missing:
            return frozenset(missing)
        missing = grown


def _waited_for(living: Iterable[TaskProgress], comes: _Coming, missing: Collection[int]) -> set[int]:
    """The blocks behind the ends of living tasks, where they wait for what nobody will compute any more."""
    found = set()
    for progress in living:
        for name in needs(progress, comes.situation.shape):
            if not comes.tensor(name, missing):
                # An activation comes from the block before the cut, a gradient from the one behind it.
                found.add(name.cut - 1 if name.direction is Direction.ACTIVATION else name.cut)
    return found


@dataclass(frozen=True)
class _Coming:
    """Which boundary tensors of one run are kept by a living member or going to be made."""

    situation: LossSituation
    run: int
    living: Sequence[TaskProgress]

    def has(self, cut: int, direction: Direction, missing: Collection[int]) -> bool:
        """Tell whether it comes for every micro-batch: a run that is interrupted is computed again whole."""
        shape = self.situation.shape
        # All of them: with the second half of a run alone, gradients would be added in another order.
        return all(self.tensor(shape.name(m, cut, direction), missing) for m in shape.micro_batches_of(self.run))

    def tensor(self, name: BoundaryName, missing: Collection[int]) -> bool:
        if name.direction is Direction.ACTIVATION:
            is_given, maker = name.cut == 0, name.cut - 1
        else:
            is_given, maker = name.cut == self.situation.shape.blocks, name.cut
        # Kept by whomever: a reader's copy is as good as the maker's.
        return (
            is_given
            or maker in missing
            or any(name in report.kept for report in self.situation.reports.values())
            or any(will_make(progress, name, self.situation.shape) for progress in self.living)
        )


def _stretches(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Consecutive blocks together, ascending, as `[begin, end)`."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found


def _loads(situation: LossSituation, living: Iterable[TaskProgress]) -> dict[str, int]:
    """FLOPs that each member has still to do, in rank order. Forward and backward of a block count alike."""
    loads = dict.fromkeys(situation.reports, 0)
    for progress in living:
        task = progress.task
        left = 2 * len(situation.shape.micro_batches_of(task.run)) - progress.forwarded - progress.done
        loads[task.member] += left * situation.graph.cost(task.begin, task.end)
    return loads


def _adopted(situation: LossSituation, missing: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Name one member for each missing block without a living replica: who holds least, for neighbours the same one."""
    # It is the same on all members, because a task with such a block may be handed to nobody else.
    holds = {
        member: sum(situation.graph.flops[b] for b, of in enumerate(situation.replicas) if member in of)
        for member in situation.reports
    }
    # Of which nothing is left to compute in this step, nobody needs the parameters before the next plan's publish.
    orphaned = [b for b in missing if not any(m in situation.reports for m in situation.replicas[b])]
    found: dict[str, tuple[int, ...]] = {}
    for begin, end in _stretches(orphaned):
        member = min(holds, key=lambda m: holds[m])
        holds[member] += situation.graph.cost(begin, end)
        found[member] = (*found.get(member, ()), *range(begin, end))
    return found


@dataclass
class _Handing:
    """Hands stretches out evenly, cut where one member's blocks end and another's begin."""

    situation: LossSituation
    adopted: Mapping[str, tuple[int, ...]]
    loads: dict[str, int]
    held: dict[str, frozenset[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.held = {
            member: frozenset(b for b, of in enumerate(self.situation.replicas) if member in of)
            | frozenset(self.adopted.get(member, ()))
            for member in self.situation.reports
        }

    def hand_out(self, run: int, begin: int, end: int) -> Iterable[Task]:
        while begin < end:
            # Rank order where loads are equal: everybody comes to the same.
            reach = {m: self._reach(m, begin, end) for m in self.loads}
            member = min((m for m in reach if reach[m] > begin), key=lambda m: self.loads[m])
            # As far as it reaches: every cut more is a tensor more that has to be sent both ways.
            cost = self.situation.graph.cost(begin, reach[member])
            self.loads[member] += 2 * len(self.situation.shape.micro_batches_of(run)) * cost
            yield Task(run, begin, reach[member], member)
            begin = reach[member]

    def _reach(self, member: str, begin: int, end: int) -> int:
        """Where a task of this member that begins at `begin` ends at the latest, at a legal cut; `begin`: nowhere."""
        reach = begin
        for unit_begin, unit_end in self.situation.graph.units:
            # By units: no task begins or ends where no cut is legal.
            inside = begin <= unit_begin and unit_end <= end
            if inside and unit_begin == reach and self.held[member] >= set(range(unit_begin, unit_end)):
                reach = unit_end
        return reach


def _resends(situation: LossSituation, tasks: Iterable[TaskProgress]) -> tuple[Resend, ...]:
    """Who sends what is kept to whom: once per taker, by the first in rank order that keeps it."""
    found: dict[tuple[BoundaryName, str], Resend] = {}
    for progress in tasks:
        taker = progress.task.member
        for name in needs(progress, situation.shape):
            givers = [member for member, report in situation.reports.items() if name in report.kept]
            # Where nobody keeps it, somebody is going to make it, and sends it then.
            if givers and taker not in givers:
                found.setdefault((name, taker), Resend(name=name, giver=givers[0], taker=taker))
    return tuple(found.values())


def computed_before(new: Iterable[Task], plan: PipelinePlan, situation: LossSituation) -> int:
    """Count the (block, run) pairs of the new tasks that are computed once more.

    Of what only a lost member had, others know by the gradients that it has sent. A first stage sends none, and one
    alone neither takes nor sends any: of the first, what it had taken counts, and of the second, nothing.
    """
    there = situation.folded.union(*(report.own for report in situation.reports.values()))
    kept = frozenset[BoundaryName]().union(*(report.kept for report in situation.reports.values()))
    route_of = routes(plan)
    pairs = [(block, task.run) for task in new for block in task.blocks]
    return sum(pair in there or _came_back(pair[0], route_of[pair[1]], kept, situation) for pair in pairs)


def _came_back(block: int, route: Iterable[Task], kept: frozenset[BoundaryName], situation: LossSituation) -> bool:
    """Tell whether the gradient of the run's last micro-batch has passed this block with the member of the plan."""
    task = next(task for task in route if block in task.blocks)
    cut, shape = task.begin or task.end, situation.shape
    # With a living member it is not there, or it would not be missing.
    if task.member in situation.reports or cut == shape.blocks:
        return False
    return shape.name(shape.micro_batches_of(task.run)[-1], cut, Direction.GRADIENT) in kept
