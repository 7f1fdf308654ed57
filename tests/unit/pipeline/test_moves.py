"""Moves of blocks: which plan follows, and when it has to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.job.pieces import STATE_PER_PARAMETER
from elastrain.pipeline.moves import TRIES, begun, has_room, moved_on, shadows
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan


def plan_of(cut: int, *members: str) -> PipelinePlan:
    line = Pipeline(members=members or ("a", "b"), cuts=(cut,), share=2, limits=(2, 1))
    return PipelinePlan(blocks=4, pipelines=(line,))


PRESENT, WANTED = plan_of(1), plan_of(3)
MOVING = begun(PRESENT, WANTED, ("a", "b"), 7)


def test_a_move_names_the_shadows_and_changes_nothing_else() -> None:
    assert replace(PRESENT, coming=WANTED.pipelines, named=7) == MOVING
    assert MOVING.goal == WANTED
    assert shadows(MOVING) == {"a": frozenset({1, 2})}
    assert shadows(PRESENT) == {}


def test_a_plan_that_moves_no_block_holds_at_once() -> None:
    line = PRESENT.pipelines[0]
    limits = replace(PRESENT, pipelines=(replace(line, limits=(4, 2)),))
    assert begun(PRESENT, limits, ("a", "b"), 7) == limits
    assert begun(MOVING, PRESENT, ("a", "b"), 9) == PRESENT, "a move that is no longer wanted ends"


def test_a_broken_pipeline_does_not_wait() -> None:
    alone = PipelinePlan(blocks=4, pipelines=(Pipeline(members=("a",), cuts=(), share=2, limits=(1,)),))
    assert begun(PRESENT, alone, ("a",), 7) == alone
    assert begun(MOVING, alone, ("a",), 8) == alone


def test_a_newcomer_is_a_shadow_of_all_its_blocks() -> None:
    three = replace(PRESENT, pipelines=(*PRESENT.pipelines, replace(PRESENT.pipelines[0], members=("c", "d"))))
    named = begun(PRESENT, three, ("a", "b", "c", "d"), 7)
    assert shadows(named) == {"c": frozenset({0}), "d": frozenset({1, 2, 3})}


@pytest.mark.parametrize(
    ("voters", "step", "follows"),
    [
        ({"a": True, "b": False}, 8, WANTED),
        ({"a": False, "b": False}, 8, MOVING),
        ({"a": False, "b": True}, 8, MOVING),
        ({"a": False, "b": False}, 7 + TRIES - 1, MOVING),
        ({"a": False, "b": False}, 7 + TRIES, WANTED),
        ({"b": False}, 7 + TRIES, MOVING),
    ],
    ids=["ready", "not ready", "b is no shadow", "one try left", "no try left", "the shadow has gone"],
)
def test_shadows_become_replicas_when_all_are_ready_or_after_three_tries(
    voters: dict[str, bool], step: int, follows: PipelinePlan
) -> None:
    assert moved_on(MOVING, voters, step) == follows


def test_under_a_memory_limit_a_move_needs_room_for_its_shadows() -> None:
    sizes, needed = (10, 20, 30, 40), STATE_PER_PARAMETER * (20 + 30)
    assert has_room(MOVING, sizes, {"a": needed})
    assert not has_room(MOVING, sizes, {"a": needed - 1, "b": 1 << 40})
    assert not has_room(MOVING, sizes, {}), "it has told nothing"
    assert has_room(PRESENT, sizes, {}), "nothing moves"


def test_shards_go_with_their_blocks_or_the_plan_waits() -> None:
    ready = {"a": True, "b": False}
    assert moved_on(MOVING, ready, 8, are_taken=False) == MOVING
    assert moved_on(MOVING, ready, 7 + TRIES, are_taken=False) == WANTED
