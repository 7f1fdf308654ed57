"""Plans: what leaves, where it goes, what stalls, what is computed again, and why."""

from __future__ import annotations

import dataclasses

import pytest

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.move_plan import make_plan
from elastrain.offload.planning.plan_values import (
    Budget,
    Kind,
    LimitBelowLeastError,
    MemoryPiece,
    Plan,
    Point,
    Program,
    Tier,
    UnplayableError,
    Use,
    ideal_s,
)
from tests.support.programs import blocks

FAST = Tier(name="fast", read_bytes_per_s=2.6e9, write_bytes_per_s=3e9, latency_s=2e-4)
SLOW = dataclasses.replace(FAST, name="slow", read_bytes_per_s=0.4e9, write_bytes_per_s=0.4e9)


def planned(program: Program, part: float, *tiers: Tier) -> Plan:
    limit_bytes = int(part * max(facts.needs(program)))
    found = make_plan(program, Budget(limit_bytes=limit_bytes, tiers=tiers))
    assert found.played.peak_bytes <= limit_bytes
    return found


def of_ideal(plan: Plan) -> float:
    return ideal_s(plan.program.points) / plan.played.step_s


def test_where_all_fits_nothing_leaves_and_the_plan_says_so() -> None:
    found = planned(blocks(6), 1.0, FAST)
    assert found.moves == () and found.reason.endswith("nothing leaves")


def test_a_third_of_the_memory_is_enough_with_a_fast_drive() -> None:
    found = planned(blocks(6), 0.3, FAST)
    assert of_ideal(found) > 0.999 and "all of it is hidden" in found.reason


def test_parameters_are_written_once_for_both_of_their_gaps() -> None:
    found = planned(blocks(6), 0.3, FAST)
    moved = [move for move in found.moves if found.program.pieces[move.gap.piece].kind is Kind.PARAMETER]
    for piece in {move.gap.piece for move in moved}:
        written = [move for move in moved if move.gap.piece == piece and move.write_after is not None]
        assert len(written) == 1
    assert len(moved) > len({move.gap.piece for move in moved})


def test_what_cannot_be_hidden_stalls_and_the_plan_says_where() -> None:
    found = planned(blocks(6), 0.3, SLOW)
    assert 0.5 < of_ideal(found) < 0.95 and "cannot be hidden, most of it before" in found.reason


def test_two_slow_drives_are_better_than_one() -> None:
    one, two = planned(blocks(6), 0.3, SLOW), planned(blocks(6), 0.3, SLOW, SLOW)
    assert two.played.step_s < 0.9 * one.played.step_s
    assert {share.tier for move in two.moves for share in move.shares} == {0, 1}


def test_what_takes_long_on_one_drive_is_cut_over_both_whatever_its_size() -> None:
    slow = dataclasses.replace(SLOW, read_bytes_per_s=0.1e9, write_bytes_per_s=0.1e9)
    program = blocks(8, saved_per_block=1)
    one, two = planned(program, 0.25, slow), planned(program, 0.25, slow, slow)
    assert all(len(move.shares) == 2 for move in two.moves)  # all of them are smaller than 16 MiB
    assert sum(two.played.stalls_s) < 0.5 * sum(one.played.stalls_s)


def test_host_memory_holds_what_is_moved_most_often_where_the_drive_is_what_is_short() -> None:
    slow = dataclasses.replace(SLOW, read_bytes_per_s=0.1e9, write_bytes_per_s=0.1e9)
    program = blocks(8, saved_per_block=1)
    tenth = max(facts.needs(program)) // 10
    host = Tier(name="host", read_bytes_per_s=12e9, write_bytes_per_s=12e9, capacity_bytes=tenth, is_memory=True)
    alone, both = planned(program, 0.5, slow), planned(program, 0.5, slow, host)
    assert alone.played.step_s > 1.15 * both.played.step_s
    inside = {program.pieces[move.gap.piece].kind for move in both.moves if move.shares[0].tier == 1}
    assert inside == {Kind.PARAMETER}


