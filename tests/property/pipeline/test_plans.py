"""Plans: routes cover each (block, run) once, replicas every task; nothing moves that need not; cuts are the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastrain.job.run_plan import shares_by_speed
from elastrain.pipeline.cuts import Had, least_heaviest, line_up
from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.pipeline_plan import PipelinePlan, replicas, routes
from elastrain.pipeline.planning import PlanWish, first_plan, next_plan, pipelines_wanted
from tests.support.block_graphs import graph_of


@st.composite
def graphs(draw: st.DrawFn, least: int = 1) -> BlockGraph:
    flops = draw(st.lists(st.integers(0, 9), min_size=least, max_size=8))
    inner = range(1, len(flops))
    illegal = draw(st.sets(st.sampled_from(inner), max_size=3)) if len(inner) else set()
    return graph_of(flops, illegal)


@st.composite
def changes(draw: st.DrawFn) -> tuple[BlockGraph, PlanWish, PipelinePlan, list[str]]:
    """A first plan over 1..6 members, and the members of the next view."""
    graph = draw(graphs())
    wish = PlanWish(stages=draw(st.integers(1, len(graph.units))), runs=draw(st.integers(1, 12)))
    members = [f"m{i}" for i in range(draw(st.integers(1, 6)))]
    left = [m for m in members if draw(st.booleans())]
    joined = [f"m{i}" for i in range(6, 6 + draw(st.integers(0, 2)))]
    assume(left or joined)
    return graph, wish, first_plan(graph, members, wish), left + joined


def assert_whole(graph: BlockGraph, plan: PipelinePlan, members: list[str], wish: PlanWish) -> None:
    found = routes(plan)
    computed = [(block, task.run) for route in found for task in route for block in task.blocks]
    assert sorted(computed) == [(b, r) for b in range(len(graph.blocks)) for r in range(wish.runs)]
    may = replicas(plan)
    assert all(task.member in may[block] for route in found for task in route for block in task.blocks)
    assert sorted(plan.members) == sorted(members)
    assert all(cut in graph.legal_cuts for pipeline in plan.pipelines for cut in pipeline.cuts)
    assert all(block_replicas for block_replicas in may)
    assert all(limit >= 1 for limit in plan.limits.values())


@given(change=changes())
def test_routes_cover_each_block_and_run_once_and_replicas_every_task(
    change: tuple[BlockGraph, PlanWish, PipelinePlan, list[str]],
) -> None:
    graph, wish, planned, members = change
    assert_whole(graph, planned, list(planned.members), wish)
    after = next_plan(graph, planned, members, wish)
    assert_whole(graph, after, members, wish)
    # And again from there: plans are made of plans.
    assert_whole(graph, next_plan(graph, after, [*members, "m9"], wish), [*members, "m9"], wish)


@given(change=changes())
def test_pipelines_are_consecutive_ranks_as_even_as_can_be_at_first(
    change: tuple[BlockGraph, PlanWish, PipelinePlan, list[str]],
) -> None:
    graph, wish, planned, _ = change
    members = planned.members
    assert list(members) == [f"m{i}" for i in range(len(members))]
    lengths = [len(pipeline.members) for pipeline in planned.pipelines]
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == pipelines_wanted(graph, len(members), wish)


@given(change=changes())
def test_a_pipeline_whose_members_stay_keeps_its_cuts_and_the_same_view_the_whole_plan(
    change: tuple[BlockGraph, PlanWish, PipelinePlan, list[str]],
) -> None:
    graph, wish, plan, _ = change
    same = next_plan(graph, plan, list(plan.members), wish)
    assert same == plan


def cheapest_line_up(graph: BlockGraph, staying: list[tuple[str, Had]], coming: list[tuple[str, Had]]) -> int:
    """By brute force: how many blocks move at least, with the costliest member as light as can be."""
    count, n = len(staying) + len(coming), len(graph.blocks)
    best: dict[int, int] = {}
    for cuts in combinations(graph.legal_cuts, count - 1):
        stretches = list(pairwise((0, *cuts, n)))
        heaviest = max(graph.cost(begin, end) for begin, end in stretches)
        for order in permutations([*staying, *coming]):
            if [each for each in order if each in staying] != staying:
                continue
            moved = sum(len(set(range(*s)) - had) for s, (_, had) in zip(stretches, order, strict=True))
            best[heaviest] = min(best.get(heaviest, moved), moved)
    return best[min(best)]


@given(graph=graphs(least=3), data=st.data())
def test_a_chain_is_cut_so_that_fewest_blocks_move_among_the_most_even_cuts(
    graph: BlockGraph, data: st.DataObject
) -> None:
    blocks = st.frozensets(st.sampled_from(range(len(graph.blocks))))
    count = data.draw(st.integers(1, min(4, len(graph.units))))
    coming_count = data.draw(st.integers(0, min(2, count)))
    each = [(f"m{i}", data.draw(blocks) if i < count - 1 else frozenset[int]()) for i in range(count)]
    staying, coming = each[coming_count:], each[:coming_count]
    found = line_up(graph, staying, coming)
    assert found.moved == cheapest_line_up(graph, staying, coming)
    stretches = zip(found.members, pairwise((0, *found.cuts, len(graph.blocks))), strict=True)
    assert found.moved == sum(len(set(range(*s)) - dict(each)[m]) for m, s in stretches)


@given(graph=graphs(), data=st.data())
def test_the_costliest_member_has_as_little_as_any_cuts_allow(graph: BlockGraph, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(graph.units)))
    brute = min(
        max(graph.cost(begin, end) for begin, end in pairwise((0, *cuts, len(graph.blocks))))
        for cuts in combinations(graph.legal_cuts, count - 1)
    )
    assert least_heaviest(graph, count) == brute
    assert line_up(graph, [(f"m{i}", frozenset()) for i in range(count)]).heaviest == brute


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), runs=st.integers(0, 24))
def test_no_other_shares_of_the_runs_end_earlier(lengths: list[int], runs: int) -> None:
    found = shares_by_speed(runs, lengths)
    assert sum(found) == runs
    latest = max(share / length for share, length in zip(found, lengths, strict=True))
    for index, length in enumerate(lengths):
        assert (found[index] + 1) / length >= latest, "a run could have gone there"


@given(graph=graphs(), data=st.data())
def test_no_pipeline_gets_shorter_than_the_fewest_members_that_have_room(
    graph: BlockGraph, data: st.DataObject
) -> None:
    wish = PlanWish(stages=data.draw(st.integers(1, len(graph.units))), runs=6, is_least=True)
    members = [f"m{i}" for i in range(data.draw(st.integers(1, 7)))]
    plan = first_plan(graph, members, wish)
    for _ in range(3):
        # No member goes without blocks: with few legal cuts, more pipelines are needed than have room.
        is_forced = len(members) > (len(members) // wish.stages or 1) * len(graph.units)
        shortest = min(len(each.members) for each in plan.pipelines)
        assert is_forced or shortest >= min(wish.stages, len(members))
        members = [m for m in members if data.draw(st.booleans())] or members[:1]
        members += [f"m{i}" for i in range(20, 20 + data.draw(st.integers(0, 3))) if f"m{i}" not in members]
        plan = next_plan(graph, plan, members, wish)
        assert_whole(graph, plan, members, wish)


@pytest.mark.parametrize("lost", ["m3", "m4"])
def test_a_pipeline_that_a_loss_leaves_too_short_gets_a_member_of_a_longer_one(lost: str) -> None:
    graph, wish = graph_of([1] * 6, set()), PlanWish(stages=2, runs=6, is_least=True)
    members = [f"m{i}" for i in range(5)]
    plan = first_plan(graph, members, wish)
    assert [len(each.members) for each in plan.pipelines] == [3, 2]
    left = [m for m in members if m != lost]
    assert [len(each.members) for each in next_plan(graph, plan, left, wish).pipelines] == [2, 2]
    freely = next_plan(graph, plan, left, replace(wish, is_least=False))
    assert [len(each.members) for each in freely.pipelines] == [3, 1], "a wished number may be missed"
