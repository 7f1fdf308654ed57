"""The account of a member on a device: which of its two memories holds what, and the sentences that name them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.job.placement import target
from elastrain.job.world import Member, View
from elastrain.memory import held_shards
from elastrain.memory import memory_budget as budget
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.member_account import MemberAccount
from elastrain.memory.memory_budget import Fit, Outside, Shortfall, fit_plan
from tests.unit.memory.test_memory_budget import DISK, MIB, NEEDS
from tests.unit.memory.test_memory_estimate import ON_TWO_NODES, script

SHAPE = script(backups=1).shape
VIEW = View(generation=0, members=tuple(Member(id=member, node=node) for member, node in ON_TWO_NODES.items()))
NOW = target([None] * len(SHAPE.shards), SHAPE.sizes, VIEW.nodes, 1)
SCRIPT_SIZES = script(backups=1).sizes
BOTH = MemberAccount(me=VIEW.ids[0], shape=SHAPE, sizes=SCRIPT_SIZES, view=VIEW, placements=(NOW, NOW), slots=2)
DEVICE, HOST = replace(BOTH, sizes=replace(BOTH.sizes, memory=MemoryKind.DEVICE)), BOTH.on_host()
SIZES = {"base_bytes": 0, "parameters_bytes": 0}


def test_backups_and_the_gradients_kept_for_them_lie_in_host_memory_only() -> None:
    one, device, host = (each.needs(**SIZES) for each in (BOTH, DEVICE, HOST))
    assert device.shards_bytes + host.shards_bytes == one.shards_bytes
    primaries, backups = ([h for h in BOTH.held if h.is_primary == is_primary] for is_primary in (True, False))
    assert primaries and backups
    assert device.shards_bytes == sum(each.leaves_bytes for each in primaries)
    assert host.shards_bytes == sum(each.leaves_bytes for each in backups)
    assert all(not each.is_primary for each in HOST.held)
    kept_bytes = 2 * sum(each.gradient_bytes for each in backups)
    assert held_shards.kept_gradients_bytes(HOST.held) == kept_bytes > 0
    assert device.gradients_bytes < one.gradients_bytes
    assert host.activations_bytes == 0 and device.activations_bytes == one.activations_bytes


def test_the_update_of_a_backup_passes_through_the_device() -> None:
    [first, *_] = [each for each in BOTH.held if each.backup_bytes]
    alone = held_shards.device_sums_bytes([first], makers=2)
    assert alone == first.backup_bytes // 2 + first.gradient_bytes


@pytest.mark.parametrize("memory", list(MemoryKind))
def test_sentences_name_the_memory_that_they_mean(memory: MemoryKind) -> None:
    enough = fit_plan(400 * MIB, NEEDS, outside=None, memory=memory)
    assert isinstance(enough, Fit) and enough.reason.endswith(f"everything stays in {memory}")
    missing = fit_plan(399 * MIB, NEEDS, outside=None, memory=memory)
    assert isinstance(missing, Shortfall) and missing.reason.startswith(f"a member's {memory} limit is 1 MiB too small")
    assert ("no --host-tier" in missing.reason) == (memory == MemoryKind.DEVICE)
    told = budget.too_small(MIB, needed_bytes=2 * MIB, left_bytes=MIB, share=2, memory=memory)
    assert told.startswith(f"a member's {memory} limit of 1 MiB is too small")


def test_a_tier_takes_no_more_than_it_has_room_for() -> None:
    tier = Outside(name="host memory", room_bytes=100 * MIB)
    fits = fit_plan(300 * MIB, NEEDS, outside=tier, memory=MemoryKind.DEVICE)
    assert isinstance(fits, Fit) and "100 MiB of activations go to host memory" in fits.reason
    short = fit_plan(299 * MIB, NEEDS, outside=tier, memory=MemoryKind.DEVICE)
    assert isinstance(short, Shortfall) and short.missing_bytes == MIB
    assert "host memory has room for 100 MiB of the rest" in short.reason
    # Before activations were measured, shards leave half of the tier for them.
    unknown = replace(NEEDS, activations_bytes=0, activations_least_bytes=0, is_measured=False)
    small = Outside(name="host memory", room_bytes=20 * MIB)
    first, drive = (fit_plan(190 * MIB, unknown, outside=each) for each in (small, DISK))
    assert isinstance(first, Fit) and isinstance(drive, Fit)
    assert first.shards_on_disk_bytes == 10 * MIB < drive.shards_on_disk_bytes


def test_slots_and_sums_that_a_new_plan_does_not_need_are_its_surplus() -> None:
    slot_bytes = DEVICE.sizes.slot_bytes
    others_bytes = DEVICE.gradients_bytes - 2 * slot_bytes
    assert slot_bytes > 0 < others_bytes
    assert DEVICE.surplus_bytes(2 * slot_bytes, others_bytes) == DEVICE.surplus_bytes(0, 0) == 0
    assert DEVICE.surplus_bytes(3 * slot_bytes, 0) == slot_bytes
    assert DEVICE.surplus_bytes(0, others_bytes + 7) == 7


def test_states_that_a_loss_may_bring_stay_outside_unless_they_have_room() -> None:
    mine = {each.shard for each in DEVICE.held}
    backed = {each.shard for each in HOST.held} - mine
    assert backed
    assert DEVICE.standby(0) == backed
    assert DEVICE.standby(1 << 60) == frozenset()
    sizes_bytes = [round(SHAPE.sizes[shard] * budget.ASSUMED_MOMENTS) for shard in backed]
    assert DEVICE.standby(sum(sizes_bytes)) == frozenset()
    assert DEVICE.standby(sum(sizes_bytes) - 1) != frozenset()


def test_states_outside_of_a_device_leave_room_for_those_that_are_updated() -> None:
    one, device = (
        fit_plan(219 * MIB, NEEDS, outside=DISK, memory=memory) for memory in (MemoryKind.ONE, MemoryKind.DEVICE)
    )
    assert isinstance(one, Fit) and isinstance(device, Fit)
    assert device.shards_on_disk_bytes == one.shards_on_disk_bytes + NEEDS.shards_least_bytes > NEEDS.shards_least_bytes
    least = fit_plan(175 * MIB, NEEDS, outside=DISK, memory=MemoryKind.DEVICE)
    assert isinstance(least, Fit) and least.shards_on_disk_bytes == NEEDS.shards_bytes
