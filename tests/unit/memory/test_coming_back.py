"""States come back to a device once in a view, when no copy is due any more, and if the last peak leaves room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.job.placement import Holders
from elastrain.memory.coming_back import CLEAN_STEPS, ReturnProgress, are_in_place, coming_back, staying_away
from elastrain.memory.memory_budget import Fit, Measured
from tests.unit.memory.test_memory_budget import MIB

LIMIT = 100 * MIB
LAST = Fit(activations_bytes=0, shards_on_disk_bytes=20 * MIB, reason="")


def back(peak_mib: int, last: Fit = LAST) -> Fit | None:
    return coming_back(LIMIT, Measured(kept_to=last, peak_bytes=peak_mib * MIB, activations_bytes=3 * MIB))


def test_as_many_states_come_back_as_the_peak_leaves_room_for() -> None:
    everything, some = back(60), back(90)
    assert everything is not None and some is not None
    assert (everything.shards_on_disk_bytes, everything.activations_bytes) == (0, 23 * MIB)
    assert (some.shards_on_disk_bytes, some.activations_bytes) == (12 * MIB, 5 * MIB)
    assert "90 MiB of 100 MiB were held in the last step: 8 MiB of optimizer shards come back" in some.reason


@pytest.mark.parametrize("peak_mib", [98, 100, 130])
def test_no_state_comes_back_into_the_spare_part_of_the_limit(peak_mib: int) -> None:
    assert back(peak_mib) is None


def test_an_estimate_brings_no_state_back_and_may_send_more_away() -> None:
    fits = replace(LAST, activations_bytes=7 * MIB, shards_on_disk_bytes=0)
    assert staying_away(fits, LAST) == replace(LAST, activations_bytes=7 * MIB)
    more = replace(LAST, shards_on_disk_bytes=21 * MIB)
    assert staying_away(more, LAST) == more


def test_states_come_back_once_after_clean_steps_with_all_holders_in_place() -> None:
    progress = ReturnProgress()
    found = []
    for is_in_place in [*[False] * 2 * CLEAN_STEPS, True, False, *[True] * (CLEAN_STEPS + 1)]:
        progress = progress.measured(is_in_place=is_in_place)
        found.append(progress.is_due())
    assert found == [False] * (len(found) - 1) + [True]
    assert not replace(progress, is_over=True).is_due()


def test_the_order_of_backups_does_not_keep_a_view_from_being_in_place() -> None:
    now, goal = (Holders("a", ("b", "c")),), (Holders("a", ("c", "b")),)
    assert are_in_place(now, goal)
    assert not are_in_place(now, (Holders("b", ("a", "c")),))
    assert not are_in_place(now, (Holders("a", ("b",)),))
