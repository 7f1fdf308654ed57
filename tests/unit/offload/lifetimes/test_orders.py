"""Programs made of what was seen of a step, in each order of updates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.move_plan import make_plan
from elastrain.offload.planning.orders import Arranged, Arrival, BlockSizes, StepStage, UpdateOrder, arrange, needed_at
from elastrain.offload.planning.plan_values import Budget, Kind, Tier, Use
from elastrain.offload.planning.program import Carried

F, B, U = StepStage.FORWARD, StepStage.BACKWARD, StepStage.UPDATE
BLOCKS = tuple(
    BlockSizes(name=f"b{n}", parameter_bytes=10, gradient_bytes=10, state_bytes=20, touches=(n,)) for n in range(3)
)


def seen(*stages: tuple[StepStage, int]) -> list[Arrival]:
    return [
        Arrival(stage=stage, block=block, seconds=1.0, saved_bytes=7 if stage is F else 0) for stage, block in stages
    ]


STEP = seen((F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0), (U, 0), (U, 1), (U, 2))


def uses(arranged: Arranged, kind: Kind, block: int) -> tuple[Use, ...]:
    return arranged.program.pieces[arranged.pieces.index((kind, block))].uses


def test_updates_at_the_end_are_as_they_were_seen() -> None:
    found = arrange(BLOCKS, STEP, UpdateOrder.AFTER_BACKWARD)
    assert [stage for stage, _ in found.points] == [F, F, F, B, B, B, U, U, U]
    assert uses(found, Kind.PARAMETER, 1) == (Use(point=1), Use(point=4), Use(point=7, changes=True))
    assert uses(found, Kind.GRADIENT, 1) == (Use(point=4, changes=True, begins=True), Use(point=7))
    assert uses(found, Kind.STATE, 1) == (Use(point=7, changes=True),)
    assert uses(found, Kind.ACTIVATION, 1) == (Use(point=1, begins=True), Use(point=4))


def test_updates_before_the_forward_use_the_gradients_of_the_step_before() -> None:
    found = arrange(BLOCKS, STEP, UpdateOrder.BEFORE_FORWARD)
    assert found.points == ((U, 0), (F, 0), (U, 1), (F, 1), (U, 2), (F, 2), (B, 2), (B, 1), (B, 0))
    assert uses(found, Kind.GRADIENT, 1) == (Use(point=2), Use(point=7, changes=True, begins=True))
    assert uses(found, Kind.PARAMETER, 1) == (Use(point=2, changes=True), Use(point=3), Use(point=7))


def test_gradients_of_several_backwards_begin_once_and_each_forward_has_its_own_saved_bytes() -> None:
    twice = seen((F, 0), (B, 0), (F, 0), (B, 0), (U, 0))
    found = arrange(BLOCKS[:1], twice, UpdateOrder.AFTER_BACKWARD)
    assert [use.begins for use in uses(found, Kind.GRADIENT, 0)] == [True, False, False]
    saved = [
        piece.uses for key, piece in zip(found.pieces, found.program.pieces, strict=True) if key[0] is Kind.ACTIVATION
    ]
    assert [[use.point for use in each] for each in saved] == [[0, 1], [2, 3]]


def test_two_forwards_before_two_backwards_are_paired_from_the_inside() -> None:
    found = arrange(BLOCKS[:1], seen((F, 0), (F, 0), (B, 0), (B, 0), (U, 0)), UpdateOrder.AFTER_BACKWARD)
    saved = sorted(
        tuple(use.point for use in piece.uses) for piece in found.program.pieces if piece.kind is Kind.ACTIVATION
    )
    assert saved == [(0, 3), (1, 2)]


def test_what_a_forward_saved_can_be_computed_again_from_a_part_of_it() -> None:
    step = [replace(each, needed_bytes=3) if each.stage is F and each.block == 1 else each for each in STEP]
    found = arrange(BLOCKS, step, UpdateOrder.BEFORE_FORWARD)
    (again,) = found.program.recomputations
    (dropped,) = again.pieces
    assert (again.after, again.again, again.seconds) == (3, 7, 1.0)
    assert found.pieces[dropped] == (Kind.ACTIVATION, 3) and found.program.pieces[dropped].size_bytes == 4
    kept = found.pieces.index((Kind.ACTIVATION, needed_at(3)))
    assert found.program.pieces[kept].size_bytes == 3
    slow = Tier(name="drive", read_bytes_per_s=1.0, write_bytes_per_s=1.0)
    assert not make_plan(found.program, Budget(limit_bytes=10**6, tiers=(slow,))).recomputed
    least, _ = facts.least_bytes(found.program)
    carried = Carried(found, make_plan(found.program, Budget(limit_bytes=least, tiers=(slow,))))
    assert carried.given_up == {3} and carried.begun_bytes(7) == 4 + 10  # and the gradients


def test_a_block_that_shares_weights_uses_the_other_ones_pieces_too() -> None:
    tied = (
        BLOCKS[0],
        BLOCKS[1],
        BlockSizes(name="head", parameter_bytes=0, gradient_bytes=0, state_bytes=0, touches=(2, 0)),
    )
    steps = seen((F, 0), (F, 1), (F, 2), (B, 2), (B, 1), (B, 0), (U, 0), (U, 1))
    found = arrange(tied, steps, UpdateOrder.AFTER_BACKWARD)
    assert [use.point for use in uses(found, Kind.PARAMETER, 0)] == [0, 2, 3, 5, 6]
    assert [(use.point, use.begins) for use in uses(found, Kind.GRADIENT, 0)] == [(3, True), (5, False), (6, False)]


@pytest.mark.parametrize("order", UpdateOrder)
def test_a_plan_can_be_made_of_it_down_to_the_least_limit(order: UpdateOrder) -> None:
    program = arrange(BLOCKS, STEP, order).program
    least, _ = facts.least_bytes(program)
    tier = Tier(name="drive", read_bytes_per_s=30, write_bytes_per_s=30)
    assert make_plan(program, Budget(limit_bytes=least, tiers=(tier,))).played.peak_bytes <= least
