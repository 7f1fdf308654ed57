"""What a board shows, and in which of its two a member's generations are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elastrain.comm.collectives.algorithms import Send
from elastrain.comm.errors import ProtocolError
from elastrain.comm.groups.board import COUNT_MASK, ENTRIES, PAIR_BYTES, Board, Pair, Spot, reached


def _pair() -> Pair:
    pair = Pair(torch.full((PAIR_BYTES,), 0xAA, dtype=torch.uint8))  # whatever was in this memory before
    pair.clear()
    return pair


def _board(generation: int = 1) -> Board:
    return _pair().begin(generation)


def _write(board: Board, turn: int, sends: list[Send], *, lent: bool = False) -> None:
    offered = torch.arange(10.0)
    board.write(turn, words=b"sum", offered=offered, spot=Spot(segment=3, offset_bytes=64), sends=sends, lent=lent)


@example(count=0, ahead=(1 << 31) - 1)
@given(count=st.integers(0, COUNT_MASK), ahead=st.integers(0, (1 << 31) - 1))
def test_a_counter_that_has_begun_anew_is_still_past_what_it_has_passed(count: int, ahead: int) -> None:
    assert reached((count + ahead) & COUNT_MASK, count)
    assert not reached(count, (count + ahead + 1) & COUNT_MASK)


@given(generation=st.integers(1, 1 << 40), turns=st.integers(0, 20))
def test_counts_are_of_one_generation_only(generation: int, turns: int) -> None:
    board = _board(generation)
    for turn in range(turns):
        board.count_published(turn)
    assert board.published(generation) == turns and board.finished(generation) == 0
    assert board.published(generation + 1) == board.published(generation - 1) == 0
    board.begin(generation + 2)
    assert board.published(generation) == board.published(generation + 2) == 0


def test_each_rank_reads_its_own_slice() -> None:
    board = _board()
    _write(board, 0, [Send(to=0, start=0, stop=4), Send(to=2, start=4, stop=10)], lent=True)
    first, second = board.read(0, 0), board.read(0, 2)
    assert (first.spot, first.size_bytes, first.words, first.lent) == (
        Spot(segment=3, offset_bytes=64),
        16,
        b"sum",
        True,
    )
    assert (second.spot, second.size_bytes) == (Spot(segment=3, offset_bytes=64 + 16), 24)


def test_turns_within_reach_do_not_write_over_each_other() -> None:
    board = _board()
    for turn in range(ENTRIES):
        _write(board, turn, [Send(to=1, start=0, stop=turn)])
        board.room(turn).fill_(turn)
    assert [board.read(turn, 1).size_bytes for turn in range(ENTRIES)] == [4 * turn for turn in range(ENTRIES)]
    assert [int(board.room(turn)[-1]) for turn in range(ENTRIES)] == list(range(ENTRIES))


@pytest.mark.parametrize("at", [16, 20, 22, 24, 28, 36])  # segment is free; words, slices, dtype, start, stop
def test_an_entry_that_no_member_writes_is_refused_or_harmless(at: int) -> None:
    board = _board()
    _write(board, 0, [Send(to=1, start=0, stop=10)])
    board.tensor[128 + at : 128 + at + 2].fill_(0xFF)
    try:
        found = board.read(0, 1)
    except ProtocolError:
        return
    assert found.size_bytes <= 40 and len(found.words) <= 3


def test_a_failure_is_seen_until_the_board_begins_anew() -> None:
    board = _board(1)
    assert not board.has_failed(1)
    board.fail()
    assert board.has_failed(1)
    board.begin(2)
    assert board.has_failed(1) and not board.has_failed(2)


def test_what_was_published_stays_until_the_former_board_is_freed() -> None:
    pair = _pair()
    pair.begin(1).count_published(0)
    for generation in (2, 3, 4):  # views in which nothing is published
        board = pair.begin(generation)
        former = pair.find(1)
        assert former is not None and former is not board and former.published(1) == 1
        assert pair.find(generation) is board and pair.find(generation - 1) in (None, former)
    pair.free_former()
    assert pair.find(1) is None and pair.former is None
    board.count_published(0)
    assert pair.begin(5) is not board and pair.former is board and pair.newest == 5


def test_a_generation_does_not_begin_where_others_may_still_read() -> None:
    pair = _pair()
    former = pair.begin(1)
    former.count_published(0)
    unopened = pair.begin(2)
    unopened.count_published(0)  # a barrier that did not come about: no `free_former`
    assert pair.begin(3) is unopened
    assert former.published(1) == 1
    assert unopened.has_failed(2)
