"""How much of what is handed out after a loss was computed before: for people. Nothing is decided by it."""

from __future__ import annotations

from collections.abc import Iterable

from elastrain.pipeline.boundary import BoundaryName, Direction
from elastrain.pipeline.plan import PipelinePlan, Task, routes
from elastrain.pipeline.redo import LossSituation


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
