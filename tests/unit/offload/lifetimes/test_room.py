"""Room for pieces within the one limit: what is needed now goes before what is only expected."""

from __future__ import annotations

import random

import pytest

from elastrain.offload.drives.port import PAGE_BYTES
from elastrain.offload.drives.residency import State
from elastrain.offload.errors import LimitTooSmallError
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.pieces.pages import PagePool
from elastrain.offload.lifetimes.pieces.piece_memory import HeldPiece, RoomAccount
from elastrain.offload.planning.plan_values import Kind


class NothingSaved:
    def live_bytes(self) -> int:
        return 0

    def idle_bytes(self) -> int:
        return 0

    def moving_bytes(self) -> int:
        return 0

    def give_up(self) -> bool:
        return False


@pytest.mark.parametrize("expected", ["outside_bytes", "reserved_bytes", "coming_bytes"])
def test_what_is_needed_is_refused_only_where_memory_itself_is_beyond_the_limit(expected: str) -> None:
    limit_bytes = 2 * PAGE_BYTES
    account = RoomAccount(limit_bytes, NothingSaved())
    custody = PieceStore([], account, PagePool(limit_bytes))
    custody.adopt("first", Kind.STATE, PAGE_BYTES)
    setattr(account, expected, PAGE_BYTES)
    custody.adopt("second", Kind.STATE, PAGE_BYTES)
    with pytest.raises(LimitTooSmallError, match="first with second"):
        custody.adopt("third", Kind.STATE, PAGE_BYTES)


@pytest.mark.parametrize("needed_bytes", [0, PAGE_BYTES])
def test_what_is_expected_stays_so_where_there_is_no_room_for_it(needed_bytes: int) -> None:
    """Else what is read ahead would take the room, and the point itself would go beyond the limit."""
    account = RoomAccount(2 * PAGE_BYTES, NothingSaved())
    custody = PieceStore([], account, PagePool(2 * PAGE_BYTES))
    custody.adopt("pinned", Kind.STATE, PAGE_BYTES)
    account.reserved_bytes = account.coming_bytes = PAGE_BYTES
    custody.make_room(needed_bytes)
    assert account.missing_bytes(0) == PAGE_BYTES


class Leaves(NothingSaved):
    """What was saved takes all memory until somebody has looked at it some times."""

    looks = 0

    def live_bytes(self) -> int:
        return 0 if self.looks > 3 else PAGE_BYTES

    def moving_bytes(self) -> int:
        self.looks += 1
        return self.live_bytes()


def test_to_make_room_is_a_wait_where_others_have_to_leave_first() -> None:
    account = RoomAccount(PAGE_BYTES, Leaves())
    custody = PieceStore([], account, PagePool(PAGE_BYTES))
    custody.make_room(0)
    assert not custody.waited_s
    custody.make_room(PAGE_BYTES)
    assert custody.waited_s and not account.missing_bytes(PAGE_BYTES)


def test_pages_that_are_kept_for_nobody_and_pieces_are_never_more_than_the_limit() -> None:
    """Huge pages cannot stand for small ones, nor parked ones for those of a piece that is new."""
    for seed in range(200):
        rng = random.Random(seed)
        limit_bytes = 24 << 20
        account = RoomAccount(limit_bytes, NothingSaved())
        custody = PieceStore([], account, PagePool(limit_bytes))
        pieces: list[HeldPiece] = []
        for number in range(20):
            piece = rng.choice(pieces) if pieces and rng.random() < 0.6 else None
            size_bytes = rng.randint(1, 8 << 20) if piece is None else piece.size_bytes
            if piece is not None and piece.state is not State.DROPPED:
                custody.drop(piece)
            elif account.missing_bytes(size_bytes + PAGE_BYTES):
                continue
            elif piece is None:
                pieces.append(custody.adopt(str(number), Kind.STATE, size_bytes))
            else:
                custody.begin(piece)
            assert custody.accounted_bytes() <= limit_bytes, f"seed {seed}, step {number}"
