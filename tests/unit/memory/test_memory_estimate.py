"""What each member will hold, stated before a job starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.base import environment
from elastrain.base.environment import EstimateWish
from elastrain.memory.memory_budget import WRITING_BYTES
from elastrain.memory.memory_estimate import MemberBytes, ScriptNeeds, WorkerLimit, state_memory
from elastrain.memory.memory_moments import ADDING, CHECKING, COMPUTING, VERIFYING, HeldAt

MIB = 1 << 20
SCRIPT = ScriptNeeds(
    sizes=(4 * MIB,) * 8,
    moments=(2.0,) * 8,
    masters=False,
    model_bytes=32 * MIB,
    slot_bytes=32 * MIB,
    runs=8,
    backups=1,
    base_bytes=200 * MIB,
    landing_bytes=0,
)
ON_TWO_NODES = EstimateWish(file="", nodes=2, members_per_node=2).members


def test_ranks_are_spread_over_the_nodes_in_order() -> None:
    assert ON_TWO_NODES == {"m0": "node0", "m1": "node0", "m2": "node1", "m3": "node1"}


def at(stated: MemberBytes, name: str) -> HeldAt:
    return next(each for each in stated.moments if each.moment == name)


def mib(moment: HeldAt) -> dict[str, int]:
    """The parts that are not nothing."""
    return {name: size_bytes // MIB for name, size_bytes in moment.parts.items() if size_bytes}


def test_each_part_of_an_even_job_is_what_its_shards_make() -> None:
    # Two shards of 4 MiB as primary, two as a backup; two runs, a copy each. Sums of four members: two levels on 8 MiB;
    # 8 MiB of scratch, and 8 MiB kept for the update of backups.
    expected = {"base": 200, "computing": 8, "model": 32, "gradients": 64 + 16 + 8 + 8}
    expected |= {"shards": 16, "backups": 24, "unverified": 24}
    for stated in state_memory(SCRIPT, ON_TWO_NODES):
        assert stated.worst.moment == VERIFYING
        assert mib(stated.worst) == expected
        assert stated.worst.total == sum(expected.values()) * MIB


def test_a_backups_next_state_is_there_at_one_moment_alone() -> None:
    for stated in state_memory(SCRIPT, ON_TWO_NODES):
        assert {each.moment for each in stated.moments if each.parts["unverified"]} == {VERIFYING}
        assert at(stated, COMPUTING).total == at(stated, ADDING).total == stated.worst.total - 24 * MIB


def test_in_the_first_step_there_is_the_copy_of_a_check_and_no_state_nor_sum() -> None:
    for stated in state_memory(SCRIPT, ON_TWO_NODES):
        computing, checking, *later = stated.moments
        assert (computing.moment, checking.moment) == (
            f"in the first step, {COMPUTING}",
            f"in the first step, {CHECKING}",
        )
        # A backup has parameters of its own.
        assert mib(computing) == {"base": 200, "computing": 8, "model": 32, "gradients": 64, "backups": 8}
        assert checking.total - computing.total == 32 * MIB
        assert CHECKING not in {each.moment for each in later}


def test_a_member_alone_has_no_backups_and_no_sums_and_checks_nobody() -> None:
    (alone,) = state_memory(replace(SCRIPT, runs=1), {"m0": "node0"})
    assert mib(alone.worst) == {"base": 200, "computing": 8, "model": 32, "gradients": 32 + 32, "shards": 64}
    assert not any(CHECKING in each.moment for each in alone.moments)


@pytest.mark.parametrize(("members", "levels"), [(2, 1), (3, 1), (4, 2), (7, 2), (8, 3)])
def test_sums_wait_for_one_another_once_per_level_of_the_tree(members: int, levels: int) -> None:
    script = replace(SCRIPT, sizes=(4 * MIB,) * 56, moments=(0.0,) * 56, backups=0, runs=members)
    nodes = {f"m{n}": "node0" for n in range(members)}
    for stated in state_memory(script, nodes):
        # One copy, and as much scratch as there is of this primary's.
        own = 56 // members * 4
        assert stated.worst.parts["gradients"] // MIB == pytest.approx(32 + own * (levels + 1), abs=4 * (levels + 1))


@pytest.mark.parametrize(
    ("moments", "backups", "again", "worst"),
    [
        (2.0, 1, False, VERIFYING),
        (0.0, 0, False, f"in the first step, {CHECKING}"),
        (0.0, 0, True, CHECKING),
        (2.0, 0, False, f"in the first step, {CHECKING}"),
    ],
)
def test_the_copy_of_a_check_has_gone_when_the_first_update_makes_states(
    moments: float, backups: int, again: bool, worst: str
) -> None:
    script = replace(SCRIPT, runs=4, moments=(moments,) * 8, backups=backups, slot_bytes=64 * MIB)
    for stated in state_memory(script, ON_TWO_NODES, is_checked_again=again):
        assert stated.worst.moment == worst


def test_a_new_gradient_of_the_largest_parameter_lies_beside_its_copy() -> None:
    more, less = (state_memory(replace(SCRIPT, landing_bytes=size), ON_TWO_NODES)[0] for size in (8 * MIB, 0))
    assert more.worst.total - less.worst.total == 8 * MIB


def test_without_backups_only_primaries_hold_state() -> None:
    for stated in state_memory(replace(SCRIPT, backups=0), ON_TWO_NODES):
        assert [stated.worst.parts[name] for name in ("backups", "unverified")] == [0, 0]
        assert at(stated, COMPUTING).parts["shards"] == 16 * MIB


def test_optimizer_state_counts_where_its_shard_lies() -> None:
    half_frozen = replace(SCRIPT, moments=(2.0,) * 4 + (0.0,) * 4, backups=0)
    assert sum(at(each, ADDING).parts["shards"] for each in state_memory(half_frozen, ON_TWO_NODES)) == 32 * MIB


def test_a_shard_without_gradients_takes_nothing_for_them() -> None:
    all_trained, half_frozen = (
        state_memory(replace(SCRIPT, frozen=frozen), ON_TWO_NODES) for frozen in (frozenset(), frozenset(range(4)))
    )
    # Of four shards: sums of two levels and scratch at their primaries, a kept one at their backups.
    before, after = (sum(at(e, ADDING).parts["gradients"] for e in each) for each in (all_trained, half_frozen))
    assert before - after == 4 * (2 + 1 + 1) * 4 * MIB


def test_masters_are_the_primarys() -> None:
    for stated in state_memory(replace(SCRIPT, masters=True), ON_TWO_NODES):
        assert [stated.worst.parts[name] // MIB for name in ("shards", "backups", "unverified")] == [24, 24, 24]


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_each_state_of_a_checkpoint_waits_at_one_member(backups: int) -> None:
    stated = state_memory(replace(SCRIPT, backups=backups, all_write=False), ON_TWO_NODES)
    staging = [each.worst.parts["staging"] for each in stated]
    assert sum(each - WRITING_BYTES for each in staging if each) == 8 * 12 * MIB


def test_on_local_disks_each_state_waits_at_all_of_its_holders() -> None:
    script = replace(SCRIPT, backups=1, all_write=True)
    stated = state_memory(script, ON_TWO_NODES)
    assert sum(each.worst.parts["staging"] - WRITING_BYTES for each in stated) == 2 * 8 * 12 * MIB


def tight(limit_mib: int, *, has_disk: bool, moments: float = 2.0) -> MemberBytes:
    limit = WorkerLimit(limit_bytes=limit_mib * MIB, has_disk=has_disk, assumed_moments=2.0)
    return state_memory(replace(SCRIPT, limit=limit, moments=(moments,) * 8), ON_TWO_NODES)[0]


def test_what_a_limit_leaves_no_room_for_is_on_disk() -> None:
    ample = tight(404, has_disk=True)
    assert (ample.worst.spill, ample.shortfall) == (0, "")
    squeezed = tight(390, has_disk=True)
    assert at(squeezed, VERIFYING).spill == 24 * MIB, "a whole shard that is held as a backup"
    assert at(squeezed, COMPUTING).spill == 12 * MIB, "of which there is one state then"
    assert ample.worst.total - at(squeezed, VERIFYING).total == 24 * MIB
    assert squeezed.shortfall == ""


@pytest.mark.parametrize(("limit_mib", "has_disk"), [(403, False), (300, True)])
def test_a_limit_that_is_too_small_says_what_is_missing(limit_mib: int, has_disk: bool) -> None:
    assert "too small for this plan" in tight(limit_mib, has_disk=has_disk).shortfall


def test_a_limit_has_room_by_what_workers_assume_and_what_leaves_counts_as_it_is() -> None:
    # A backup that is taken for 24 MiB leaves, and 8 MiB of it are there.
    assert at(tight(390, has_disk=True, moments=0.0), VERIFYING).spill == 8 * MIB
    assert "too small for this plan" in tight(390, has_disk=False, moments=0.0).shortfall


def test_the_wish_travels_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.statement_wish() is None
    wish = EstimateWish(file="x", nodes=2, members_per_node=3, backups=0)
    for name, value in wish.environment().items():
        monkeypatch.setenv(name, value)
    assert environment.statement_wish() == wish
