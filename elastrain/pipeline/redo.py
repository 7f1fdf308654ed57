"""The decision what is computed again after a loss: the (block, run) pairs that no living member has or will make.

Pure: a function of the reports of all members of the new view, so every member decides the same. A pair is present if
its gradient is folded, if a living member has it whole, or if a living task will make it. `computed_before` counts
repeated work for statistics; no decision depends on it.
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
    """A living member's report about its tasks in the open step, sent after a change of view."""

    tasks: tuple[TaskProgress, ...] = ()
    """Tasks with something left to compute. They stay with this member."""
    kept: frozenset[BoundaryName] = frozenset()
    """Boundary tensors that the member made or received."""
    own: frozenset[BlockRun] = frozenset()
    """(block, run) pairs whose gradients the member has whole, folded or not."""


@dataclass(frozen=True, kw_only=True)
class LossSituation:
    """The input of the decision, the same on every member."""

    graph: BlockGraph
    shape: StepShape
    replicas: tuple[tuple[str, ...], ...]
    """Members that have each block, as of the last commit. Lost members may be among them."""
    folded: frozenset[BlockRun]
    reports: Mapping[str, TaskReport]
    """Reports of all members of the view that may compute, in rank order. A newcomer is in it once it has traced."""
    shadows: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Member -> blocks whose publishes it gets as a shadow. It adopts them first, as it may have their parameters."""
    newcomers: tuple[str, ...] = ()
    """Members whose loops are in no step yet. They adopt nothing: an evaluation between two steps goes on without them.
    """


@dataclass(frozen=True, kw_only=True)
class Resend:
    """A kept boundary tensor that one member has to send to another that lacks it."""

    name: BoundaryName
    giver: str
    taker: str


@dataclass(frozen=True, kw_only=True)
class Redo:
    """The decision for the open step after a loss."""

    tasks: tuple[Task, ...]
    """New tasks, by run and block."""
    resends: tuple[Resend, ...]
    adopted: Mapping[str, tuple[int, ...]]
    """Member -> blocks that had no living replica and of which it becomes one. Their holders publish to it first."""
    reason: str


def redo(situation: LossSituation) -> Redo:
    """Decide what is computed again, by which members, and which kept tensors are sent again."""
    # Living tasks stay with their members, even if not begun: a move would repeat work and messages.
    living = tuple(progress for report in situation.reports.values() for progress in report.tasks)
    runs = range(situation.shape.runs)
    missing = [_missing(situation, run, [p for p in living if p.task.run == run]) for run in runs]
    # Blocks without a replica are adopted first, because the new tasks may need them.
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
    """Return the blocks that have to be computed again for this run."""
    blocks = range(situation.shape.blocks)
    # Checked by block and run: a member may have died during a backward, with its last blocks already sent on.
    there = {block for block in blocks if (block, run) in situation.folded}
    there |= {block for report in situation.reports.values() for block, of_run in report.own if of_run == run}
    there |= {block for progress in living for block in progress.task.blocks}
    missing = set(blocks) - there
    comes = _Coming(situation, run, living)
    # Each round adds blocks or ends the loop, so the loop ends.
    while True:
        # A block whose gradient exists may be computed again on the way to a kept tensor. Its second gradient is
        # dropped.
        grown = missing | _waited_for(living, comes, missing)
        grown |= {b - 1 for b in grown if b - 1 not in grown and not comes.has(b, Direction.ACTIVATION, grown)}
        grown |= {b + 1 for b in grown if b + 1 not in grown and not comes.has(b + 1, Direction.GRADIENT, grown)}
        if grown == missing:
            return frozenset(missing)
        missing = grown


def _waited_for(living: Iterable[TaskProgress], comes: _Coming, missing: Collection[int]) -> set[int]:
    """Return the blocks next to living tasks that must make boundary tensors that no task would make otherwise."""
    found = set()
    for progress in living:
        for name in needs(progress, comes.situation.shape):
            if not comes.tensor(name, missing):
                # An activation comes from the block before the cut, a gradient from the block after it.
                found.add(name.cut - 1 if name.direction is Direction.ACTIVATION else name.cut)
    return found


@dataclass(frozen=True)
class _Coming:
    """The boundary tensors of one run that a living member keeps or will make."""

    situation: LossSituation
    run: int
    living: Sequence[TaskProgress]

    def has(self, cut: int, direction: Direction, missing: Collection[int]) -> bool:
        """Return True if the boundary tensor comes for every micro-batch of the run."""
        shape = self.situation.shape
        # An interrupted run is computed again whole. With only its second half, gradients would be added in another
        # order.
        return all(self.tensor(shape.name(m, cut, direction), missing) for m in shape.micro_batches_of(self.run))

    def tensor(self, name: BoundaryName, missing: Collection[int]) -> bool:
        """Return True if this boundary tensor is given, is kept by a living member, or will be made."""
        if name.direction is Direction.ACTIVATION:
            is_given, maker = name.cut == 0, name.cut - 1
        else:
            is_given, maker = name.cut == self.situation.shape.blocks, name.cut
        # A reader's copy is as good as the maker's.
        return (
            is_given
            or maker in missing
            or any(name in report.kept for report in self.situation.reports.values())
            or any(will_make(progress, name, self.situation.shape) for progress in self.living)
        )


def _stretches(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Group consecutive blocks into stretches `[begin, end)`, ascending."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found


def _loads(situation: LossSituation, living: Iterable[TaskProgress]) -> dict[str, int]:
    """Return the FLOPs that each member has still to do, in rank order. Forward and backward count alike."""
    loads = dict.fromkeys(situation.reports, 0)
    for progress in living:
        task = progress.task
        left = 2 * len(situation.shape.micro_batches_of(task.run)) - progress.forwarded - progress.done
        loads[task.member] += left * situation.graph.cost(task.begin, task.end)
    return loads


def _adopted(situation: LossSituation, missing: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Choose one member to adopt each missing block without a living replica: the one that holds the fewest FLOPs.

    Consecutive blocks go to the same member.
    """
    # All members must choose alike, because only the adopter may compute a task with such a block.
    holds = {
        member: sum(situation.graph.flops[b] for b, of in enumerate(situation.replicas) if member in of)
        for member in sorted(situation.reports, key=lambda m: m in situation.newcomers)
    }
    # Newcomers have no loop in the step yet, so that an evaluation before it could not use their blocks. They adopt all
    # blocks if nobody else is there.
    for newcomer in situation.newcomers if set(situation.newcomers) < holds.keys() else ():
        holds.pop(newcomer, None)
    # A block that needs no computation in this step is left out: its parameters are needed only for the next plan.
    orphaned = [b for b in missing if not any(m in situation.reports for m in situation.replicas[b])]
    found: dict[str, tuple[int, ...]] = {}
    able = {block: _shadows_of(block, situation, holds) for block in orphaned}
    for members in dict.fromkeys(able.values()):
        for begin, end in _stretches(block for block in orphaned if able[block] == members):
            member = min(members or holds, key=lambda m: holds[m])
            holds[member] += situation.graph.cost(begin, end)
            found[member] = (*found.get(member, ()), *range(begin, end))
    return found


