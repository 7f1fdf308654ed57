"""Sums over windows of a ring are those of its values, bit for bit, whatever was changed before somebody asks."""

from __future__ import annotations

import random

import numpy as np

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.booking import Books
from elastrain.offload.planning.io_schedule import PointRing
from elastrain.offload.planning.plan_values import Budget, Tier
from tests.support.programs import blocks

LENGTH = 7


def test_sums_after_changes_are_those_of_a_new_ring() -> None:
    draw = random.Random(1)
    ring = PointRing([draw.random() for _ in range(LENGTH)])
    for _ in range(500):
        begin = draw.randrange(3 * LENGTH)
        end = begin + draw.randrange(LENGTH + 1)
        if draw.random() < 0.5:
            ring.add(begin, end, draw.random())
        else:
            ring.put(begin, np.array([draw.random() for _ in range(begin, end)]))
        if draw.random() < 0.5:  # several changes come between two questions, too
            asked = draw.randrange(3 * LENGTH)
            fresh = PointRing(ring.values)
            assert ring.total(asked, asked + LENGTH) == fresh.total(asked, asked + LENGTH)
            assert ring.total(asked, asked + 1) == fresh.total(asked, asked + 1)
            assert ring.first_with(asked, 1.0) == fresh.first_with(asked, 1.0)


def test_gains_are_seconds_above_the_limit_after_each_gap_that_is_taken() -> None:
    program, tier = blocks(6), Tier(name="drive", read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    books = Books(program, Budget(limit_bytes=facts.least_bytes(program)[0], tiers=(tier,)))
    seconds, fell = np.array([point.seconds for point in program.points]), 0
    for gap in facts.gaps(program):
        before = books._gain_s(0, books.length)
        books.take(books.forced(gap, gap.begin + 1))
        fresh = PointRing(seconds * (books._needs.values > books._limit_bytes))
        assert [books._gain_s(at, at + 3) for at in range(books.length)] == [
            fresh.total(at, at + 3) for at in range(books.length)
        ]
        fell += books._gain_s(0, books.length) < before
    assert fell
