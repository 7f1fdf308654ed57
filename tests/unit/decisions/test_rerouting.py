"""Who computes what of an open step in pipelines after a change of view, by example: two blocks, two runs."""

from __future__ import annotations

from dataclasses import replace

from elastrain import protocol as p
from elastrain.decisions.recovery import decide
from elastrain.decisions.rerouting import Rerouting, reroute
from elastrain.job.placement import Holders
from elastrain.job.values import (
    Contribution,
    OpenWork,
    Pipelining,
    Record,
    Recovery,
    Report,
    Shape,
    ShardShape,
    TracedGraph,
)
from elastrain.job.world import Member, View
from elastrain.member.member_machine import MemberMachine
from elastrain.pipeline.graph import BlockGraph, IllegalCut
from elastrain.pipeline.open_tasks import TaskProgress
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction, Pipeline, PipelinePlan, Task
from tests.unit.decisions import test_recovery

GRAPH = BlockGraph(blocks=("first", "second"), flops=(1, 1), crossings=((), (), ()))
TRACED = TracedGraph(graph=GRAPH, places=(0, 1))
PLAN = PipelinePlan(blocks=2, pipelines=(Pipeline(members=("a", "b"), cuts=(1,), share=2, limits=(2, 1)),))
SHAPE = Shape(
    runs=2,
    blocks=2,
    shards=(ShardShape(size_bytes=8, lanes=(0,)), ShardShape(size_bytes=8, lanes=(1,))),
    backups=1,
    pipelining=Pipelining(stages=2, micro_batches=2, run_length=1),
)
BASE = (Holders("a", ("b", "c")), Holders("a", ("b", "c")))
RECORD = Record(
    step=1, generation=1, contribution=Contribution(), square_norm=0.0, skipped=False, switch=False, plan=PLAN
)


def report(**changes: object) -> Report:
    """As in test_recovery, of a member that has the plan and has traced."""
    plain = test_recovery.report(record=RECORD, base=BASE, work=OpenWork(traced=TRACED), own=((), ()))
    return replace(plain, **changes)  # type: ignore[arg-type]


def working(*tasks: TaskProgress, kept: tuple[BoundaryName, ...] = ()) -> OpenWork:
    return OpenWork(traced=TRACED, tasks=tasks, kept=kept)


def view(*names: str) -> View:
    return View(generation=2, members=tuple(Member(id=name, node=name) for name in names))


def rerouted(plan: PipelinePlan = PLAN, **reports: Report) -> Rerouting:
    decision = decide(view(*reports), reports, SHAPE)
    assert isinstance(decision, Recovery)
    assert set(decision.runs.values()) == {()}, "whole runs are handed out to nobody"
    return reroute(reports, SHAPE, decision, plan)


def test_a_step_in_which_nothing_has_begun_follows_its_plan() -> None:
    one = Pipeline(members=("a", "b"), cuts=(1,), share=2, limits=(2, 1))
    plan = PipelinePlan(blocks=2, pipelines=(one, replace(one, members=("c", "d"))))
    shape = replace(SHAPE, runs=4, pipelining=Pipelining(stages=2, micro_batches=4, run_length=1))
    reports = {name: report() for name in "abcd"}
    decision = decide(view(*reports), reports, shape)
    assert isinstance(decision, Recovery)
    found = reroute(reports, shape, decision, plan)
    assert [(task.run, task.member) for task in found.new if task.begin == 0] == [
        (0, "a"),
        (1, "a"),
        (2, "c"),
        (3, "c"),
    ]


def test_who_has_not_traced_yet_is_given_nothing() -> None:
    found = rerouted(a=report(), c=report(work=OpenWork()))
    assert {task.member for task in found.new} == {"a"}
    assert {(block, task.run) for task in found.new for block in task.blocks} == {(0, 0), (1, 0), (0, 1), (1, 1)}


def test_only_what_the_lost_member_had_is_computed_again() -> None:
    activations = tuple(BoundaryName(2, micro_batch, 1, Direction.ACTIVATION) for micro_batch in (0, 1))
    open_tasks = tuple(TaskProgress(task=Task(run, 0, 1, "a"), forwarded=1) for run in (0, 1))
    found = rerouted(a=report(work=working(*open_tasks, kept=activations)), c=report())
    assert {(block, task.run) for task in found.new for block in task.blocks} == {(1, 0), (1, 1)}
    assert set(open_tasks) <= set(found.tasks), "what has begun stays where it is"
    assert {(each.giver, each.taker) for each in found.resends} <= {("a", "c")}