def _shadows_of(block: int, situation: LossSituation, members: Iterable[str]) -> tuple[str, ...]:
    return tuple(member for member in members if block in situation.shadows.get(member, ()))


@dataclass
class _Handing:
    """The even distribution of stretches over members, cut where one member's blocks end and another's begin."""

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
        """Yield tasks that cover the stretch, each for the least loaded member that can begin it."""
        while begin < end:
            # Rank order decides between equal loads, so that all members choose alike.
            reach = {m: self._reach(m, begin, end) for m in self.loads}
            member = min((m for m in reach if reach[m] > begin), key=lambda m: self.loads[m])
            # The task goes as far as the member's blocks reach: each additional cut costs two more boundary tensors.
            cost = self.situation.graph.cost(begin, reach[member])
            self.loads[member] += 2 * len(self.situation.shape.micro_batches_of(run)) * cost
            yield Task(run, begin, reach[member], member)
            begin = reach[member]

    def _reach(self, member: str, begin: int, end: int) -> int:
        """Return the last legal cut that this member can reach from `begin`, or `begin` if it has no unit there."""
        reach = begin
        for unit_begin, unit_end in self.situation.graph.units:
            # Whole units only: no task may begin or end at an illegal cut.
            inside = begin <= unit_begin and unit_end <= end
            if inside and unit_begin == reach and self.held[member] >= set(range(unit_begin, unit_end)):
                reach = unit_end
        return reach


def _resends(situation: LossSituation, tasks: Iterable[TaskProgress]) -> tuple[Resend, ...]:
    """Choose the sender of each kept tensor that a task needs: the first keeper in rank order, once for each taker."""
    found: dict[tuple[BoundaryName, str], Resend] = {}
    for progress in tasks:
        taker = progress.task.member
        for name in needs(progress, situation.shape):
            givers = [member for member, report in situation.reports.items() if name in report.kept]
            # A tensor that no member keeps will be made by a task, and is sent then.
            if givers and taker not in givers:
                found.setdefault((name, taker), Resend(name=name, giver=givers[0], taker=taker))
    return tuple(found.values())


def computed_before(new: Iterable[Task], plan: PipelinePlan, situation: LossSituation) -> int:
    """Count the (block, run) pairs of the new tasks that were computed before.

    Work of a lost member is known only by the gradients that it sent. A first stage sends none: its work counts if it
    had received the run's last gradient. The work of a lost pipeline of one member is never counted.
    """
    there = situation.folded.union(*(report.own for report in situation.reports.values()))
    kept = frozenset[BoundaryName]().union(*(report.kept for report in situation.reports.values()))
    route_of = routes(plan)
    pairs = [(block, task.run) for task in new for block in task.blocks]
    return sum(pair in there or _came_back(pair[0], route_of[pair[1]], kept, situation) for pair in pairs)


def _came_back(block: int, route: Iterable[Task], kept: frozenset[BoundaryName], situation: LossSituation) -> bool:
    """Return True if the lost member of the plan is known to have done the run's last backward through this block.

    The kept gradient of the run's last micro-batch at the member's cut shows it.
    """
    task = next(task for task in route if block in task.blocks)
    cut, shape = task.begin or task.end, situation.shape
    # If the planned member lives, it does not have the gradient, or the pair would not be missing.
    if task.member in situation.reports or cut == shape.blocks:
        return False
    return shape.name(shape.micro_batches_of(task.run)[-1], cut, Direction.GRADIENT) in kept
