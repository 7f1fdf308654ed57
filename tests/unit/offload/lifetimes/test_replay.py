"""The simulator that judges plans: small steps worked out by hand."""

from __future__ import annotations

import pytest

from elastrain.offload.planning.plan_values import (
    Budget,
    Gap,
    Kind,
    MemoryPiece,
    Move,
    Point,
    Program,
    Recomputation,
    Share,
    Tier,
    UnplayableError,
    Use,
)
from elastrain.offload.planning.replay import replay

SLOW = Tier(name="slow", read_bytes_per_s=10, write_bytes_per_s=10)


def step(*seconds: float, pieces: tuple[MemoryPiece, ...]) -> Program:
    points = tuple(Point(name=f"point {number}", seconds=each) for number, each in enumerate(seconds))
    return Program(points=points, pieces=pieces)


def piece(*uses: Use, size_bytes: int = 10) -> MemoryPiece:
    return MemoryPiece(name="it", kind=Kind.STATE, size_bytes=size_bytes, uses=uses)


def whole(gap: Gap, *, write_after: int | None, read_at: int, size_bytes: int = 10) -> Move:
    return Move(gap=gap, write_after=write_after, read_at=read_at, shares=(Share(tier=0, size_bytes=size_bytes),))


STATE = piece(Use(point=0, changes=True))
GAP = Gap(piece=0, begin=0, end=4, changed=0)


def played(*seconds: float, read_at: int, limit_bytes: int = 10, tier: Tier = SLOW):  # type: ignore[no-untyped-def]
    program = step(*seconds, pieces=(STATE,))
    moves = (whole(GAP, write_after=0, read_at=read_at),)
    return replay(program, moves, Budget(limit_bytes=limit_bytes, tiers=(tier,)))


def test_a_step_without_moves_takes_what_its_points_take() -> None:
    found = replay(step(1, 2, pieces=(STATE,)), (), Budget(limit_bytes=10, tiers=(SLOW,)))
    assert (found.step_s, found.stalls_s, found.peak_bytes, found.written_bytes) == (3, (0, 0), 10, 0)


def test_what_is_written_and_read_while_others_run_costs_nothing() -> None:
    found = played(1, 1, 1, 1, read_at=3)
    assert found.step_s == pytest.approx(4)
    assert (found.written_bytes, found.read_bytes) == (10, 10)


def test_who_needs_a_piece_waits_until_it_is_read() -> None:
    found = played(1, 1, 1, 0.25, read_at=3)
    assert found.stalls_s == pytest.approx((0.75, 0, 0, 0))


def test_a_write_that_has_begun_is_in_front_of_a_read() -> None:
    # The write takes the first second after point 0, so that the read begins half a second after it was asked for.
    assert played(1, 0.5, 0.5, 0, read_at=1).stalls_s[0] == pytest.approx(0)  # it had not left: it stays
    both = (STATE, piece(Use(point=1)))
    moves = (
        whole(GAP, write_after=0, read_at=4),
        whole(Gap(piece=1, begin=1, end=5, changed=None), write_after=None, read_at=4),
    )
    program = step(1, 1, 1, 1, pieces=both)
    found = replay(program, moves, Budget(limit_bytes=20, tiers=(SLOW,)))
    # Both are read when point 0 is to begin, one after the other: it waits for its own, and point 1 for nothing.
    assert found.stalls_s == pytest.approx((1, 0, 0, 0))


def test_the_copy_of_what_nothing_changes_is_never_written() -> None:
    program = step(1, 1, 1, pieces=(piece(Use(point=0)),))
    moves = (whole(Gap(piece=0, begin=0, end=3, changed=None), write_after=None, read_at=2),)
    assert replay(program, moves, Budget(limit_bytes=10, tiers=(SLOW,))).written_bytes == 0


def test_two_halves_on_two_drives_are_there_in_half_the_time() -> None:
    program = step(1, 1, 1, 0.25, pieces=(STATE,))
    halves = (Share(tier=0, size_bytes=5), Share(tier=1, size_bytes=5))
    moves = (Move(gap=GAP, write_after=0, read_at=3, shares=halves),)
    found = replay(program, moves, Budget(limit_bytes=10, tiers=(SLOW, SLOW)))
    assert found.stalls_s[0] == pytest.approx(0.25)


def test_what_is_computed_again_costs_its_seconds_and_no_byte() -> None:
    program = step(1, 1, 1, pieces=(piece(Use(point=0, begins=True), Use(point=2)), piece(Use(point=1))))
    again = Recomputation(name="block", pieces=(0,), after=0, again=2, seconds=0.5)
    found = replay(program, (), Budget(limit_bytes=20, tiers=(SLOW,)), (again,))
    assert (found.step_s, found.read_bytes) == (pytest.approx(3.5), 0)


def test_a_plan_that_never_brings_a_piece_back_cannot_be_played() -> None:
    gone = Recomputation(name="block", pieces=(0,), after=0, again=99, seconds=0.0)  # at no point of this step
    with pytest.raises(UnplayableError, match="point 2 waits for ever for it"):
        replay(step(1, 1, 1, pieces=(piece(Use(point=0), Use(point=2)),)), (), _budget(10), (gone,))


def _budget(limit_bytes: int) -> Budget:
    return Budget(limit_bytes=limit_bytes, tiers=(SLOW,))


def test_a_plan_that_leaves_too_much_in_memory_cannot_be_played() -> None:
    pieces = (piece(Use(point=0)), piece(Use(point=1, begins=True), size_bytes=5))
    with pytest.raises(UnplayableError, match="waits for ever for memory"):
        replay(step(1, 1, pieces=pieces), (), _budget(14))
    with pytest.raises(UnplayableError, match="above the limit"):
        replay(step(1, 1, pieces=pieces), (), _budget(9))
