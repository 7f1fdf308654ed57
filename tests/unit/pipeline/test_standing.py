"""Standing shadows: who keeps blocks that only one member computes, as far as there is room."""

from __future__ import annotations

from dataclasses import replace

from elastrain.pipeline.graph import BlockGraph, IllegalCut
from elastrain.pipeline.moves import fed, shadows
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan
from elastrain.pipeline.standing import SPARE, Standing, with_standing

GRAPH = BlockGraph(
    blocks=tuple("uvwxyz"),
    flops=(4, 1, 1, 1, 1, 4),
    crossings=((),) * 7,
    illegal=(IllegalCut(cut=2, why="planted"),),
)
SIZE = 100
SIZES = (SIZE,) * 6
ROOMY = dict.fromkeys("abcd", 10_000)


def plan_of(*cuts: int, members: str = "abc") -> PipelinePlan:
    line = Pipeline(members=tuple(members), cuts=cuts, share=2, limits=(1,) * len(members))
    return PipelinePlan(blocks=6, pipelines=(line,))


PLAN = plan_of(1, 3)


def standing(
    plan: PipelinePlan = PLAN, present: Standing = (), room: dict[str, int] | None = None
) -> dict[str, tuple[int, ...]]:
    return dict(with_standing(plan, present, GRAPH, SIZES, ROOMY if room is None else room).standing)


def test_every_block_of_one_replica_gets_a_shadow_that_computes_other_blocks() -> None:
    found = standing()
    assert sorted(block for blocks in found.values() for block in blocks) == list(range(6))
    stretches = {"a": {0}, "b": {1, 2}, "c": {3, 4, 5}}
    assert all(not stretches[member] & set(blocks) for member, blocks in found.items())


def test_what_a_cut_may_not_part_has_one_shadow() -> None:
    assert any({1, 2} <= set(blocks) for blocks in standing().values())


def test_shadows_are_dealt_to_the_least_loaded() -> None:
    assert standing(room=ROOMY) == {"b": (0, 4), "a": (1, 2, 3, 5)}


def test_a_block_of_two_replicas_needs_no_shadow() -> None:
    two = replace(PLAN, pipelines=(*PLAN.pipelines, plan_of(1, members="de").pipelines[0]))
    assert standing(two) == {}


def test_without_room_there_is_no_shadow() -> None:
    assert standing(room={}) == {}
    assert standing(room=dict.fromkeys("abc", SPARE * SIZE - 1)) == {}
    one = standing(room={"a": SPARE * SIZE, "b": 0, "c": 0})
    assert one == {"a": (3,)}, "the first block for which it has room"


def test_shadows_stay_while_there_is_any_room_and_go_with_it() -> None:
    before: Standing = (("c", (0,)), ("a", (1, 2)))
    kept = standing(present=before, room={"a": 0, "b": 0, "c": 0})
    assert kept == {"a": (1, 2), "c": (0,)}
    assert standing(present=before, room={"a": -1, "b": 0, "c": 0}) == {"c": (0,)}


def test_equal_input_gives_the_same_plan_again() -> None:
    once = with_standing(PLAN, (), GRAPH, SIZES, ROOMY)
    assert with_standing(once, once.standing, GRAPH, SIZES, ROOMY) == once


def test_a_standing_shadow_is_fed_and_does_not_move() -> None:
    plan = replace(PLAN, standing=(("a", (1, 2)), ("b", (1, 3))))
    assert shadows(plan) == {}
    assert fed(plan) == {"a": frozenset({1, 2}), "b": frozenset({3})}, "b computes block 1"
    moving = replace(plan, coming=plan_of(3, 4).pipelines, named=4)
    assert shadows(moving) == {"a": frozenset({1, 2}), "b": frozenset({3})}
    assert moving.goal.standing == plan.standing
