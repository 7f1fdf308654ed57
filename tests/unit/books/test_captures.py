"""States that are captured for a checkpoint: copied later, or before they change."""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.buffers.captures import Captures
from tests.sim.symbols import Cell, Shelf, State


class Sink:
    """Remembers what it was given; `room` states fit at a time."""

    def __init__(self, room: int = 9) -> None:
        self.taken: dict[tuple[int, int], object] = {}
        self.lent: dict[tuple[int, int], Cell] = {}
        self.digests: dict[int, int | None] = {}
        self.room = room
        self.waited = 0
        self.asked: list[int] = []
        """How many states were there when a step had to wait for one more."""

    def is_ready_for(self, size_bytes: int) -> bool:
        return self.room > len(self.taken) or self.room == 0

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        self.waited += self.room <= len(self.taken)
        if is_awaited:
            self.asked.append(len(self.taken))
        return self.room > 0

    def take(self, step: int, digest: int | None, state: State) -> None:
        self.taken[step, state.shard] = state.cell.value
        self.digests[state.shard] = digest

    def lend(self, step: int, digest: int | None, state: State) -> None:
        self.lent[step, state.shard] = state.cell


def shelf_with(*values: str) -> Shelf[int]:
    shelf: Shelf[int] = Shelf([Cell(None) for _ in values])
    for shard, value in enumerate(values):
        shelf[shard] = State(shard, Cell(value))
    return shelf


def test_what_is_copied_later_is_the_state_of_its_step() -> None:
    shelf, sink = shelf_with("zero", "one"), Sink()
    captures = Captures(shelf, sink)
    captures.capture(p.Capture(step=4, shards=(0, 1), digests=(7, None)))
    captures.settle(0)
    shelf[0].cell.value = "changed"
    while captures.has_work:
        captures.work()
    assert sink.taken == {(4, 0): "zero", (4, 1): "one"}
    assert sink.digests == {0: 7, 1: None}
    assert sink.asked == [0] and not sink.waited


def test_a_state_whose_place_another_takes_is_given_away_without_a_copy() -> None:
    shelf, sink = shelf_with("zero"), Sink()
    captures, cell = Captures(shelf, sink), shelf[0].cell
    captures.capture(p.Capture(step=4, shards=(0,), digests=(7,)))
    captures.give_away(0)
    shelf[0] = State(0, Cell("next"))
    assert sink.taken == {(4, 0): "zero"} and cell.value == "zero" and not captures.has_work


def test_nothing_is_copied_behind_without_room_and_a_change_waits_for_it() -> None:
    shelf, sink = shelf_with("zero", "one"), Sink(room=1)
    captures = Captures(shelf, sink)
    captures.capture(p.Capture(step=4, shards=(0, 1), digests=(7, None)))
    captures.work()
    assert sink.taken == {(4, 0): "zero"} and not captures.has_work
    captures.settle(1)
    assert sink.waited == 1 and (4, 1) in sink.taken


def test_a_state_that_another_replaces_waits_for_room_too() -> None:
    shelf, sink = shelf_with("zero", "one"), Sink(room=1)
    captures = Captures(shelf, sink)
    captures.capture(p.Capture(step=4, shards=(0, 1), digests=(7, None)))
    captures.give_away(0)
    captures.give_away(1)
    assert sink.waited == 1 and sink.taken == {(4, 0): "zero", (4, 1): "one"}


def test_where_no_copy_has_room_the_state_itself_is_written_before_it_changes() -> None:
    shelf, sink = shelf_with("zero", "one"), Sink(room=0)
    captures, cells = Captures(shelf, sink), [shelf[0].cell, shelf[1].cell]
    captures.capture(p.Capture(step=4, shards=(0, 1), digests=(7, None)))
    captures.settle(0)
    captures.give_away(1)
    assert sink.lent == {(4, 0): cells[0], (4, 1): cells[1]} and not sink.taken
    assert {0, 1} <= set(shelf)  # they stay where they are
    captures.settle(0)
    assert len(sink.asked) == 2  # once is enough


def test_where_no_copy_has_room_and_no_step_follows_all_states_are_written() -> None:
    """After the last step nothing changes any more, and the end of the job waits for its checkpoint."""
    shelf, sink = shelf_with("zero", "one"), Sink(room=0)
    captures = Captures(shelf, sink)
    captures.capture(p.Capture(step=4, shards=(0, 1), digests=(7, None)))
    while captures.has_work:
        captures.work()
    assert set(sink.lent) == {(4, 0), (4, 1)} and not sink.taken


def test_captures_of_a_checkpoint_that_is_over_are_let_go() -> None:
    captures = Captures(shelf_with("zero"), Sink())
    captures.capture(p.Capture(step=4, shards=(0,), digests=(7,)))
    captures.drop(4)
    assert not captures.has_work
