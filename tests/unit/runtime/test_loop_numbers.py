"""Numbers that a loop keeps without `job.register` are told to newcomers by name; others are left alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elastrain.runtime.loop_state.loop_numbers import LoopNumbers, is_time

COUNTED = 0


class Trainer:
    """Counts in an attribute, in a loop that is a method."""

    def __init__(self) -> None:
        self.seen = 0

    def fit(self, steps: Steps) -> None:
        for step in steps:
            step.compute()
            self.seen += 16


class Steps:
    """The steps of a job, as far as `LoopNumbers` is concerned. `begins`: number of the first step."""

    def __init__(self, *registered: object, count: int = 3, told: dict[str, Any] | None = None) -> None:
        self.numbers = LoopNumbers(registered)
        self.said = ""
        self.told: dict[str, Any] = {}
        self._count, self._job = count, told

    def __iter__(self) -> Iterator[Steps]:
        if self._job is not None:
            self.said = self.numbers.difference(self._job)
        for _ in range(self._count):
            self.numbers.look()
            yield self
        self.numbers.look()
        self.told = self.numbers.told()

    def compute(self, body: Callable[[], object] = lambda: None) -> None:
        """Compute micro-batches, in which `body` runs."""
        self.numbers.look()
        body()
        self.numbers.look(within=True)


def _variable(steps: Steps) -> None:
    seen = 0
    for step in steps:
        step.compute()
        seen += 16


def _assigned_anew(steps: Steps) -> None:
    best = 10.0
    for step in steps:
        step.compute()
        if best > 0:
            best = best - 1.0


def _in_a_dict(steps: Steps) -> None:
    counts = {"seen": 0}
    for step in steps:
        step.compute()
        counts["seen"] += 16


def _global(steps: Steps) -> None:
    for step in steps:
        step.compute()
        _count()


def _count() -> None:
    global COUNTED
    COUNTED += 16


def _closure(steps: Steps) -> None:
    seen = 0

    def log() -> None:
        nonlocal seen
        seen += 16

    for step in steps:
        step.compute()
        log()


def _behind_a_wrapper(steps: Steps) -> None:
    seen = 0
    for _, step in enumerate(each for each in steps):
        step.compute()
        seen += 16


KEPT: dict[str, tuple[Callable[[Steps], None], str]] = {
    "a variable": (_variable, "seen"),
    "a variable that is assigned": (_assigned_anew, "best"),
    "a dict": (_in_a_dict, "counts['seen']"),
    "a global": (_global, "COUNTED"),
    "a closure": (_closure, "seen"),
    "an attribute": (lambda steps: Trainer().fit(steps), "self.seen"),
    "behind a generator": (_behind_a_wrapper, "seen"),
}


@pytest.mark.parametrize("way", KEPT)
def test_a_count_is_told_and_a_newcomer_that_begins_with_another_says_so(way: str) -> None:
    loop, name = KEPT[way]
    steps = Steps()
    loop(steps)
    assert list(steps.told) == [name]
    newcomer = Steps(told={name: 4000}, count=1)
    loop(newcomer)
    assert f"{name!r} is " in newcomer.said and "and 4000 in the job" in newcomer.said
    assert "job.register(" in newcomer.said and "\n" not in newcomer.said


def test_a_newcomer_with_the_right_numbers_says_nothing() -> None:
    newcomer = Steps(told={"seen": 0, "of another version": 3})
    _variable(newcomer)
    assert newcomer.said == ""


def _set_in_each_step(steps: Steps) -> None:
    loss, rate = 0.0, 0.1
    for number, step in enumerate(steps):
        step.compute()
        rate = 0.1 / (1 + number)
        loss = rate * 2
    assert loss > 0


def _of_this_member(steps: Steps) -> None:
    mine = {"micro-batches": 0}
    for step in steps:
        step.compute(lambda: mine.update({"micro-batches": mine["micro-batches"] + 3}))


def _cleared(steps: Steps) -> None:
    """In a cross-check members compute more: such a count is this member's own, also where it is cleared outside."""
    mine = {"micro-batches": 0}
    for step in steps:
        mine["micro-batches"] = 0
        step.compute(lambda: mine.update({"micro-batches": 3}))


def _clock(steps: Steps) -> None:
    before, stamp = time.perf_counter(), time.time_ns()
    for step in steps:
        step.compute()
        took = time.perf_counter() - before
        before, stamp = before + took, stamp + 1000


def _not_finite(steps: Steps) -> None:
    best = 1.0
    for step in steps:
        step.compute()
        best = best / 0.1 if best < 50 else math.inf


def _constant(steps: Steps) -> None:
    batch, is_first, note = 16, True, SimpleNamespace(seen=0)
    for step in steps:
        step.compute()
        is_first = not is_first
        note.seen += batch  # of a class that is not the script's: a library may count what it likes


LEFT_ALONE = (_set_in_each_step, _of_this_member, _cleared, _clock, _not_finite, _constant)


@pytest.mark.parametrize("loop", LEFT_ALONE, ids=[each.__name__ for each in LEFT_ALONE])
def test_numbers_that_no_newcomer_lacks_are_not_told(loop: Callable[[Steps], None]) -> None:
    steps = Steps()
    loop(steps)
    assert steps.told == {}


def test_a_registered_dict_is_left_to_its_registration() -> None:
    counts = {"seen": 0}

    def loop(steps: Steps) -> None:
        for step in steps:
            step.compute()
            counts["seen"] += 16

    registered, free = Steps(counts), Steps()
    loop(registered)
    loop(free)
    assert (registered.told, list(free.told)) == ({}, ["counts['seen']"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1000.25, True), (999, False), (5000.5, False), (1000.0, False), (999_500_000_001, True), (1001.5, False)],
)
def test_a_time_is_what_a_clock_has_shown_lately(value: float, expected: bool) -> None:
    assert is_time(value, [1000.5, 1_000_000.5]) == expected
