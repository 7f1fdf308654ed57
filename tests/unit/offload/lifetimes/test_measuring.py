"""What a point takes: the work for it before it begins counts, what drives made it wait for does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from elastrain.offload.lifetimes.custody import PieceCustody
from elastrain.offload.lifetimes.measuring import PointMeter


class Custody:
    waited_s = 0.0
    account = SimpleNamespace(limit_bytes=0)

    def accounted_bytes(self) -> int:
        return 0


class Meter:
    def __init__(self, *, runs_ahead: bool) -> None:
        self.runs_ahead = runs_ahead
        self.now_s = 100.0

    def own_bytes(self) -> tuple[int, int]:
        return 0, 0

    def forget_peak(self) -> None:
        pass

    def clock(self) -> float:
        return self.now_s

    def keep_pace(self) -> None:
        pass


@pytest.mark.parametrize(("runs_ahead", "seconds"), [(False, [2.75, 3.0]), (True, [2.0, 1.0])])
def test_to_have_what_a_point_uses_takes_its_seconds_and_waits_do_not(runs_ahead: bool, seconds: list[float]) -> None:
    custody, meter = Custody(), Meter(runs_ahead=runs_ahead)
    points, found = PointMeter(cast(PieceCustody, custody), meter, 0), []
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
    points = PointMeter(cast(PieceCustody, Custody()), meter, 0)
    points.begin(with_memory=True)
    points.end()
    meter.now_s += 50.0
    points.comes()
    points.begin(with_memory=True)
    meter.now_s += 1.0
    assert points.end().seconds == 1.0
