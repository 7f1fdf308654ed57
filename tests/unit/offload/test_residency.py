"""The residency table, row by row where a row carries a promise."""

from __future__ import annotations

import pytest

from elastrain.offload.drives import residency as r
from elastrain.offload.drives.residency import State


def test_a_storage_that_is_never_disturbed_goes_round_once() -> None:
    state, seen = State.RESIDENT, [State.RESIDENT]
    for event in (r.Spill(), r.WriteDone(), r.Prefetch(), r.ReadDone(), r.Release()):
        state, _ = r.advance(state, event)
        seen.append(state)
    assert seen == [
        State.RESIDENT,
        State.WRITING,
        State.SPILLED,
        State.READING,
        State.RELOADED,
        State.DROPPED,
    ]


def test_a_copy_can_be_made_while_the_memory_stays_and_leaving_then_costs_nothing() -> None:
    state, commands = r.advance(State.RESIDENT, r.CopyOut())
    assert (state, commands) == (State.FORWARDED, (r.StartWrite(),))
    state, commands = r.advance(state, r.WriteDone())
    assert (state, commands) == (State.RELOADED, ())
    assert r.advance(state, r.Spill()) == (State.SPILLED, (r.FreeMemory(),))


def test_what_is_pinned_never_leaves_its_memory() -> None:
    for wish in (r.Spill(), r.Prefetch(), r.Found()):
        assert r.advance(State.PINNED, wish) == (State.PINNED, ())
    assert r.advance(State.PINNED, r.Need()) == (State.PINNED, (r.HandBack(),))
    assert r.advance(State.PINNED, r.Release()) == (State.DROPPED, (r.FreeMemory(),))


def test_what_is_needed_while_it_is_written_is_handed_back_from_memory() -> None:
    state, commands = r.advance(State.WRITING, r.Need())
    assert state is State.FORWARDED
    assert commands == (r.CancelWrite(), r.HandBack())


def test_a_forwarded_storage_keeps_its_slot_until_the_write_has_ended() -> None:
    assert r.advance(State.FORWARDED, r.Release()) == (State.LEAVING, ())
    assert r.FreeSlot() in r.advance(State.LEAVING, r.WriteCancelled())[1]


def test_a_write_that_outran_its_cancellation_leaves_two_good_copies() -> None:
    assert r.advance(State.FORWARDED, r.WriteDone()) == (State.RELOADED, ())


def test_a_failed_write_leaves_the_storage_in_memory() -> None:
    assert r.advance(State.WRITING, r.WriteFailed()) == (State.RESIDENT, (r.FreeSlot(),))


def test_a_failed_read_never_hands_memory_back() -> None:
    state, commands = r.advance(State.READING, r.ReadFailed())
    assert state is State.FAILED
    assert r.FreeMemory() in commands
    assert r.advance(State.FAILED, r.Need()) == (State.FAILED, (r.RaiseFault(),))


def test_without_memory_to_read_into_a_storage_stays_on_disk() -> None:
    state, commands = r.advance(State.SPILLED, r.Need())
    assert commands == (r.StartRead(urgent=True),)
    assert r.advance(state, r.NoMemory()) == (State.SPILLED, ())


def test_memory_with_a_good_copy_on_disk_is_given_up_without_writing() -> None:
    assert r.advance(State.RELOADED, r.Spill()) == (State.SPILLED, (r.FreeMemory(),))


def test_a_demand_moves_a_read_that_is_queued_to_the_front() -> None:
    assert r.advance(State.READING, r.Need()) == (State.READING, (r.HastenRead(),))


@pytest.mark.parametrize("state", State, ids=lambda s: s.value)
def test_wishes_never_fail(state: State) -> None:
    for wish in (r.Spill(), r.Prefetch(), r.Found()):
        r.advance(state, wish)


def test_an_event_that_can_not_happen_is_called_a_defect() -> None:
    with pytest.raises(r.ImpossibleEventError, match="WriteDone cannot happen to a storage that is spilled"):
        r.advance(State.SPILLED, r.WriteDone())
