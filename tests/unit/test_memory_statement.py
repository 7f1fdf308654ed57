"""What each member will hold, stated before a job starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.base import environment
from elastrain.base.stating import StatementWish
from elastrain.memory_budget import COMPUTING_BYTES, WRITING_BYTES
from elastrain.memory_statement import MemberBytes, ScriptNeeds, WorkerLimit, state_memory

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
    behind_bytes=4 * MIB,
)
ON_TWO_NODES = StatementWish(file="", nodes=2, members_per_node=2).members


def test_ranks_are_spread_over_the_nodes_in_order() -> None:
    assert ON_TWO_NODES == {"m0": "node0", "m1": "node0", "m2": "node1", "m3": "node1"}


def test_each_part_of_an_even_job_is_what_its_shards_make() -> None:
    # Two shards of 4 MiB as primary, two as a backup; two runs: a copy each, or one and that of the check.
    # Sums of four members: two levels and scratch, on 8 MiB; 8 MiB kept for two steps; 4 MiB behind.
    expected = {"base": 208, "model": 32, "gradients": 64 + 24 + 16 + 4, "shards": 16, "backups": 48, "staging": 0}
    for stated in state_memory(SCRIPT, ON_TWO_NODES):
        assert {name: getattr(stated, name) // MIB for name in expected} == expected
        assert stated.total == sum(expected.values()) * MIB


def test_a_member_alone_has_no_backups_and_checks_nobody() -> None:
    (alone,) = state_memory(replace(SCRIPT, runs=1), {"m0": "node0"})
    assert alone.backups == 0
    assert alone.shards == 64 * MIB
    assert alone.gradients == (32 + 64 + 4) * MIB


@pytest.mark.parametrize(
    ("moments", "backups", "again", "slots"),
    [
        (2.0, 1, False, 1),
        (2.0, 1, True, 2),
        # Without backups and optimizer state an update brings 4 MiB of scratch on 8 MiB, and 4 behind: of 32 MiB.
        (0.0, 0, False, 2 - 12 / 32),
    ],
)
def test_the_copy_of_a_check_has_gone_when_the_first_update_makes_states(
    moments: float, backups: int, again: bool, slots: float
) -> None:
    one_run_each = replace(SCRIPT, runs=4, moments=(moments,) * 8, backups=backups)
    for stated in state_memory(one_run_each, ON_TWO_NODES, is_checked_again=again):
        assert stated.gradients == (32 * slots + 24 + 16 * backups + 4) * MIB


def test_without_backups_only_primaries_hold_state() -> None:
    for stated in state_memory(replace(SCRIPT, backups=0), ON_TWO_NODES):
        assert (stated.shards, stated.backups) == (16 * MIB, 0)


def test_optimizer_state_counts_where_its_shard_lies() -> None:
    half_frozen = replace(SCRIPT, moments=(2.0,) * 4 + (0.0,) * 4, backups=0)
    assert sum(each.shards for each in state_memory(half_frozen, ON_TWO_NODES)) == 32 * MIB


def test_a_shard_without_gradients_takes_nothing_for_them() -> None:
    all_trained, half_frozen = (
        state_memory(replace(SCRIPT, frozen=frozen), ON_TWO_NODES) for frozen in (frozenset(), frozenset(range(4)))
    )
    # Sums, what is kept and scratch: of 32 MiB in all, 24 and 16 MiB for each two of eight shards that a member holds.
    saved = [before.gradients - after.gradients for before, after in zip(all_trained, half_frozen, strict=True)]
    assert sum(saved) == 4 * (24 + 16) // 2 * MIB


def test_masters_are_the_primarys() -> None:
    for stated in state_memory(replace(SCRIPT, masters=True), ON_TWO_NODES):
        assert (stated.shards, stated.backups) == (24 * MIB, 48 * MIB)


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_each_state_of_a_checkpoint_waits_at_one_member(backups: int) -> None:
    stated = state_memory(replace(SCRIPT, backups=backups, all_write=False), ON_TWO_NODES)
    assert sum(each.staging - WRITING_BYTES for each in stated if each.staging) == 8 * 12 * MIB


def test_on_local_disks_each_state_waits_at_all_of_its_holders() -> None:
    script = replace(SCRIPT, backups=1, all_write=True)
    stated = state_memory(script, ON_TWO_NODES)
    assert sum(each.staging - WRITING_BYTES for each in stated) == 2 * 8 * 12 * MIB


def tight(limit_mib: int, *, has_disk: bool, moments: float = 2.0) -> MemberBytes:
    limit = WorkerLimit(limit_bytes=limit_mib * MIB, has_disk=has_disk, assumed_moments=2.0)
    return state_memory(replace(SCRIPT, limit=limit, moments=(moments,) * 8), ON_TWO_NODES)[0]


def test_what_a_limit_leaves_no_room_for_is_on_disk() -> None:
    ample = tight(404, has_disk=True)
    assert (ample.spill, ample.shortfall) == (0, "")
    squeezed = tight(390, has_disk=True)
    assert squeezed.spill == 24 * MIB, "a whole shard that is held as a backup"
    assert squeezed.total == 380 * MIB + COMPUTING_BYTES
    assert squeezed.shortfall == ""


@pytest.mark.parametrize(("limit_mib", "has_disk"), [(403, False), (300, True)])
def test_a_limit_that_is_too_small_says_what_is_missing(limit_mib: int, has_disk: bool) -> None:
    assert "too small for this plan" in tight(limit_mib, has_disk=has_disk).shortfall


def test_a_limit_has_room_by_what_workers_assume_and_what_leaves_counts_as_it_is() -> None:
    # A backup that is taken for 24 MiB leaves, and 8 MiB of it are there.
    assert tight(390, has_disk=True, moments=0.0).spill == 8 * MIB
    assert "too small for this plan" in tight(390, has_disk=False, moments=0.0).shortfall


def test_the_wish_travels_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.statement_wish() is None
    wish = StatementWish(file="x", nodes=2, members_per_node=3, backups=0)
    for name, value in wish.environment().items():
        monkeypatch.setenv(name, value)
    assert environment.statement_wish() == wish
