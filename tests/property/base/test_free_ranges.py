"""The first-fit allocator never hands out a number twice, and loses none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.base.arithmetic import FreeRanges


@settings(max_examples=3 * settings().max_examples // 2, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), max_size=80), st.sampled_from([1, 8, 32]))
def test_nothing_is_handed_out_twice_and_nothing_is_lost(requests: list[tuple[int, int]], alignment: int) -> None:
    free = FreeRanges(256)
    taken: list[tuple[int, int]] = []
    used: set[int] = set()
    for size, choice in requests:
        offset = free.take(size, alignment)
        if offset is None:
            assert all(used & set(range(at, at + size)) for at in range(0, 257 - size, alignment))
            if taken:
                offset, size = taken.pop(choice % len(taken))
                free.give(offset, offset + size)
                used -= set(range(offset, offset + size))
            continue
        piece = set(range(offset, offset + size))
        assert not piece & used and piece <= set(range(256)) and offset % alignment == 0
        used |= piece
        taken.append((offset, size))
    for offset, size in taken:
        free.give(offset, offset + size)
    assert free.all_free


def test_a_range_is_given_back_once() -> None:
    free = FreeRanges(10)
    assert free.take(4) == 0
    free.give(0, 4)
    with pytest.raises(ValueError, match="is free already"):
        free.give(0, 4)


def test_the_same_requests_get_the_same_places_again() -> None:
    free = FreeRanges(100)
    first = [free.take(length) for length in (10, 20, 5)]
    for start, length in zip(first, (10, 20, 5), strict=True):
        assert start is not None
        free.give(start, start + length)
    assert [free.take(length) for length in (10, 20, 5)] == first
