"""Decision after a change of view: which member computes which part of an open step in pipelines. Pure.

`pipeline.redo` decides which blocks of which runs are computed again. This module converts all members' reports for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elastrain.job.fold import leaves
from elastrain.job.values import Recovery, Report, Shape, TracedGraph
from elastrain.pipeline.moves import fed
from elastrain.pipeline.open_tasks import StepShape, TaskProgress
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, replicas, routes
from elastrain.pipeline.redo import BlockRun, LossSituation, Resend, TaskReport, computed_before, redo


@dataclass(frozen=True, kw_only=True)
class Rerouting:
    """The open tasks of all members after a change of view."""

    tasks: tuple[TaskProgress, ...]
    """Tasks of living members as they reported them, and new ones."""
    new: tuple[Task, ...]
    resends: tuple[Resend, ...]
    reason: str
    adopted: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Member -> blocks of the graph of which it is a replica until the commit, besides those of the plan."""
    redone: int = 0
    """Number of (block, run) pairs in `new` that were computed before, as far as living members know."""


def reroute(reports: Mapping[str, Report], shape: Shape, decision: Recovery, plan: PipelinePlan) -> Rerouting:
    """Choose the open tasks of all members of the view. Each member gets the same answer.

    reports: in rank order. plan: the plan of the open step.
    """
    # A member that has not traced the model yet cannot name a block. It computes nothing of the open step.
    able = {m: report for m, report in reports.items() if report.work.traced is not None}
    traced = next((report.work.traced for report in able.values()), None)
    if traced is None:
        return Rerouting(tasks=(), new=(), resends=(), reason="no member has traced the model yet")
    told = {m: _told(report, shape, traced, decision) for m, report in able.items()}
    folded = _folded(shape, traced, decision)
    # Adoptions end with their step: those of a member that is a step behind belong to another step.
    before = {m: frozenset(r.work.adopted) for m, r in able.items() if r.committed == decision.committed}
    has_begun = any(decision.folded.values()) or any(each != TaskReport() for each in told.values())
    if not has_begun and set(plan.members) <= set(able):
        # Newcomers change nothing in the plan that the record brought.
        whole = tuple(task for route in routes(plan) for task in route)
        return Rerouting(
            tasks=_anew(whole), new=whole, resends=(), reason="the step begins by its plan", adopted=before
        )
    situation = replace(
        _situation(shape, traced, decision, _replicas(plan, before), told, folded),
        shadows=fed(plan),
        newcomers=decision.newcomers,
    )
    decided = redo(situation)
    # A task continues on its member, which keeps what it has read and made.
    living = tuple(progress for report in told.values() for progress in report.tasks)
    return Rerouting(
        tasks=(*living, *_anew(decided.tasks)),
        new=decided.tasks,
        resends=decided.resends,
        reason=decided.reason,
        adopted={m: before.get(m, frozenset()).union(decided.adopted.get(m, ())) for m in able},
        redone=computed_before(decided.tasks, plan, situation),
    )


def _anew(tasks: Iterable[Task]) -> tuple[TaskProgress, ...]:
    return tuple(TaskProgress(task=task) for task in tasks)


def _replicas(plan: PipelinePlan, adopted: Mapping[str, frozenset[int]]) -> tuple[tuple[str, ...], ...]:
    """Return the replicas of each block: those of the plan, then members that an earlier recovery of the step added."""
    # A member that adopted a block has its parameters, and tasks with it. Naming another one would publish it again.
    return tuple(
        (*of, *(m for m, blocks in adopted.items() if block in blocks and m not in of))
        for block, of in enumerate(replicas(plan))
    )


def _situation(
    shape: Shape,
    traced: TracedGraph,
    decision: Recovery,
    replicas_now: tuple[tuple[str, ...], ...],
    told: Mapping[str, TaskReport],
    folded: frozenset[BlockRun],
) -> LossSituation:
    assert shape.pipelining is not None
    step = StepShape(
        number=decision.committed + 1,
        micro_batches=shape.pipelining.micro_batches,
        run_length=shape.pipelining.run_length,
        blocks=len(traced.graph.blocks),
    )
    return LossSituation(graph=traced.graph, shape=step, replicas=replicas_now, folded=folded, reports=told)


def _told(report: Report, shape: Shape, traced: TracedGraph, decision: Recovery) -> TaskReport:
    """Return what a member has of the open step. Nothing counts from a member that is a step behind."""
    # If the step starts again because something was wrong, each of its results may be affected.
    if report.committed != decision.committed or decision.wrong is not None:
        return TaskReport()
    # A graph block counts only if all its layout blocks have their gradients: they are computed together.
    whole = [leaves(nodes) for nodes in report.own]
    done: dict[int, list[frozenset[int]]] = {}
    for place, runs in zip(traced.places, whole, strict=True):
        done.setdefault(place, []).append(runs)
    own = frozenset((place, run) for place, each in done.items() for run in frozenset.intersection(*each))
    return TaskReport(tasks=report.work.tasks, kept=frozenset(report.work.kept), own=own)


def _folded(shape: Shape, traced: TracedGraph, decision: Recovery) -> frozenset[BlockRun]:
    """Return the (graph block, run) pairs whose gradients all primaries have. A block without shards waits for none."""
    # By graph block: `redo` asks for these, and one of them may lie in shards of several primaries.
    lanes: dict[int, list[frozenset[int]]] = {}
    for (shard, lane), nodes in decision.folded.items():
        place = traced.places[shape.shards[shard].lanes[lane]]
        lanes.setdefault(place, []).append(leaves(nodes))
    return frozenset(
        (place, run)
        for place in range(len(traced.graph.blocks))
        for run in range(shape.runs)
        if all(run in there for there in lanes.get(place, ()))
    )
