"""The states of a member on a device, from a change of holders until they have come back, and the memory given back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from elastrain.job.placement import Holders
from elastrain.memory.coming_back import CLEAN_STEPS
from elastrain.memory.memory_budget import Fit, Measured
from elastrain.runtime.memory.returning_states import ReturningStates
from tests.unit.memory.test_memory_budget import MIB
from tests.unit.memory.test_two_memories import DEVICE, NOW

LIMIT = 100 * MIB
SLOT = DEVICE.sizes.slot_bytes
ALONE = tuple(Holders(DEVICE.me) for _ in NOW)
CHANGING = replace(DEVICE, placements=(ALONE, NOW), slots=2)
AWAY = Fit(activations_bytes=0, shards_on_disk_bytes=20 * MIB, reason="")
FITS = Fit(activations_bytes=0, shards_on_disk_bytes=0, reason="")


class Executor:
    """The gradients' memory of a member that had three slots, two of which are in use."""

    def __init__(self) -> None:
        self.trimmed: list[int] = []
        self.model = SimpleNamespace(gradients=SimpleNamespace(nbytes=3 * SLOT))

    def trim(self, slots: int) -> None:
        self.trimmed.append(slots)

    def gradients_bytes(self) -> int:
        return int(self.model.gradients.nbytes)


def begun() -> tuple[ReturningStates, Executor, int]:
    executor: Any = Executor()
    states = ReturningStates(executor, SimpleNamespace(mark=lambda: None))  # type: ignore[arg-type]
    return states, executor, states.begin_view(CHANGING)


def decided(states: ReturningStates, last: Fit, fit: Fit = FITS, peak_mib: int = 70) -> Fit:
    measured = Measured(kept_to=last, peak_bytes=peak_mib * MIB, activations_bytes=0)
    return states.decided(LIMIT, fit, measured, is_first=False)


def test_slots_that_are_still_in_use_count_in_a_new_plan() -> None:
    states, executor, surplus_bytes = begun()
    assert (executor.trimmed, surplus_bytes) == ([2], SLOT)
    assert states.gradients_bytes(CHANGING) == CHANGING.gradients_bytes + SLOT


def test_the_account_follows_the_holders_once_and_states_come_back_once() -> None:
    states, executor, _ = begun()
    mine = [each.shard for each in replace(DEVICE, placements=(ALONE, ALONE)).held]
    states.carried_out(frozenset(mine))
    assert states.in_place(CHANGING, (ALONE, NOW)) is None
    assert decided(states, AWAY) == AWAY, "copies are due, so an estimate brings nothing back"
    assert states.in_place(CHANGING, (NOW, NOW)) is None, "the commit is carried out after this"
    assert decided(states, AWAY) == AWAY
    account = states.in_place(CHANGING, (NOW, NOW))
    assert account is not None and account.placements == (NOW, NOW)
    assert executor.trimmed == [2, 2]
    assert states.has_news
    away_bytes = states.away_bytes(account)
    assert 0 < away_bytes == sum(each.leaves_bytes for each in account.held)
    assert away_bytes < sum(each.leaves_bytes for each in CHANGING.held), "half has been handed over"
    for _ in range(CLEAN_STEPS - 1):
        assert decided(states, AWAY) == AWAY
        assert states.in_place(account, (NOW, NOW)) is None
    assert decided(states, AWAY, peak_mib=99) == AWAY, "no room by measurement"
    assert decided(states, AWAY).shards_on_disk_bytes == 0
    assert states.has_news
    states.carried_out(frozenset())
    assert decided(states, AWAY) == AWAY, "not twice in a view"


def test_no_other_state_takes_the_place_of_one_that_is_outside() -> None:
    states, _, _ = begun()
    first, *others = DEVICE.held
    states.carried_out(frozenset({others[0].shard}))
    less = replace(AWAY, shards_on_disk_bytes=MIB)
    assert states.candidates(DEVICE.held, less, AWAY) == (others[0],)
    assert states.candidates(DEVICE.held, AWAY, less) == states.candidates(DEVICE.held, less, None) == DEVICE.held
    assert first in DEVICE.held
