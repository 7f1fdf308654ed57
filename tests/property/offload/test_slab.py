"""Slots never overlap, the slab never passes its quota, and what is freed is found again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.offload.drives.port import PAGE_BYTES
from elastrain.offload.drives.request_queue import Slot, SlotAllocator

QUOTA_BYTES = 64 * PAGE_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE_BYTES)), max_size=80))
def test_slots_are_disjoint_aligned_and_below_the_quota(moves: list[tuple[bool, int]]) -> None:
    slots, held = SlotAllocator(QUOTA_BYTES), []
    for take, number in moves:
        if take:
            slot = slots.allocate(number)
            if slot is not None:
                held.append(slot)
        elif held:
            slots.free(held.pop(number % len(held)))
        check(held)
        assert slots.used_bytes == sum(slot.size_bytes for slot in held)
        assert slots.end_bytes <= QUOTA_BYTES
    for slot in held:
        slots.free(slot)
    assert slots.allocate(QUOTA_BYTES) == Slot(offset_bytes=0, size_bytes=QUOTA_BYTES)


def check(held: list[Slot]) -> None:
    end = 0
    for slot in sorted(held, key=lambda s: s.offset_bytes):
        assert slot.offset_bytes >= end
        assert slot.offset_bytes % PAGE_BYTES == slot.size_bytes % PAGE_BYTES == 0
        end = slot.offset_bytes + slot.size_bytes


def test_the_same_step_again_needs_no_more_space() -> None:
    slots, ends = SlotAllocator(1 << 40), []
    for _ in range(3):
        held = [slots.allocate(size) for size in (10_000, 5_000, 70_000, 1)]
        for slot in reversed(held):
            assert slot is not None
            slots.free(slot)
        ends.append(slots.end_bytes)
    assert len(set(ends)) == 1


def test_no_slot_beyond_the_quota() -> None:
    assert SlotAllocator(PAGE_BYTES).allocate(PAGE_BYTES + 1) is None


def test_a_slot_is_given_back_once() -> None:
    slots = SlotAllocator(QUOTA_BYTES)
    slot = slots.allocate(1)
    assert slot is not None
    slots.free(slot)
    with pytest.raises(ValueError, match="free already"):
        slots.free(slot)
