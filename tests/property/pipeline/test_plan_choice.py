"""The planner: never worse than brute force, within memory and legal cuts, and it moves nothing that gains nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.job.fold import Fold
from elastrain.memory.pipeline_memory import Load, ModelBytes, task_bytes, tasks_of
from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import Bound, Pipeline, PipelinePlan, held, routes
from elastrain.pipeline.planner import plan_choice
from elastrain.pipeline.planner.line_ups import re_routed
from elastrain.pipeline.planner.plan_choice import NoPlanFitsError, PlanQuestion, choose_fitting, choose_plan
from elastrain.pipeline.planner.plan_room import PlanMemory, PlanRoom, copies_of, memory_of
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.pipeline.planner.step_costs import StepCosts
from elastrain.pipeline.planner.timeline import Timeline
from elastrain.pipeline.planning import PlanWish, first_plan, one_f_one_b
from tests.support.block_graphs import graph_of
from tests.support.step_profiles import FREE, profile_with


def asked(count: int, blocks: int, runs: int, **other: object) -> PlanQuestion:
    question = PlanQuestion(
        members=tuple(f"m{i}" for i in range(count)),
        graph=graph_of([1] * blocks),
        profile=profile_with([1.0] * blocks),
        runs=runs,
    )
    return replace(question, **other)  # type: ignore[arg-type]


@st.composite
def questions(draw: st.DrawFn, most: int = 7) -> PlanQuestion:
    blocks = draw(st.integers(1, 9))
    members = [f"m{i}" for i in range(draw(st.integers(1, most)))]
    illegal = draw(st.sets(st.integers(1, max(1, blocks - 1)), max_size=2)) if blocks > 3 else set()
    seconds = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 2.0, 30.0]), min_size=blocks, max_size=blocks))
    speeds = {m: draw(st.sampled_from([1.0, 1.0, 0.5])) for m in members}
    question = PlanQuestion(
        members=tuple(members),
        graph=graph_of([1] * blocks, illegal),
        profile=profile_with(seconds, speeds=speeds),
        runs=draw(st.integers(1, 9)),
    )
    if draw(st.booleans()):
        question = replace(question, present=choose_plan(question).plan)
        left = [m for m in members if draw(st.integers(0, 3))] or members[:1]
        joined = [f"n{i}" for i in range(draw(st.integers(0, 1)))]
        question = replace(question, members=(*left, *joined))
    return question


def assert_sound(question: PlanQuestion, plan: PipelinePlan) -> None:
    found = routes(plan)
    computed = sorted((task.run, block) for route in found for task in route for block in task.blocks)
    assert computed == [(run, block) for run in range(question.runs) for block in range(len(question.graph.blocks))]
    ends = {end for pipeline in plan.pipelines for cut in pipeline.cuts for end in _ends(cut)}
    assert ends <= set(question.graph.points)
    assert set(plan.members) <= set(question.members)
    assert all(limit >= 1 for limit in plan.limits.values())


def _ends(cut: int | Bound) -> tuple[int, ...]:
    return (cut,) if isinstance(cut, int) else (cut.cut, cut.deeper)


@given(question=questions())
@settings(max_examples=60)
def test_plans_are_whole_respect_legal_cuts_and_come_out_alike(question: PlanQuestion) -> None:
    answer = choose_plan(question)
    assert_sound(question, answer.plan)
    assert choose_plan(question) == answer
    assert answer.step_s > 0 or not any(each.forward_s for each in question.profile.blocks)


def brute_force_s(question: PlanQuestion) -> float:
    """Try all ways to divide the row of members, all whole cuts of each pipeline, all shares, and several limits."""
    timeline = Timeline(StepCosts(profile=question.profile))
    blocks, inner = len(question.graph.blocks), question.graph.legal_cuts
    known: dict[object, float] = {}

    def chain_s(chain: tuple[str, ...], share: int) -> float:
        key = (timeline.chain_key(chain), share)
        if key not in known:
            tries = (
                Pipeline(
                    members=chain,
                    cuts=cuts,
                    share=share,
                    limits=tuple(n + more for n in one_f_one_b(len(chain))),
                    is_split=is_split,
                )
                for cuts in combinations(inner, len(chain) - 1)
                for more in (0, 1, 2, 4)
                for is_split in (False, True)
            )
            known[key] = min((timeline.computed_s([(each, 0)], blocks, False) for each in tries), default=float("inf"))
        return known[key]

    best = float("inf")
    for chains in _divisions(question.members):
        if max(map(len, chains)) > len(inner) + 1:
            continue
        for shares in product(range(question.runs + 1), repeat=len(chains) - 1):
            if sum(shares) <= question.runs:
                last = question.runs - sum(shares)
                best = min(best, max(map(chain_s, chains, (*shares, last))))
    return best


def _divisions(members: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    for count in range(len(members)):
        for cuts in combinations(range(1, len(members)), count):
            yield tuple(members[a:b] for a, b in pairwise((0, *cuts, len(members))))


def small(seed: int) -> PlanQuestion:
    rng = random.Random(seed)
    members, blocks = rng.randint(2, 4), rng.randint(4, 6)
    seconds = [rng.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(blocks)]
    speeds = {f"m{i}": rng.choice([1.0, 1.0, 0.5]) for i in range(members)} if seed % 2 else {}
    rates = replace(FREE, action_s=0.2, split_price=0.03) if seed % 3 else FREE
    return asked(members, blocks, rng.randint(1, 6), profile=profile_with(seconds, speeds=speeds, rates=rates))


@pytest.mark.parametrize("seed", range(24))
def test_the_planner_is_never_worse_than_brute_force(seed: int) -> None:
    question = small(seed)
    assert choose_plan(question).step_s <= brute_force_s(question) * (1 + 1e-9)


@pytest.mark.on_demand
def test_the_planner_is_never_worse_than_brute_force_in_a_thousand_jobs() -> None:
    worse = [s for s in range(1000) if choose_plan(small(s)).step_s > brute_force_s(small(s)) * (1 + 1e-9)]
    assert worse == []


@given(question=questions(4))
@settings(max_examples=40)
def test_what_is_predicted_is_what_the_timeline_plays(question: PlanQuestion) -> None:
    answer = choose_plan(question)
    played_s = Timeline(StepCosts(profile=question.profile)).step_s(answer.plan)
    # Of equal pipelines the one with the most runs is played; groups of runs may begin elsewhere in the others.
    assert played_s == pytest.approx(answer.step_s, rel=0.05)


def test_six_pipelines_of_two_that_lose_three_members_become_three_of_three() -> None:
    before = choose_plan(asked(12, 40, 24, pipelines=6))
    left = tuple(m for m in before.plan.members if m not in {"m1", "m4", "m8"})
    after = choose_plan(asked(12, 40, 24, present=before.plan, members=left))
    assert [len(each.members) for each in after.plan.pipelines] == [3, 3, 3]
    assert before.step_s / after.step_s * 12 / 9 > 0.99


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_member_computes_less(slow: int) -> None:
    before = choose_plan(asked(4, 16, 8, pipelines=1))
    profile = profile_with([1.0] * 16, speeds={f"m{slow}": 0.5})
    after = choose_plan(asked(4, 16, 8, profile=profile, present=before.plan))
    stays_s = Timeline(StepCosts(profile=profile)).step_s(before.plan)
    assert stays_s / after.step_s > 1.4
    pairs = Counter[str]()
    for task in (task for route in routes(after.plan) for task in route):
        pairs[task.member] += task.end - task.begin
    assert min(pairs, key=lambda m: pairs[m]) == f"m{slow}"


def test_a_slow_member_without_stages_gets_fewer_runs() -> None:
    profile = profile_with([1.0] * 2, speeds={"m2": 0.5})
    found = choose_plan(asked(4, 2, 14, profile=profile, pipelines=4)).plan
    assert {each.members[0]: each.share for each in found.pipelines} == {"m0": 4, "m1": 4, "m2": 2, "m3": 4}


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
def test_nothing_moves_within_the_noise_of_the_profile(noise: float) -> None:
    before = choose_plan(asked(4, 8, 8, pipelines=1)).plan
    for speed in (0.99, 0.9, 0.5):
        profile = replace(profile_with([1.0] * 8, speeds={"m1": speed}), noise=noise)
        after = choose_plan(asked(4, 8, 8, profile=profile, present=before))
        stays_s = Timeline(StepCosts(profile=profile)).step_s(before)
        assert after.plan == before or after.step_s < stays_s * (1 - noise)


def test_a_move_has_to_win_back_its_cost() -> None:
    before = choose_plan(asked(4, 8, 8, pipelines=1)).plan
    # A block takes 20 s to publish. Shifting one saves more than that, but not twice as much.
    rates = replace(FREE, publish_bytes_per_s=0.05)
    profile = profile_with([1.0] * 8, speeds={"m1": 0.5}, rates=rates)
    question = asked(4, 8, 8, profile=profile, present=before)
    assert choose_plan(replace(question, steps_ahead=1000)).plan != before
    assert choose_plan(replace(question, steps_ahead=1)).plan == before


def test_re_routing_moves_no_block_and_loses_no_run() -> None:
    before = choose_plan(asked(6, 6, 12, pipelines=2)).plan
    left = tuple(m for m in before.members if m != "m1")
    found = re_routed(before, left)
    assert found is not None
    assert_sound(asked(6, 6, 12, members=left), found)
    assert all(blocks <= held(before)[m] for m, blocks in held(found).items())
    assert re_routed(before, tuple(m for m in left if m != "m4")) is None


def model_of(question: PlanQuestion) -> ModelBytes:
    n, memory = len(question.graph.blocks), question.memory
    return ModelBytes(
        graph=question.graph,
        places=tuple(range(n)),
        parameters=question.profile.parameter_bytes,
        gradients=memory.gradient_bytes,
        saved=memory.saved_bytes,
    )


@given(
    members=st.integers(1, 6),
    blocks=st.integers(1, 8),
    runs=st.integers(1, 12),
    limit=st.integers(20, 400),
    slow=st.booleans(),
)
@settings(max_examples=60)
def test_plans_keep_to_the_memory_of_each_member(members: int, blocks: int, runs: int, limit: int, slow: bool) -> None:
    names = [f"m{i}" for i in range(members)]
    memory = PlanMemory(
        limits_bytes={m: limit + 10 * at for at, m in enumerate(names)},
        base_bytes={f"m{i}": 5 for i in range(members)},
        gradient_bytes=(3,) * blocks,
        saved_bytes=(4,) * blocks,
    )
    profile = profile_with([1.0] * blocks, speeds={"m0": 0.5} if slow else {}, parameter_bytes=3)
    question = asked(members, blocks, runs, memory=memory, profile=profile)
    try:
        plan = choose_plan(question).plan
    except NoPlanFitsError:
        return
    shape = StepShape(number=0, micro_batches=runs, run_length=1, blocks=blocks)
    for member in plan.members:
        load = Load(tasks=tasks_of(plan, member), shape=shape, in_flight=plan.limits[member])
        needed = task_bytes(model_of(question), load).total_bytes + 5 + 3 * len(held(plan)[member])
        assert needed <= memory.limits_bytes[member]


@given(runs=st.integers(1, 40), first=st.integers(0, 64), more=st.integers(0, 30))
def test_copies_are_no_fewer_than_the_fold_needs(runs: int, first: int, more: int) -> None:
    from elastrain.memory.memory_budget import slots_needed

    assert slots_needed(Fold(first + runs + more).runs, (), range(first, first + runs)) <= copies_of(runs)


@pytest.mark.parametrize("runs", [*range(20), 31, 32, 33, 100])
def test_copies_are_no_more_than_some_place_needs(runs: int) -> None:
    def needed(first: int) -> int:
        most, waiting = 0, list[tuple[int, int]]()
        for run in range(first, first + runs):
            most = max(most, len(waiting) + 1)
            waiting.append((run, 1))
            while len(waiting) > 1 and waiting[-2][1] == waiting[-1][1] and not waiting[-2][0] % (2 * waiting[-1][1]):
                waiting[-2:] = [(waiting[-2][0], 2 * waiting[-1][1])]
        return most

    assert copies_of(runs) == max(needed(first) for first in range(1 << runs.bit_length()))


def test_limits_fall_before_a_plan_is_given_up_and_activations_leave_before_that() -> None:
    # Four blocks a member. Each micro-batch in flight takes 40 of the bytes.
    tight = PlanMemory(limits_bytes={f"m{i}": 100 for i in range(2)}, saved_bytes=(10,) * 8)
    limits = choose_plan(asked(2, 8, 8, memory=tight, pipelines=1)).plan.limits
    assert max(limits.values()) <= 2
    on_disk = replace(tight, activations_leave=True)
    assert max(choose_plan(asked(2, 8, 8, memory=on_disk, pipelines=1)).plan.limits.values()) > 2


@given(limit=st.integers(200, 5000), base=st.integers(0, 150), taken=st.integers(0, 5000), cut=st.integers(1, 7))
def test_the_plan_in_force_always_has_room(limit: int, base: int, taken: int, cut: int) -> None:
    chain = Pipeline(members=("m0", "m1"), cuts=(cut,), share=8, limits=(3, 2))
    present = PipelinePlan(blocks=8, pipelines=(chain,))
    sizes = PlanMemory(saved_bytes=(10,) * 8, gradient_bytes=(3,) * 8)
    room = PlanRoom(profile=profile_with([1.0] * 8, crossing_bytes=2), memory=sizes)
    told = {m: ToldMemory(limit_bytes=limit, base_bytes=base, taken_bytes=taken) for m in present.members}
    memory = memory_of(room, told, present)
    assert replace(room, memory=memory).limits(chain) == chain.limits
    assert all(base <= b or b == limit - room.taken_bytes(present)[m] for m, b in memory.base_bytes.items())


def test_a_plan_that_lacks_room_by_an_exact_account_is_chosen_anew() -> None:
    memory = PlanMemory(limits_bytes={"m0": 100, "m1": 100}, base_bytes={"m0": 0, "m1": 0})
    question = asked(2, 8, 8, memory=memory, profile=profile_with([1.0] * 8, parameter_bytes=10))

    def lacking(plan: PipelinePlan) -> dict[str, int]:
        return {m: 10 * len(its) - 60 for m, its in held(plan).items() if len(its) > 6}

    assert choose_fitting(question, lambda plan: {}) == choose_plan(question)
    assert len(choose_plan(question).plan.pipelines) == 2, "each member has all blocks"
    found = choose_fitting(question, lacking).plan
    assert not lacking(found) and len(found.pipelines) == 1
    with pytest.raises(
        NoPlanFitsError, match=r"fits into memory: m1 lacks 1 MiB in the plan .* \(pipelines of .*\), where"
    ):
        choose_fitting(question, lambda plan: {"m1": 1, "m0": 0})
    present = replace(question, present=choose_plan(question).plan)
    assert choose_fitting(present, lambda plan: {"m1": 1}).plan == present.present, "it is in force: it has room"


def test_a_split_pays_only_where_bubbles_cost_more_than_an_action() -> None:
    dear, cheap = replace(FREE, action_s=5.0, split_price=0.03), replace(FREE, action_s=0.001, split_price=0.03)
    found = {}
    for name, rates in (("dear", dear), ("cheap", cheap)):
        plan = choose_plan(asked(4, 4, 8, profile=profile_with([1.0] * 4, rates=rates), pipelines=1)).plan
        found[name] = (bool(plan.split), max(plan.limits.values()))
    assert not found["dear"][0]
    assert found["cheap"][0] and found["cheap"][1] > 4
    lone = choose_plan(asked(4, 4, 8, profile=profile_with([1.0] * 4, rates=cheap), pipelines=4)).plan
    assert not lone.split, "a pipeline of one has no bubbles"


def test_weight_gradients_that_wait_count_as_memory_in_use() -> None:
    sizes = PlanMemory(limits_bytes={"m0": 330, "m1": 330}, saved_bytes=(10,) * 8)
    room = PlanRoom(profile=profile_with([1.0] * 8), memory=sizes)
    whole = Pipeline(members=("m0", "m1"), cuts=(4,), share=8, limits=(8, 8), is_split=False)
    assert room.limits(whole) == (8, 8)
    assert room.limits(replace(whole, is_split=True)) == (8, 4), "the first member's backwards stay whole"


def test_bounds_shift_where_one_member_has_less_memory() -> None:
    memory = PlanMemory(limits_bytes={"m0": 2, "m1": 8})
    found = choose_plan(asked(2, 8, 8, memory=memory, pipelines=1)).plan
    assert len(held(found)["m0"]) <= 2


def test_a_limit_that_no_plan_meets_is_named_with_member_part_and_what_is_missing() -> None:
    profile = profile_with([1.0] * 4, parameter_bytes=4 << 20)
    memory = PlanMemory(limits_bytes={"m0": 3 << 20, "m1": 3 << 20})
    with pytest.raises(NoPlanFitsError) as error:
        choose_plan(asked(2, 4, 4, profile=profile, memory=memory))
    assert str(error.value).startswith("no plan fits into memory: m0 lacks ")
    assert "MiB in the plan that comes nearest (pipelines of 2, cut before blocks " in str(error.value)
    assert str(error.value).endswith("where parameters take most")


@pytest.mark.parametrize(
    "question",
    [
        asked(4, 4, 1),
        asked(5, 2, 3),
        asked(3, 5, 4, profile=profile_with([0.0] * 5)),
        asked(3, 5, 4, profile=profile_with([1.0, 1.0, 500.0, 1.0, 1.0])),
        asked(3, 5, 4, graph=graph_of([1] * 5, [1, 2, 3, 4])),
        asked(1, 1, 1),
    ],
    ids=["more pipelines than runs", "more members than blocks", "zeros", "one dear block", "no cut", "one of all"],
)
def test_odd_jobs_have_a_plan(question: PlanQuestion) -> None:
    assert_sound(question, choose_plan(question).plan)


def test_the_wish_of_stages_holds_for_the_first_plan_only() -> None:
    wished = asked(6, 12, 12, pipelines=2)
    before = choose_plan(wished).plan
    assert len(before.pipelines) == 2
    assert [each.members for each in before.pipelines] == [
        each.members for each in first_plan(wished.graph, wished.members, PlanWish(stages=3, runs=12)).pipelines
    ]


def job(members: int, length: int, blocks: int) -> tuple[BlockGraph, PlanQuestion]:
    runs = 2 * members
    question = asked(members, blocks, runs, pipelines=members // length)
    memory = PlanMemory(limits_bytes=dict.fromkeys(question.members, 10 * -(-blocks * 3 // length // 2)))
    return question.graph, replace(question, memory=memory, profile=profile_with([1.0] * blocks, parameter_bytes=10))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "length", "blocks", "lost"), [(96, 8, 40, 3), (1000, 10, 40, 8), (10_000, 16, 64, 100)]
)
def test_a_choice_among_many_members_plays_few_actions(members: int, length: int, blocks: int, lost: int) -> None:
    # Seconds depend on the machine; actions played do not. One takes some six microseconds.
    _, question = job(members, length, blocks)
    before = choose_plan(question)
    gone = set(random.Random(3).sample(question.members, lost))
    left = tuple(m for m in question.members if m not in gone)
    search = plan_choice._Choice(replace(question, present=before.plan, members=left))
    found = search.best(search.stay())
    assert found is not None and search.chains.spent < 30_000
    assert before.step_s / found.step_s * members / len(left) > 0.92
