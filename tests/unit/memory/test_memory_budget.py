"""Whether a plan fits, what leaves for it, and how much is missing where nothing helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastrain.errors import ConfigError
from elastrain.job.placement import Holders
from elastrain.memory.held_shards import choose_shards, held_by, sums_needed
from elastrain.memory.memory_budget import (
    VARIES,
    Fit,
    Measured,
    Needs,
    Outside,
    Shortfall,
    copy_budget,
    fit_plan,
    mib,
    settle,
    slots_needed,
    too_small,
)
from elastrain.runtime.memory.process_memory import MemoryLimit

MIB = 1 << 20
DISK = Outside(bytes_per_s=1e9)
NEEDS = Needs(
    base_bytes=100 * MIB,
    parameters_bytes=20 * MIB,
    gradients_bytes=30 * MIB,
    shards_bytes=50 * MIB,
    shards_least_bytes=5 * MIB,
    activations_bytes=200 * MIB,
    activations_least_bytes=20 * MIB,
)


def room(limit_mib: int, needs: Needs = NEEDS) -> Fit:
    found = fit_plan(limit_mib * MIB, needs, outside=DISK)
    assert isinstance(found, Fit), found.reason
    return found


def test_what_fits_stays_in_memory() -> None:
    found = room(400)
    assert (found.activations_bytes, found.shards_on_disk_bytes) == (200 * MIB, 0)
    assert found.reason == "400 MiB of 400 MiB are needed: everything stays in memory"


def test_activations_leave_before_shards_do() -> None:
    found = room(220)
    assert (found.activations_bytes, found.shards_on_disk_bytes) == (20 * MIB, 0)
    found = room(219)
    assert (found.activations_bytes, found.shards_on_disk_bytes) == (20 * MIB, 1 * MIB)
    assert "180 MiB of activations go to disk (0.377 s of its time per micro-batch)" in found.reason
    assert "1 MiB of optimizer shards go to disk" in found.reason


def test_the_smallest_limit_that_works_is_the_one_that_the_sentence_asks_for() -> None:
    missing = fit_plan(150 * MIB, NEEDS, outside=DISK)
    assert isinstance(missing, Shortfall)
    assert missing.missing_bytes == 25 * MIB
    assert "25 MiB too small for this plan: 175 MiB are needed with activations" in missing.reason
    more = 25 * MIB + NEEDS.base_bytes // VARIES
    assert more > 25 * MIB and f"raise the limit by {mib(more)}, or start" in missing.reason, "a base may differ later"
    assert "nobody has measured yet" not in missing.reason
    early = fit_plan(150 * MIB, replace(NEEDS, activations_bytes=0, is_measured=False), outside=DISK)
    assert "and more for saved activations, which were not measured yet, 150 MiB allowed" in early.reason
    assert "smaller micro-batches would change the bits" in missing.reason
    assert room(175).activations_bytes == 20 * MIB


def test_a_directory_without_a_limit_is_refused() -> None:
    assert MemoryLimit.of(None, ()) is None
    with pytest.raises(ConfigError, match=r"/ssd is for what a memory limit leaves no room for: give one too"):
        MemoryLimit.of(None, ("/ssd",))


def test_without_a_disk_everything_has_to_fit() -> None:
    missing = fit_plan(399 * MIB, NEEDS, outside=None)
    assert isinstance(missing, Shortfall)
    assert missing.missing_bytes == MIB
    assert "--offload-dir" in missing.reason
    assert isinstance(fit_plan(400 * MIB, NEEDS, outside=None), Fit)


def test_a_check_takes_the_place_of_states_that_the_first_update_makes() -> None:
    checked = replace(NEEDS, check_bytes=40 * MIB, shards_at_check_bytes=10 * MIB)
    assert room(400, checked).shards_on_disk_bytes == 0
    # Once an update has made them, the check is over, and the shards have its room.
    assert room(220, checked) == replace(room(220), reason=room(220, checked).reason)
    assert room(219, checked).shards_on_disk_bytes == 41 * MIB
    # Where they are there at a check too, each leaves for it.
    both = replace(checked, shards_at_check_bytes=50 * MIB)
    assert both.total_bytes == 440 * MIB
    assert room(219, both).shards_on_disk_bytes == 41 * MIB
    least = fit_plan(214 * MIB, both, outside=DISK)
    assert isinstance(least, Shortfall) and least.missing_bytes == MIB


def test_before_a_pass_was_measured_shards_leave_what_they_can_to_activations() -> None:
    early = replace(NEEDS, activations_bytes=0, activations_least_bytes=0, is_measured=False)
    assert room(200, early).shards_on_disk_bytes == 0
    found = room(199, early)
    assert (found.activations_bytes, found.shards_on_disk_bytes) == (44 * MIB, 45 * MIB)


def test_before_a_pass_was_measured_all_that_is_left_is_for_activations() -> None:
    fresh = replace(NEEDS, activations_bytes=0, activations_least_bytes=0)
    assert room(300, fresh).activations_bytes == 100 * MIB


@pytest.mark.parametrize(
    ("runs", "own", "todo", "slots"),
    [
        (8, [], [0], 1),
        (8, [], [0, 1], 2),
        (8, [], [0, 1, 2, 3], 3),
        (8, [], list(range(8)), 4),
        (8, [], [1, 2], 2),  # no siblings: both stay
        (8, [], [1, 2, 4, 7], 4),
        (8, [(0, 4)], [6], 2),
        (8, [(0, 4)], [], 1),
        (8, [(0, 1), (2, 3), (4, 5)], [1, 3, 5, 7], 4),
    ],
)
def test_siblings_share_a_copy_of_the_gradient(
    runs: int, own: list[tuple[int, int]], todo: list[int], slots: int
) -> None:
    assert slots_needed(runs, own, todo) == slots


@pytest.mark.parametrize(("limit_mib", "budget_mib"), [(300, 1), (400, 1), (424, 2), (448, 4), (496, 4), (1 << 20, 4)])
def test_copies_to_new_holders_take_what_is_free_and_always_come_to_an_end(limit_mib: int, budget_mib: int) -> None:
    """400 MiB are needed; 4 members, Adam: a budget of 2 MiB may bring 4 · 3 · 2 MiB to one of them."""
    assert copy_budget((limit_mib - 400) * MIB, (MIB,) * 4, 4 * 3.0) == budget_mib * MIB


def test_an_operation_that_does_not_fit_names_the_smallest_limit_that_works() -> None:
    said = too_small(200 * MIB, needed_bytes=30 * MIB, left_bytes=18 * MIB, share=2)
    assert "limit of 200 MiB is too small: one operation of the model needs 30.0 MiB" in said
    assert "the smallest limit that lets it work is 224 MiB" in said


def test_a_primary_needs_a_buffer_per_level_of_the_tree() -> None:
    assert [sums_needed(members) for members in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 3]


def test_what_is_held_now_and_what_is_to_come_both_need_room() -> None:
    now = (Holders("a", ("b",)), Holders("b", ("a",)), Holders("c", ("b",)))
    goal = (Holders("a", ("b",)), Holders("b", ("c",)), Holders("a", ("b",)))
    held = held_by("a", (now, goal), (10, 100, 1000), moments=2.0)
    assert [(h.shard, h.is_primary, h.leaves_bytes) for h in held] == [(0, True, 20), (1, False, 600), (2, True, 2000)]


def test_backups_go_to_disk_first_and_no_more_than_needed() -> None:
    placement = tuple(Holders("a", ()) if shard < 2 else Holders("b", ("a",)) for shard in range(4))
    held = held_by("a", (placement,), (10, 20, 30, 40), moments=2.0)
    assert choose_shards(held, 0)[0] == frozenset()
    assert choose_shards(held, 1)[0] == {3}
    assert choose_shards(held, 240)[0] == {3}
    assert choose_shards(held, 241)[0] == {3, 2}
    chosen, reason = choose_shards(held, 421)
    assert chosen == {3, 2, 1}
    assert reason == "2 shards held as a backup and 1 as primary are on disk"


FITS = Fit(activations_bytes=40 * MIB, shards_on_disk_bytes=3 * MIB, reason="it fits")


@pytest.mark.parametrize(
    "estimate", [Shortfall(missing_bytes=1, reason="?"), replace(FITS, shards_on_disk_bytes=9 * MIB)]
)
def test_what_was_measured_to_fit_is_not_refused_and_no_shard_leaves_for_an_estimate(estimate: Fit | Shortfall) -> None:
    measured = Measured(kept_to=FITS, peak_bytes=190 * MIB, activations_bytes=30 * MIB)
    settled = settle(200 * MIB, estimate, measured)
    assert isinstance(settled, Fit)
    assert (settled.activations_bytes, settled.shards_on_disk_bytes) == (40 * MIB, 3 * MIB)
    assert settled.reason == "190 MiB of 200 MiB of memory were held in the last step: it fits as it is"
    assert settle(189 * MIB, estimate, measured) is estimate, "the step took more than it may"


def test_an_estimate_that_moves_no_shard_out_is_followed() -> None:
    estimate = replace(FITS, activations_bytes=20 * MIB)
    measured = Measured(kept_to=FITS, peak_bytes=190 * MIB, activations_bytes=30 * MIB)
    assert settle(200 * MIB, estimate, measured) is estimate


def test_one_directory_for_offload_may_be_a_string_or_a_path() -> None:
    for told in ("/ssd", Path("/ssd"), ["/ssd"], (Path("/ssd"),)):
        limit = MemoryLimit.of(1 << 20, told)
        assert limit is not None and limit.directories == ("/ssd",)
