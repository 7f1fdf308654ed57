"""When a step is no more the one that its plan was made of, and for how long that has to be so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.offload.planning.orders import Arrival, BlockSizes, SeenStep, StepStage
from elastrain.offload.planning.plan_search import Changed, Patience, StepDifference, difference
from elastrain.offload.planning.plan_values import Tier

BLOCKS = tuple(
    BlockSizes(name=f"b{n}", parameter_bytes=4, gradient_bytes=4, state_bytes=8, touches=(n,)) for n in range(2)
)
FORWARD, BACKWARD, UPDATE = StepStage
POINTS = tuple(
    Arrival(stage=stage, block=block, seconds=1.0, saved_bytes=100 * (stage is FORWARD))
    for stage, block in [(FORWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 0), (UPDATE, 0), (UPDATE, 1)]
)
STEP = SeenStep(blocks=BLOCKS, points=POINTS)
DRIVE = Tier(name="drive", read_bytes_per_s=1e9, write_bytes_per_s=1e9)


def changed(now: SeenStep, drive: Tier = DRIVE) -> Changed | None:
    found = difference(STEP, now, (DRIVE,), (drive,))
    return None if found is None else found.changed


def like(**more: float) -> SeenStep:
    return replace(STEP, points=tuple(replace(each, **more) for each in POINTS))  # type: ignore[arg-type]


def test_the_same_step_is_the_same_also_where_updates_come_before_forwards() -> None:
    assert changed(STEP) is None
    first = tuple(sorted(POINTS, key=lambda each: each.stage is not UPDATE))
    assert changed(replace(STEP, points=first)) is None


def test_order_and_number_of_points_count() -> None:
    turned = (POINTS[1], POINTS[0], *POINTS[2:])
    assert changed(replace(STEP, points=turned)) is Changed.POINTS
    assert changed(replace(STEP, points=POINTS[:-1])) is Changed.POINTS
    assert changed(replace(STEP, points=(*POINTS[:4], *POINTS))) is Changed.POINTS


def test_sizes_count_from_a_tenth_on() -> None:
    assert changed(like(saved_bytes=54)) is Changed.SIZES
    assert (
        changed(replace(STEP, points=tuple(replace(p, saved_bytes=p.saved_bytes * 105 // 100) for p in POINTS))) is None
    )
    larger = replace(STEP, blocks=(replace(BLOCKS[0], gradient_bytes=0), BLOCKS[1]))
    assert changed(larger) is Changed.SIZES


def test_seconds_and_rates_count_from_some_distance_on() -> None:
    def lasting(seconds: float) -> SeenStep:
        return replace(STEP, points=tuple(replace(each, seconds=seconds) for each in POINTS))

    assert changed(lasting(1.2)) is changed(lasting(0.8)) is None
    assert changed(lasting(1.3)) is changed(lasting(0.7)) is Changed.TIMES
    assert changed(STEP, replace(DRIVE, read_bytes_per_s=0.7e9)) is None
    assert changed(STEP, replace(DRIVE, write_bytes_per_s=0.6e9)) is Changed.TIMES


@pytest.mark.parametrize(("kind", "steps"), [(Changed.POINTS, 2), (Changed.SIZES, 2), (Changed.TIMES, 4)])
def test_one_step_that_differs_is_no_reason(kind: Changed, steps: int) -> None:
    patience, found = Patience(), StepDifference(changed=kind, reason="")
    for _ in range(3):
        assert not any(patience.is_over(found) for _ in range(steps - 1))
        assert not patience.is_over(None)
    assert [patience.is_over(found) for _ in range(steps)] == [False] * (steps - 1) + [True]


def test_who_renews_for_times_waits_longer_the_next_time() -> None:
    patience, found = Patience(), StepDifference(changed=Changed.TIMES, reason="")
    renewed = [number for number in range(100) if patience.is_over(found)]
    assert renewed == [3, 11, 27, 59]