def test_large_pieces_lie_on_all_drives() -> None:
    big = dataclasses.replace(blocks(1).pieces[2], size_bytes=64 << 20)
    program = Program(
        points=tuple(Point(name=f"p{n}", seconds=1) for n in range(blocks(1).pieces[2].uses[0].point + 3)),
        pieces=(big,),
    )
    half = dataclasses.replace(FAST, name="half", read_bytes_per_s=1.3e9, write_bytes_per_s=1.5e9)
    limited = dataclasses.replace(
        program, points=(*program.points, Point(name="large", seconds=1, extra_bytes=64 << 20))
    )
    found = make_plan(limited, Budget(limit_bytes=100 << 20, tiers=(FAST, half)))
    first, second = found.moves[0].shares
    assert first.size_bytes == pytest.approx(2 * second.size_bytes, rel=0.01)
    assert first.size_bytes + second.size_bytes == 64 << 20


def test_a_little_host_memory_helps_and_is_not_overdrawn() -> None:
    host = Tier(name="host", read_bytes_per_s=12e9, write_bytes_per_s=12e9, capacity_bytes=60 << 20, is_memory=True)
    alone, both = planned(blocks(6), 0.3, SLOW), planned(blocks(6), 0.3, SLOW, host)
    assert both.played.step_s < 0.98 * alone.played.step_s
    for place in range(len(both.program.points)):
        held = [
            share.size_bytes
            for move in both.moves
            for share in move.shares
            if share.tier == 1
            and any(move.gap.begin < p < move.gap.end for p in (place, place + len(both.program.points)))
        ]
        assert sum(held) <= 60 << 20


def test_what_is_cheaper_to_compute_is_computed_again() -> None:
    slower = dataclasses.replace(SLOW, read_bytes_per_s=0.1e9, write_bytes_per_s=0.1e9)
    cheap, dear = (planned(blocks(6, remake_s=seconds), 0.3, slower) for seconds in (0.02, 50.0))
    assert cheap.recomputed and not dear.recomputed
    assert cheap.played.step_s < 0.9 * dear.played.step_s
    assert "computed again" in cheap.reason


def test_a_limit_below_the_least_names_the_smallest_that_works_and_who_needs_it() -> None:
    program = blocks(4)
    with pytest.raises(LimitBelowLeastError, match=r"B3 alone needs") as told:
        make_plan(program, Budget(limit_bytes=20 << 20, tiers=(FAST,)))
    least = told.value.least_bytes
    found = make_plan(program, Budget(limit_bytes=least, tiers=(FAST,)))
    assert found.played.peak_bytes <= least


def test_drives_that_are_too_small_are_said_to_be() -> None:
    small = dataclasses.replace(FAST, capacity_bytes=1 << 20)
    with pytest.raises(UnplayableError, match="no tier has room"):
        make_plan(blocks(4), Budget(limit_bytes=60 << 20, tiers=(small,)))


def test_gaps_know_the_change_before_them() -> None:
    parameter = MemoryPiece(
        name="p", kind=Kind.PARAMETER, size_bytes=1, uses=(Use(point=0), Use(point=3), Use(point=6, changes=True))
    )
    found = {(gap.begin, gap.end): gap.changed for gap in facts.gaps_of(0, parameter, 8)}
    assert found == {(0, 3): -2, (3, 6): -2, (6, 8): 6}


def test_what_begins_anew_has_no_gap_before_and_needs_no_memory() -> None:
    saved = MemoryPiece(name="a", kind=Kind.ACTIVATION, size_bytes=4, uses=(Use(point=1, begins=True), Use(point=3)))
    points = tuple(Point(name=str(n), seconds=1) for n in range(6))
    assert [(gap.begin, gap.end) for gap in facts.gaps_of(0, saved, 6)] == [(1, 3)]
    assert facts.needs(Program(points=points, pieces=(saved,))) == [0, 4, 4, 4, 0, 0]
