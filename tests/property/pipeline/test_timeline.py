"""The timeline: work is conserved, dependencies are kept, and even pipelines take as long as 1F1B does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan, Task, routes
from elastrain.pipeline.planner.chain_choice import estimated_s
from elastrain.pipeline.planner.step_costs import StepCosts
from elastrain.pipeline.planner.step_profile import StepRates
from elastrain.pipeline.planner.timeline import PlayedAction, PlayedStep, Timeline, play
from elastrain.pipeline.planning import one_f_one_b
from tests.property.pipeline.test_actions import orders_of_torch
from tests.property.pipeline.test_bounds import plans
from tests.support.step_profiles import FREE, profile_with

FORWARD, BACKWARD, WEIGHT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT


def even(members: int, runs: int, more: int = 0, name: str = "m", *, split: bool = False) -> PipelinePlan:
    pipeline = Pipeline(
        members=tuple(f"{name}{i}" for i in range(members)),
        cuts=tuple(range(1, members)),
        share=runs,
        limits=tuple(limit + more for limit in one_f_one_b(members)),
        is_split=split,
    )
    return PipelinePlan(blocks=members, pipelines=(pipeline,))


def step_s(plan: PipelinePlan, rates: StepRates = FREE) -> float:
    return Timeline(StepCosts(profile=profile_with([1.0] * plan.blocks, rates=rates))).step_s(plan)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("runs", [1, 4, 9])
def test_an_even_pipeline_takes_as_long_as_one_f_one_b(members: int, runs: int) -> None:
    # With fewer runs than members a warm-up is no longer hidden: the way there and back counts.
    assert step_s(even(members, runs)) == pytest.approx(3 * (runs + members - 1))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_the_order_is_that_of_torch_pipelining(stages: int, more: int) -> None:
    plan = even(stages, stages + more)
    played = play(plan, routes(plan), StepCosts(profile=profile_with([1.0] * stages)))
    found = [
        [(each.action.kind.value, each.action.micro_batch) for each in played.actions if each.action.task.member == m]
        for m in plan.members
    ]
    assert found == orders_of_torch(stages, stages + more)


def test_a_split_backward_with_more_in_flight_fills_the_bubbles() -> None:
    assert step_s(even(4, 8)) == pytest.approx(33)
    assert step_s(even(4, 8, split=True)) == pytest.approx(30)
    assert step_s(even(4, 8, more=4, split=True)) == pytest.approx(27)


def test_a_split_costs_a_part_of_the_backward_and_an_action_more() -> None:
    rates = replace(FREE, action_s=0.5, split_price=0.1)
    assert step_s(even(2, 1), rates) == pytest.approx(2 * 3 + 4 * 0.5)
    # The second member's two halves take a tenth longer. The first member's backward comes beside its weight gradient.
    assert step_s(even(2, 1, split=True), rates) == pytest.approx(2 * 3 - 1 + 0.1 + 4 * 0.5)


def test_a_link_is_one_queue_in_each_direction() -> None:
    # Each tensor holds the link for two seconds. Three activations leave the first member after 1, 2 and 3 s.
    rates = replace(FREE, inside_bytes_per_s=1.0)
    profile = profile_with([1.0, 0.0], rates=rates, crossing_bytes=2)
    plan = even(2, 3, more=3)
    played = play(plan, routes(plan), StepCosts(profile=profile))
    begun = [each.begin_s for each in played.actions if each.action.task.begin == 1 and each.action.kind is FORWARD]
    assert begun == [3, 5, 7]
    back = [each.begin_s for each in played.actions if each.action.task.begin == 0 and each.action.kind is BACKWARD]
    assert back == [5, 7, 9]


def test_fixed_seconds_reduce_and_publish_are_added() -> None:
    rates = replace(FREE, action_s=0.5, step_s=10.0, publish_bytes_per_s=1.0, reduce_bytes_per_s=2.0)
    profile = profile_with([1.0], rates=rates, parameter_bytes=8)
    lone = even(1, 2)
    twin = even(1, 2, name="n").pipelines[0]
    both = replace(lone, pipelines=(*lone.pipelines, twin))
    timeline = Timeline(StepCosts(profile=profile))
    assert timeline.step_s(lone) == pytest.approx(2 * 4 + 10)
    assert timeline.step_s(both) == pytest.approx(2 * 4 + 8 / 2 + 10 + 8)
    assert timeline.step_s(both, {"m0": 16}) == pytest.approx(2 * 4 + 8 / 2 + 10 + 8 + 16)


def test_of_equal_pipelines_one_is_played() -> None:
    one = even(3, 5)
    plan = replace(one, pipelines=(*one.pipelines, *even(3, 5, name="n").pipelines, *even(3, 4, name="o").pipelines))
    timeline = Timeline(StepCosts(profile=profile_with([1.0] * 3)))
    timeline.step_s(plan)
    assert len(timeline.known_s) == 2
    slow = Timeline(StepCosts(profile=profile_with([1.0] * 3, speeds={"n1": 0.5})))
    assert slow.step_s(plan) > timeline.step_s(plan)
    assert len(slow.known_s) == 3


def test_pipelines_that_share_a_member_are_played_together() -> None:
    one = even(2, 4)
    other = replace(even(2, 4, name="n").pipelines[0], members=("n0", "m1"))
    plan = replace(one, pipelines=(*one.pipelines, other))
    # The shared member computes eight runs.
    assert step_s(plan) >= 3 * 8


played_plans = st.tuples(
    plans(),
    st.lists(st.floats(0.1, 3.0), min_size=12, max_size=12),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 2]),
)


def played_of(case: tuple[PipelinePlan, list[float], bool, int, int]) -> tuple[PipelinePlan, StepCosts, PlayedStep]:
    plan, seconds, is_split, run_length, crossing_bytes = case
    speeds = {member: 1.0 - 0.1 * (at % 4) for at, member in enumerate(plan.members)}
    rates = replace(FREE, inside_bytes_per_s=4.0, message_s=0.125)
    profile = profile_with(seconds[: plan.blocks], speeds=speeds, rates=rates, crossing_bytes=crossing_bytes)
    plan = replace(plan, pipelines=tuple(replace(each, is_split=is_split) for each in plan.pipelines))
    costs = StepCosts(profile=profile)
    return plan, costs, play(plan, routes(plan), costs, run_length)


def splits(plan: PipelinePlan, task: Task) -> bool:
    return task.member in plan.split and task.begin > 0


def by_action(played: PlayedStep) -> dict[tuple[ActionKind, int, Task], PlayedAction]:
    return {(each.action.kind, each.action.micro_batch, each.action.task): each for each in played.actions}


@given(case=played_plans)
def test_each_action_is_played_once_and_no_second_is_lost(
    case: tuple[PipelinePlan, list[float], bool, int, int],
) -> None:
    plan, costs, played = played_of(case)
    wanted = Counter(
        (kind, micro_batch, task)
        for route in routes(plan)
        for task in route
        for micro_batch in range(task.run * case[3], (task.run + 1) * case[3])
        for kind in ((FORWARD, BACKWARD, WEIGHT) if splits(plan, task) else (FORWARD, BACKWARD))
    )
    assert by_action(played).keys() == wanted.keys() and len(played.actions) == wanted.total()
    for each in played.actions:
        task, speed = each.action.task, costs.profile.speeds[each.action.task.member]
        halves = 2 if each.action.kind is BACKWARD and not splits(plan, task) else 1
        stated_s = halves * sum(costs.profile.blocks[block].forward_s for block in task.blocks) / speed
        assert each.end_s - each.begin_s == pytest.approx(stated_s)


@given(case=played_plans)
def test_dependencies_are_kept(case: tuple[PipelinePlan, list[float], bool, int, int]) -> None:
    plan, _, played = played_of(case)
    found = by_action(played)
    hop_s = case[4] / 4.0 + 0.125
    for route in routes(plan):
        for above, task in zip((None, *route), route, strict=False):
            for micro_batch in range(task.run * case[3], (task.run + 1) * case[3]):
                forward, backward = found[FORWARD, micro_batch, task], found[BACKWARD, micro_batch, task]
                assert forward.end_s <= backward.begin_s
                if above is not None:
                    assert found[FORWARD, micro_batch, above].end_s + hop_s <= forward.begin_s + 1e-9
                    assert backward.end_s + hop_s <= found[BACKWARD, micro_batch, above].begin_s + 1e-9
                if splits(plan, task):
                    assert backward.end_s <= found[WEIGHT, micro_batch, task].begin_s


@given(case=played_plans)
def test_a_member_computes_one_action_at_a_time_and_keeps_its_limit(
    case: tuple[PipelinePlan, list[float], bool, int, int],
) -> None:
    plan, _, played = played_of(case)
    for member in plan.members:
        mine = [each for each in played.actions if each.action.task.member == member]
        assert all(one.end_s <= other.begin_s + 1e-9 for one, other in pairwise(mine))
        for block in range(plan.blocks):
            in_flight = 0
            for each in mine:
                if block in each.action.task.blocks:
                    last = WEIGHT if splits(plan, each.action.task) else BACKWARD
                    in_flight += (each.action.kind is FORWARD) - (each.action.kind is last)
                    assert in_flight <= plan.limits[member]


@given(case=played_plans)
def test_weight_gradients_of_a_task_are_computed_in_micro_batch_order(
    case: tuple[PipelinePlan, list[float], bool, int, int],
) -> None:
    _, _, played = played_of(case)
    for kind in ActionKind:
        last: dict[Task, int] = {}
        for each in played.actions:
            if each.action.kind is kind:
                assert last.get(each.action.task, -1) < each.action.micro_batch
                last[each.action.task] = each.action.micro_batch


@given(
    members=st.integers(1, 6), runs=st.integers(1, 12), more=st.integers(0, 8), split=st.booleans(), hop=st.booleans()
)
def test_the_estimate_of_even_pipelines_is_from_below_and_near(
    members: int, runs: int, more: int, split: bool, hop: bool
) -> None:
    plan = even(members, runs, more, split=split)
    rates = replace(FREE, inside_bytes_per_s=10.0)
    profile = profile_with([1.0] * members, rates=rates, crossing_bytes=int(hop))
    costs = StepCosts(profile=profile)
    least_s = estimated_s(costs, plan.pipelines[0], 1)
    assert 0.7 * Timeline(costs).step_s(plan) <= least_s <= Timeline(costs).step_s(plan) + 1e-9
