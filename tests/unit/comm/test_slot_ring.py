"""What a slot ring shows, and in which of its two a member's generations are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elastrain.comm.collectives.algorithms import Transfer
from elastrain.comm.errors import ProtocolError
from elastrain.comm.groups.slot_ring import (
    COUNT_MASK,
    DOUBLE_BUFFER_BYTES,
    SLOTS,
    DoubleBuffer,
    Location,
    SlotRing,
    reached,
)


def _buffer() -> DoubleBuffer:
    buffer = DoubleBuffer(
        torch.full((DOUBLE_BUFFER_BYTES,), 0xAA, dtype=torch.uint8)
    )  # whatever was in this memory before
    buffer.clear()
    return buffer


def _ring(generation: int = 1) -> SlotRing:
    return _buffer().begin(generation)


def _write(ring: SlotRing, step: int, sends: list[Transfer], *, lent: bool = False) -> None:
    offered = torch.arange(10.0)
    ring.write(
        step, description=b"sum", offered=offered, location=Location(segment=3, offset_bytes=64), sends=sends, lent=lent
    )


@example(count=0, ahead=(1 << 31) - 1)
@given(count=st.integers(0, COUNT_MASK), ahead=st.integers(0, (1 << 31) - 1))
def test_a_counter_that_has_begun_anew_is_still_past_what_it_has_passed(count: int, ahead: int) -> None:
    assert reached((count + ahead) & COUNT_MASK, count)
    assert not reached(count, (count + ahead + 1) & COUNT_MASK)


@given(generation=st.integers(1, 1 << 40), steps=st.integers(0, 20))
def test_counts_are_of_one_generation_only(generation: int, steps: int) -> None:
    ring = _ring(generation)
    for step in range(steps):
        ring.count_published(step)
    assert ring.published(generation) == steps and ring.finished(generation) == 0
    assert ring.published(generation + 1) == ring.published(generation - 1) == 0
    ring.begin(generation + 2)
    assert ring.published(generation) == ring.published(generation + 2) == 0


def test_each_rank_reads_its_own_slice() -> None:
    ring = _ring()
    _write(ring, 0, [Transfer(to=0, start=0, stop=4), Transfer(to=2, start=4, stop=10)], lent=True)
    first, second = ring.read(0, 0), ring.read(0, 2)
    assert (first.location, first.size_bytes, first.description, first.lent) == (
        Location(segment=3, offset_bytes=64),
        16,
        b"sum",
        True,
    )
    assert (second.location, second.size_bytes) == (Location(segment=3, offset_bytes=64 + 16), 24)


def test_steps_within_reach_do_not_write_over_each_other() -> None:
    ring = _ring()
    for step in range(SLOTS):
        _write(ring, step, [Transfer(to=1, start=0, stop=step)])
        ring.inline_area(step).fill_(step)
    assert [ring.read(step, 1).size_bytes for step in range(SLOTS)] == [4 * step for step in range(SLOTS)]
    assert [int(ring.inline_area(step)[-1]) for step in range(SLOTS)] == list(range(SLOTS))


@pytest.mark.parametrize("at", [16, 20, 22, 24, 28, 36])  # segment is free; words, slices, dtype, start, stop
def test_an_entry_that_no_member_writes_is_refused_or_harmless(at: int) -> None:
    ring = _ring()
    _write(ring, 0, [Transfer(to=1, start=0, stop=10)])
    ring.tensor[128 + at : 128 + at + 2].fill_(0xFF)
    try:
        found = ring.read(0, 1)
    except ProtocolError:
        return
    assert found.size_bytes <= 40 and len(found.description) <= 3


def test_a_failure_is_seen_until_the_ring_begins_anew() -> None:
    ring = _ring(1)
    assert not ring.has_failed(1)
    ring.fail()
    assert ring.has_failed(1)
    ring.begin(2)
    assert ring.has_failed(1) and not ring.has_failed(2)


def test_what_was_published_stays_until_the_former_ring_is_freed() -> None:
    buffer = _buffer()
    buffer.begin(1).count_published(0)
    for generation in (2, 3, 4):  # views in which nothing is published
        ring = buffer.begin(generation)
        former = buffer.find(1)
        assert former is not None and former is not ring and former.published(1) == 1
        assert buffer.find(generation) is ring and buffer.find(generation - 1) in (None, former)
    buffer.free_former()
    assert buffer.find(1) is None and buffer.former is None
    ring.count_published(0)
    assert buffer.begin(5) is not ring and buffer.former is ring and buffer.newest == 5


def test_a_generation_does_not_begin_where_others_may_still_read() -> None:
    buffer = _buffer()
    former = buffer.begin(1)
    former.count_published(0)
    unopened = buffer.begin(2)
    unopened.count_published(0)  # a barrier that did not come about: no `free_former`
    assert buffer.begin(3) is unopened
    assert former.published(1) == 1
    assert unopened.has_failed(2)
