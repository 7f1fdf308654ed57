"""Decides after a change of view who computes what of an open step in pipelines: pure, of the reports of all members.

Which blocks of which runs are computed again is decided in `pipeline.redo`; here reports are put into its words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elastrain.job.fold import leaves
from elastrain.job.values import Recovery, Report, Shape, TracedGraph
from elastrain.pipeline.open_tasks import StepShape, TaskProgress
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, replicas, routes
from elastrain.pipeline.redo import BlockRun, LossSituation, Resend, TaskReport, computed_before, redo


@dataclass(frozen=True, kw_only=True)
class Rerouting:
    """The open tasks of all members from now on."""

    tasks: tuple[TaskProgress, ...]
    """Those of living members as they reported them, and new ones."""
    new: tuple[Task, ...]
    resends: tuple[Resend, ...]
    reason: str
    adopted: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Member -> blocks of the graph of which it is a replica until the commit, besides those of the plan."""
    redone: int = 0
    """How many (block, run) pairs of `new` were computed before, as far as anybody alive can tell."""


def reroute(reports: Mapping[str, Report], shape: Shape, decision: Recovery, plan: PipelinePlan) -> Rerouting:
    """Decide for all members of the view, whichever asks. `reports`: in rank order; `plan`: of the open step."""
    # Who has not traced the model yet cannot name a block: it computes nothing of the open step.
    able = {m: report for m, report in reports.items() if report.work.traced is not None}
    traced = next((report.work.traced for report in able.values()), None)
    if traced is None:
        return Rerouting(tasks=(), new=(), resends=(), reason="nobody has traced the model yet")
    told = {m: _told(report, shape, traced, decision) for m, report in able.items()}
    folded = _folded(shape, traced, decision)
    # Adoptions end with their step: what a member that is a step behind has adopted belongs to another one.
    before = {m: frozenset(r.work.adopted) for m, r in able.items() if r.committed == decision.committed}
    has_begun = any(decision.folded.values()) or any(each != TaskReport() for each in told.values())
    if not has_begun and set(plan.members) <= set(able):
        # Who joined changes nothing of the plan that the record brought.
        whole = tuple(task for route in routes(plan) for task in route)
        return Rerouting(
            tasks=_anew(whole), new=whole, resends=(), reason="the step begins by its plan", adopted=before
        )
    situation = _situation(shape, traced, decision, _replicas(plan, before), told, folded)
    decided = redo(situation)
    # A task goes on where it is: what it has read and made stays with its member.
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
    """By block of the graph: those of the plan, then members that an earlier recovery of the step has made replicas."""
    # Who has adopted a block has its parameters, and tasks with it: to name another one would publish it once more.
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
    """What a member has of the open step; of one that is a step behind, nothing counts."""
    # Where the step begins anew because something was wrong, each of its results may have come of that.
    if report.committed != decision.committed or decision.wrong is not None:
        return TaskReport()
    # A place of the graph counts only where each of its blocks has its gradient: they are computed together.
    whole = [leaves(nodes) for nodes in report.own]
    done: dict[int, list[frozenset[int]]] = {}
    for place, runs in zip(traced.places, whole, strict=True):
        done.setdefault(place, []).append(runs)
    own = frozenset((place, run) for place, each in done.items() for run in frozenset.intersection(*each))
    return TaskReport(tasks=report.work.tasks, kept=frozenset(report.work.kept), own=own)


def _folded(shape: Shape, traced: TracedGraph, decision: Recovery) -> frozenset[BlockRun]:
    """Gradients that the primaries of all shards of a place have. A place without shards has none to wait for."""
    # By place: redo asks for blocks of the graph, and a block may lie in shards of several primaries.
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