def test_what_a_member_has_of_an_older_step_counts_for_nothing() -> None:
    late = report(
        committed=0,
        record=replace(RECORD, step=0),
        parameters=(0, 0),
        held=((0, 0, (1,)), (1, 0, (1,))),
        begun=1,
        work=working(kept=(BoundaryName(1, 0, 1, Direction.ACTIVATION),)),
        own=(((0, 2),), ((0, 2),)),
    )
    found = rerouted(a=report(), b=late)
    assert len(found.new) == 4


def test_gradients_that_are_folded_are_not_computed_again() -> None:
    found = rerouted(a=report(folded=((0, 0, ((0, 1),)), (1, 0, ((0, 1),)))))
    assert {task.run for task in found.new} == {1}


def folded(block: int, *runs: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    return (block, 0, tuple((run, run + 1) for run in runs))


def test_a_block_is_adopted_only_where_some_run_lacks_it() -> None:
    open_tasks = tuple(TaskProgress(task=Task(run, 0, 1, "a"), forwarded=1) for run in (0, 1))
    gradients = tuple(BoundaryName(2, micro_batch, 1, Direction.GRADIENT) for micro_batch in (0, 1))
    working_on = working(*open_tasks, kept=gradients)
    # The second block's only replica is lost.
    assert rerouted(a=report(work=working_on, folded=(folded(1, 0, 1),)), c=report()).adopted["c"] == frozenset()
    assert rerouted(a=report(work=working_on, folded=(folded(1, 0),)), c=report()).adopted["c"] == {1}


def test_a_shadow_adopts_its_blocks_before_members_with_less_to_compute() -> None:
    # The second block's only replica is lost. Its shadow `a` computes the first one, and `c` computes nothing.
    standing = replace(PLAN, standing=(("a", (1,)),))
    assert rerouted(a=report(), c=report()).adopted["c"] == {1}
    assert rerouted(standing, a=report(), c=report()).adopted["a"] == {1}
    assert rerouted(standing, c=report()).adopted["c"] == {0, 1}, "the shadow is lost, too"
    moving = replace(PLAN, coming=(replace(PLAN.pipelines[0], members=("b", "a")),), named=1)
    assert rerouted(moving, a=report(), c=report()).adopted["a"] == {1}


def kept(direction: Direction, *micro_batches: int) -> tuple[BoundaryName, ...]:
    return tuple(BoundaryName(2, micro_batch, 1, direction) for micro_batch in micro_batches)


def test_of_a_lost_last_stage_what_has_sent_its_gradient_counts_as_computed_again() -> None:
    open_tasks = tuple(TaskProgress(task=Task(run, 0, 1, "a"), forwarded=1) for run in (0, 1))
    here = (*kept(Direction.ACTIVATION, 0, 1), *kept(Direction.GRADIENT, 0))
    found = rerouted(a=report(work=working(*open_tasks, kept=here)), c=report())
    assert (len(found.new), found.redone) == (2, 1)


def test_of_a_lost_first_stage_what_has_got_its_gradient_counts_as_computed_again() -> None:
    open_tasks = (TaskProgress(task=Task(1, 1, 2, "b")),)
    here = (*kept(Direction.ACTIVATION, 0), *kept(Direction.GRADIENT, 0))
    found = rerouted(b=report(work=working(*open_tasks, kept=here), own=((), ((0, 1),))), c=report())
    assert (len(found.new), found.redone) == (2, 1)


def test_what_is_there_and_lies_on_the_way_counts_as_computed_again() -> None:
    # The activation of run 0 is gone with both: what is folded of it is made once more.
    found = rerouted(c=report(folded=(folded(0, 0),)))
    assert found.redone == 1
    assert {(block, task.run) for task in found.new for block in task.blocks} == {(0, 0), (1, 0), (0, 1), (1, 1)}


def test_more_stages_than_cuts_end_with_one_sentence() -> None:
    shape = replace(SHAPE, pipelining=Pipelining(stages=3, micro_batches=2, run_length=1))
    core = MemberMachine(me="a", shape=shape)
    graph = replace(GRAPH, illegal=(IllegalCut(cut=1, why="'mul' uses what 'first' made"),))
    failed = [c for c in core.handle(p.Traced(model=replace(TRACED, graph=graph))) if isinstance(c, p.Fail)]
    assert [each.kind for each in failed] == ["ConfigError"]
    assert "no cut of this model is legal" in failed[0].reason and "'mul' uses" in failed[0].reason
