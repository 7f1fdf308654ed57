"""Bounds that differ from run to run: whole groups of runs are cut alike, and what members hold is the union of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.pipeline import actions
from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.open_tasks import StepShape, TaskDesk
from elastrain.pipeline.pipeline_plan import Bound, Direction, Pipeline, PipelinePlan, Task, held, replicas, routes
from elastrain.pipeline.planning import PlanWish, next_plan
from tests.support.block_graphs import graph_of


@st.composite
def plans(draw: st.DrawFn) -> PipelinePlan:
    """One to three pipelines with whole and fractional bounds between legal cuts that are some blocks apart."""
    blocks = draw(st.integers(4, 12))
    points = sorted(draw(st.sets(st.integers(1, blocks - 1), min_size=1, max_size=6)))
    size = draw(st.sampled_from([1, 4]))
    pipelines = []
    for index in range(draw(st.integers(1, 3))):
        cuts: list[int | Bound] = []
        at = 0
        while at < len(points) and draw(st.booleans()):
            if at + 1 < len(points) and draw(st.booleans()):
                groups = draw(st.integers(2, 6))
                deep = draw(st.integers(1, groups - 1))
                cuts.append(Bound(points[at], points[at + 1], deep, groups, size))
            else:
                cuts.append(points[at])
            at += draw(st.integers(1, 2)) if isinstance(cuts[-1], int) else 1
        # A whole cut may lie at the deeper end of the bound before it.
        members = tuple(f"m{index}.{place}" for place in range(len(cuts) + 1))
        limits = tuple(range(len(members), 0, -1))
        share = draw(st.integers(0, 13))
        pipelines.append(Pipeline(members=members, cuts=tuple(cuts), share=share, limits=limits))
    return PipelinePlan(blocks=blocks, pipelines=tuple(pipelines))


def by_run(plan: PipelinePlan) -> dict[int, tuple[Task, ...]]:
    return dict(enumerate(routes(plan)))


@given(plan=plans())
def test_each_run_passes_each_block_once_and_members_hold_what_they_compute(plan: PipelinePlan) -> None:
    holds, may = held(plan), replicas(plan)
    for run, route in by_run(plan).items():
        assert [block for task in route for block in task.blocks] == list(range(plan.blocks))
        assert all(task.run == run and task.begin < task.end for task in route)
        assert all(block in holds[task.member] and task.member in may[block] for task in route for block in task.blocks)
    assert all((block in holds[m]) == (m in may[block]) for m in plan.members for block in range(plan.blocks))


@given(plan=plans())
def test_runs_of_an_aligned_group_have_the_same_cuts(plan: PipelinePlan) -> None:
    first = 0
    for pipeline in plan.pipelines:
        size = max((cut.size for cut in pipeline.cuts if isinstance(cut, Bound)), default=1)
        runs = range(first, first + pipeline.share)
        stretches = {run: [(t.begin, t.end, t.member) for t in by_run(plan)[run]] for run in runs}
        assert all(stretches[a] == stretches[b] for a, b in pairwise(runs) if a // size == b // size)
        first += pipeline.share


@given(deep=st.integers(1, 7), more=st.integers(1, 8), size=st.sampled_from([1, 4]), first=st.integers(0, 9))
def test_as_many_groups_as_stated_are_cut_deeper_and_they_are_spread_evenly(
    deep: int, more: int, size: int, first: int
) -> None:
    groups = deep + more
    bound = Bound(5, 6, deep, groups, size)
    start = first * size
    is_deep = [bound.of(run, start) == 6 for run in range(start, start + groups * size, size)]
    assert sum(is_deep) == deep
    # In each stretch of neighbouring groups there are as many of them as in any other of its length, give or take one.
    for length in range(1, groups + 1):
        counts = [sum(is_deep[at : at + length]) for at in range(groups - length + 1)]
        assert max(counts) - min(counts) <= 1


def test_a_bound_at_five_and_three_tenths_cuts_three_of_ten_runs_at_six() -> None:
    bound = Bound(5, 6, 3, 10, 1)
    assert bound.position == pytest.approx(5.3)
    plan = PipelinePlan(blocks=8, pipelines=(Pipeline(members=("a", "b"), cuts=(bound,), share=10, limits=(2, 1)),))
    assert sorted(route[0].end for route in routes(plan)) == [5] * 7 + [6] * 3
    assert held(plan) == {"a": frozenset(range(6)), "b": frozenset(range(5, 8))}
    assert replicas(plan)[5] == ("a", "b")


def test_a_member_between_two_bounds_may_have_no_block_in_some_runs() -> None:
    cuts = (Bound(2, 3, 1, 2, 1), Bound(2, 4, 1, 2, 1))
    plan = PipelinePlan(blocks=5, pipelines=(Pipeline(members=("a", "b", "c"), cuts=cuts, share=2, limits=(3, 2, 1)),))
    assert [[task.member for task in route] for route in routes(plan)] == [["a", "c"], ["a", "b", "c"]]


@pytest.mark.parametrize(
    "cuts", [(3, 3), (4, 3), (Bound(3, 4, 1, 2, 1), 3), (5, Bound(4, 6, 1, 2, 1)), (Bound(4, 3, 1, 2, 1), 6)]
)
def test_cuts_that_do_not_ascend_are_refused(cuts: tuple[int | Bound, ...]) -> None:
    with pytest.raises(ValueError, match="ascending cuts"):
        Pipeline(members=("a", "b", "c"), cuts=cuts, share=1, limits=(3, 2, 1))


def rerouted() -> PipelinePlan:
    """The second pipeline has lost its middle member; that of the first takes its place."""
    own = Pipeline(members=("a", "b", "c"), cuts=(2, 4), share=3, limits=(3, 2, 1))
    other = Pipeline(members=("d", "b", "f"), cuts=(2, 4), share=2, limits=(5, 4, 3))
    return PipelinePlan(blocks=6, pipelines=(own, other))


def test_a_member_may_stand_in_two_pipelines_with_the_same_blocks() -> None:
    plan = rerouted()
    assert plan.members == ("a", "b", "c", "d", "f")
    assert held(plan)["b"] == frozenset({2, 3})
    assert replicas(plan)[2] == ("b",)
    assert plan.limits["b"] == 4
    assert sum(task.member == "b" for route in routes(plan) for task in route) == 5


def test_a_member_with_other_blocks_in_a_second_pipeline_is_refused() -> None:
    own = Pipeline(members=("a", "b"), cuts=(2,), share=3, limits=(2, 1))
    other = Pipeline(members=("d", "b"), cuts=(3,), share=2, limits=(2, 1))
    with pytest.raises(ValueError, match=r"b has blocks \(2, 6\) in one pipeline and \(3, 6\) in another"):
        PipelinePlan(blocks=6, pipelines=(own, other))


def test_after_a_plan_that_re_routes_each_member_stands_in_one_pipeline_again() -> None:
    after = next_plan(graph_of([1] * 6), rerouted(), ["a", "b", "c", "d", "f"], PlanWish(stages=3, runs=5))
    assert sorted(m for pipeline in after.pipelines for m in pipeline.members) == ["a", "b", "c", "d", "f"]
    assert after.pipelines[0] == rerouted().pipelines[0]


def most_in_flight(tasks: Sequence[Task], limit: int) -> int:
    """Return the most micro-batches in flight of any block, where activations come run by run, and no gradient."""
    shape = StepShape(number=0, micro_batches=12, run_length=1, blocks=12)
    desk = TaskDesk(shape, limit)
    desk.hand_out(tasks)
    for task in tasks:
        desk.arrive(shape.name(task.run, task.begin, Direction.ACTIVATION))
        while (action := desk.next_action()) is not None and action.kind is ActionKind.FORWARD:
            desk.computed(action)
    return max(sum(block in task.blocks for task in desk.in_flight()) for block in range(12))


@given(
    stretches=st.lists(st.tuples(st.integers(0, 10), st.integers(1, 5)), min_size=12, max_size=12),
    limit=st.integers(1, 4),
)
def test_of_no_block_more_is_in_flight_than_the_limit(stretches: list[tuple[int, int]], limit: int) -> None:
    tasks = [Task(run, begin, min(12, begin + length), "m") for run, (begin, length) in enumerate(stretches)]
    assert most_in_flight(tasks, limit) <= limit


def test_runs_with_two_cuts_pile_up_where_only_tasks_that_begin_deeper_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [Task(run, 5 + run % 2, 9, "m") for run in range(12)]
    assert most_in_flight(tasks, 2) == 2
    monkeypatch.setattr(actions, "_held_back_by", lambda task, held: sum(o.begin >= task.begin for o in held))
    assert most_in_flight(tasks, 2) == 3
