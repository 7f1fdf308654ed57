"""The memory that each member will hold, stated before a job starts by the account that its worker keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastrain.base import environment
from elastrain.base.doctor_wishes import EstimateWish
from elastrain.job.values import Shape, ShardShape
from elastrain.memory.member_account import Limit, ModelSizes
from elastrain.memory.memory_budget import COMPUTING_BYTES, WRITING_BYTES
from elastrain.memory.memory_estimate import STEP, HeldAt, MemberBytes, ScriptNeeds, state_memory

MIB = 1 << 20
SCRIPT = ScriptNeeds(
    shape=Shape(runs=8, blocks=1, shards=(ShardShape(size_bytes=4 * MIB, lanes=(0,)),) * 8, backups=1),
    sizes=ModelSizes(masters=False, slot_bytes=32 * MIB, whole_bytes=32 * MIB),
    moments=(2.0,) * 8,
    base_bytes=200 * MIB,
    landing_bytes=0,
)
ON_TWO_NODES = EstimateWish(file="", nodes=2, members_per_node=2).members


def script(
    *, moments: float | tuple[float, ...] = 2.0, slot_mib: int = 32, frozen: int = 0, **shape: Any
) -> ScriptNeeds:
    """`frozen`: as many shards without gradients. `shape`: what differs from the job of `SCRIPT`."""
    changed = replace(SCRIPT.shape, **shape)
    sizes = replace(SCRIPT.sizes, slot_bytes=slot_mib * MIB, frozen=frozenset(range(frozen)))
    each = moments if isinstance(moments, tuple) else (moments,) * len(changed.shards)
    return replace(SCRIPT, shape=changed, sizes=sizes, moments=each)


def test_ranks_are_spread_over_the_nodes_in_order() -> None:
    assert ON_TWO_NODES == {"m0": "node0", "m1": "node0", "m2": "node1", "m3": "node1"}


def mib(moment: HeldAt) -> dict[str, int]:
    """The parts that are not nothing."""
    return {name: size_bytes // MIB for name, size_bytes in moment.parts.items() if size_bytes}


def test_each_part_of_an_even_job_is_what_its_shards_make() -> None:
    # Two shards of 4 MiB as primary, two as a backup; two runs, a copy each. Sums of four members: two levels on 8 MiB;
    # 8 MiB of scratch, and 8 MiB kept of each of two steps for the update of backups.
    expected = {"base": 200, "computing": 8, "model": 32, "gradients": 64 + 16 + 8 + 16}
    expected |= {"shards": 16, "backups": 24, "unverified": 24}
    for stated in state_memory(SCRIPT, ON_TWO_NODES):
        assert [each.moment for each in stated.moments] == [STEP]
        assert mib(stated.worst) == expected
        assert stated.worst.total == sum(expected.values()) * MIB


def test_a_member_alone_has_no_backups_and_checks_nobody() -> None:
    (alone,) = state_memory(script(runs=1), {"m0": "node0"})
    # A copy, a sum and scratch, as its worker counts them.
    assert mib(alone.worst) == {"base": 200, "computing": 8, "model": 32, "gradients": 32 + 32 + 32, "shards": 64}


@pytest.mark.parametrize(
    ("moments", "backups", "again", "check"),
    [
        # 64 MiB of a check, beside what there is before the first update: 8 MiB of parameters at the backups.
        (2.0, 1, False, 64 + 8 - (16 + 24 + 24)),
        (0.0, 1, False, 64 + 8 - (8 + 8)),
        (2.0, 0, False, 64 - 16),
        (0.0, 0, False, 64),
        (2.0, 1, True, 64),
        (0.0, 0, True, 64),
    ],
)
def test_the_copy_of_a_check_takes_what_the_first_update_has_not_made_yet(
    moments: float, backups: int, again: bool, check: int
) -> None:
    shape = {"runs": 4, "backups": backups, "cross_check_every": int(again)}
    for stated in state_memory(script(moments=moments, slot_mib=64, **shape), ON_TWO_NODES):
        assert stated.worst.parts["check"] // MIB == max(0, check)


def test_a_new_gradient_of_the_largest_parameter_lies_beside_its_copy() -> None:
    more, less = (state_memory(replace(SCRIPT, landing_bytes=size), ON_TWO_NODES)[0] for size in (8 * MIB, 0))
    assert more.worst.total - less.worst.total == 8 * MIB


def test_without_backups_only_primaries_hold_state() -> None:
    for stated in state_memory(script(backups=0), ON_TWO_NODES):
        assert [stated.worst.parts[name] // MIB for name in ("shards", "backups", "unverified")] == [16, 0, 0]


def test_optimizer_state_counts_where_its_shard_lies() -> None:
    half_frozen = script(moments=(2.0,) * 4 + (0.0,) * 4, backups=0)
    assert sum(each.worst.parts["shards"] for each in state_memory(half_frozen, ON_TWO_NODES)) == 32 * MIB


def test_a_shard_without_gradients_takes_nothing_for_them() -> None:
    all_trained, half_frozen = (state_memory(script(frozen=frozen), ON_TWO_NODES) for frozen in (0, 4))
    # Of four shards: sums of two levels and scratch at their primaries, two kept ones at their backups. A member that
    # is left without one of its own still has scratch of 4 MiB for its backups.
    before, after = (sum(e.worst.parts["gradients"] for e in each) for each in (all_trained, half_frozen))
    assert before - after == pytest.approx(4 * (2 + 1 + 2) * 4 * MIB, abs=2 * 4 * MIB)


def test_masters_are_the_primarys() -> None:
    needs = replace(SCRIPT, sizes=replace(SCRIPT.sizes, masters=True))
    for stated in state_memory(needs, ON_TWO_NODES):
        assert [stated.worst.parts[name] // MIB for name in ("shards", "backups", "unverified")] == [24, 24, 24]


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_each_state_of_a_checkpoint_waits_at_one_member(backups: int) -> None:
    stated = state_memory(replace(script(backups=backups), all_write=False), ON_TWO_NODES)
    staging = [each.worst.parts["staging"] for each in stated]
    assert sum(each - WRITING_BYTES for each in staging if each) == 8 * 12 * MIB


def test_on_local_disks_each_state_waits_at_all_of_its_holders() -> None:
    stated = state_memory(replace(SCRIPT, all_write=True), ON_TWO_NODES)
    assert sum(each.worst.parts["staging"] - WRITING_BYTES for each in stated) == 2 * 8 * 12 * MIB


def tight(limit_mib: int, *, has_disk: bool, moments: float = 2.0) -> MemberBytes:
    limit = Limit(limit_bytes=limit_mib * MIB, has_disk=has_disk)
    return state_memory(replace(script(moments=moments), limit=limit), ON_TWO_NODES)[0]


@pytest.mark.parametrize("how", [{}, {"backups": 0, "slot_mib": 64}, {"cross_check_every": 1}, {"runs": 1}])
def test_what_is_told_is_the_smallest_limit_that_a_worker_keeps(how: dict[str, Any]) -> None:
    needs = script(**how)
    for told in state_memory(needs, ON_TWO_NODES):
        for missing_bytes in (0, 1):
            limit_bytes = told.worst.total - COMPUTING_BYTES - missing_bytes
            limited = replace(needs, limit=Limit(limit_bytes=limit_bytes, has_disk=False))
            (again,) = (each for each in state_memory(limited, ON_TWO_NODES) if each.member == told.member)
            assert bool(again.shortfall) == bool(missing_bytes)


def test_what_a_limit_leaves_no_room_for_is_on_disk() -> None:
    ample = tight(400, has_disk=True)
    assert (ample.worst.spill, ample.shortfall) == (0, "")
    squeezed = tight(390, has_disk=True)
    assert (squeezed.worst.spill, squeezed.shortfall) == (24 * MIB, ""), "a whole shard that is held as a backup"


@pytest.mark.parametrize(("limit_mib", "has_disk"), [(399, False), (370, True)])
def test_a_limit_that_is_too_small_says_what_is_missing(limit_mib: int, has_disk: bool) -> None:
    assert "too small for this plan" in tight(limit_mib, has_disk=has_disk).shortfall


def test_a_limit_has_room_by_what_workers_assume_and_what_leaves_counts_as_it_is() -> None:
    # A backup that is taken for 24 MiB leaves, and 8 MiB of it are there.
    assert tight(390, has_disk=True, moments=0.0).worst.spill == 8 * MIB
    assert "too small for this plan" in tight(390, has_disk=False, moments=0.0).shortfall


def test_the_wish_travels_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.doctor_wish() is None
    wish = EstimateWish(file="x", nodes=2, members_per_node=3, backups=0)
    for name, value in wish.environment().items():
        monkeypatch.setenv(name, value)
    assert environment.doctor_wish() == wish
