"""What a point takes: the work for it before it begins counts, what drives made it wait for does not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from elastrain.offload.lifetimes.measuring import KnownPoints, PointFigures, PointMeter
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.pieces.process_heap import KernelMeter


class Custody:
    waited_s = 0.0
    account = SimpleNamespace(limit_bytes=0)

    def accounted_bytes(self) -> int:
        return 0


class Meter:
    def __init__(self, *, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self.now_s, self.paces = 100.0, 0

    def own_bytes(self) -> tuple[int, int]:
        return 0, 0

    def forget_peak(self) -> None:
        pass

    def clock(self) -> float:
        return self.now_s

    def keep_pace(self) -> None:
        self.paces += 1


@pytest.mark.parametrize(("runs_ahead", "seconds"), [(False, [2.75, 3.0]), (True, [2.0, 1.0])])
def test_to_have_what_a_point_uses_takes_its_seconds_and_waits_do_not(runs_ahead: bool, seconds: list[float]) -> None:
    custody, meter = Custody(), Meter(runs_ahead=runs_ahead)
    points, found = PointMeter(cast(PieceStore, custody), meter, 0), []
    points.comes()
    meter.now_s, custody.waited_s = 101.0, 0.25
    points.begin(with_memory=True)
    meter.now_s = 103.0
    found.append(points.end().seconds)
    meter.now_s = 105.0  # letting go of what it used, and having what the next one uses
    points.begin(with_memory=True)
    meter.now_s = 106.0
    found.append(points.end().seconds)
    assert found == seconds


def test_what_is_done_between_steps_belongs_to_no_point() -> None:
    meter = Meter(runs_ahead=False)
    points = PointMeter(cast(PieceStore, Custody()), meter, 0)
    points.begin(with_memory=True)
    points.end()
    meter.now_s += 50.0
    points.comes()
    points.begin(with_memory=True)
    meter.now_s += 1.0
    assert points.end().seconds == 1.0


def test_a_short_point_does_not_count_as_a_point_ahead() -> None:
    meter = Meter(runs_ahead=True)
    points = PointMeter(cast(PieceStore, Custody()), meter, 0)
    for is_short in (False, True, True, False):
        points.begin(with_memory=False, is_short=is_short)
        points.end()
    assert meter.paces == 2


def figures(extra_bytes: int | None, *, unknown_bytes: int = 0, over_bytes: int = 0) -> PointFigures:
    return PointFigures(
        seconds=1.0,
        saved_bytes=0,
        needed_bytes=None,
        extra_bytes=extra_bytes,
        unknown_bytes=unknown_bytes,
        over_bytes=over_bytes,
    )


def test_a_plan_never_counts_on_less_than_a_point_took_while_nothing_moved() -> None:
    """What is being read counts before its pages are there: what a point takes seems to be less under a plan."""
    known = KnownPoints()
    assert known.learn("forward", figures(30, unknown_bytes=20), None) == (1.0, 30)
    assert known.learn("forward", figures(8), 40) == (1.0, 30)
    assert known.learn("forward", figures(None), 40) == (1.0, 30)
    assert known.learn("forward", figures(35), 40) == (1.0, 30), "what came and went may be in it"
    assert known.learn("forward", figures(25, unknown_bytes=20), None) == (1.0, 25), "a step without a plan says all"


def test_a_point_that_came_near_the_limit_is_expected_to_take_that_much_more() -> None:
    known = KnownPoints()
    known.learn("forward", figures(30), None)
    known.learn("forward", figures(30, over_bytes=7), 40)
    assert known.extra_bytes("forward", 0) == 47


def test_what_the_process_holds_more_by_now_is_expected_at_each_point() -> None:
    known = KnownPoints()
    known.learn("forward", figures(30, unknown_bytes=20), None)
    assert [known.extra_bytes("forward", unknown) for unknown in (0, 20, 26)] == [30, 30, 36]
    assert known.extra_bytes("an evaluation", 26) == 26


WORK_S = 0.2
BUSY_PROGRAMS = 2
BUSY = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    pass
"""


@pytest.mark.slow
def test_a_point_takes_as_long_beside_other_programs_as_alone() -> None:
    """By the clock, computing takes three times as long where two others have the same core: another plan."""
    core, others = min(os.sched_getaffinity(0)), []
    try:
        for _ in range(BUSY_PROGRAMS):
            others.append(subprocess.Popen([sys.executable, "-S", "-c", BUSY, str(core)], stdout=subprocess.PIPE))
        for each in others:
            assert each.stdout is not None
            each.stdout.readline()  # it has begun
        # The kernel counts the last wait for a core when it is over: on a crowded machine one try may see half of one.
        tries = [point_seconds(core) for _ in range(3)]
    finally:
        for each in others:
            each.kill()
            each.communicate()
    assert min(wall_s for _, wall_s in tries) > 2 * WORK_S, "nobody else had the core: the test shows nothing"
    # The clock and the count of waits are read one after the other, and who reads may lose the core in between.
    waits_counted, seconds = min(((seconds - WORK_S) / (wall_s - WORK_S), seconds) for seconds, wall_s in tries)
    assert waits_counted < 0.25
    assert seconds >= 0.9 * WORK_S


def point_seconds(core: int) -> tuple[float, float]:
    """What a point is said to take that computes for `WORK_S` on this core, and what it took by the clock."""
    cores = os.sched_getaffinity(0)
    points = PointMeter(cast(PieceStore, Custody()), KernelMeter(), 0)
    os.sched_setaffinity(0, {core})
    try:
        wall_s = -time.perf_counter()
        points.comes()
        points.begin(with_memory=False)
        until_s = time.thread_time() + WORK_S
        while time.thread_time() < until_s:
            pass
        seconds = points.end().seconds
        wall_s += time.perf_counter()
    finally:
        os.sched_setaffinity(0, cores)
    assert seconds is not None
    return seconds, wall_s


def test_what_another_thread_has_begun_has_no_seconds() -> None:
    """Each thread has a clock of its own: one that serves a touch may update a block, and leave the point behind."""
    points = PointMeter(cast(PieceStore, Custody()), Meter(runs_ahead=False), 0)

    def other() -> None:
        points.comes()
        points.begin(with_memory=True)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert points.end().seconds is None
