"""The arithmetic of goodput, on commits written by hand. Times are in seconds."""

from __future__ import annotations

import pytest

from experiments.goodput.figures import (
    Absence,
    Commit,
    Window,
    alive_s,
    goodput,
    progress,
    schedule,
    steps_inside,
    usual_step_s,
    window,
)


def commits(*moments_s: float, first: int = 0, share: float = 1.0) -> list[Commit]:
    return [Commit(step=first + index, at_s=at_s, share=share) for index, at_s in enumerate(moments_s)]


def test_schedule_is_the_same_for_every_system_and_has_the_rate_that_it_says() -> None:
    strikes = schedule(seed=3, every_s=15, count=400, places=4)
    assert strikes == schedule(seed=3, every_s=15, count=400, places=4)
    assert strikes != schedule(seed=4, every_s=15, count=400, places=4)
    assert strikes[-1].after_s == pytest.approx(400 * 15, rel=0.05)
    assert {strike.place for strike in strikes} == {0, 1, 2, 3}


def test_a_step_that_every_member_tells_counts_once() -> None:
    assert [each.step for each in progress([*commits(1, 2, 3), *commits(1.1, 2.1, 3.1)])] == [0, 1, 2]


def test_a_step_that_is_done_again_after_a_restart_adds_nothing() -> None:
    found = progress([*commits(1, 2, 3), *commits(13, 14, 15, 16, first=1)])
    assert [(each.step, each.at_s) for each in found] == [(0, 1), (1, 2), (2, 3), (3, 15), (4, 16)]


def test_undisturbed_step_is_the_median_before_the_first_kill_without_the_first_steps() -> None:
    told = commits(5, 9, 10, 11, 12, 13, 40)
    assert usual_step_s(told, until_s=20) == pytest.approx(1)
    with pytest.raises(ValueError, match="at least 3"):
        usual_step_s(told, until_s=11)


def test_window_reaches_until_the_job_has_come_further_than_before() -> None:
    told = [*commits(1, 2, 3, 4), *commits(9, 10, 11, first=2)]  # steps 2 and 3 again at 9 and 10, step 4 at 11
    assert window(told, from_s=2.5, until_s=6) == Window(from_s=2, until_s=11)
    assert window(told, from_s=2.5, until_s=12) is None
    with pytest.raises(ValueError, match="before the schedule"):
        window(told, from_s=0.5, until_s=6)


def test_a_step_of_three_of_four_members_counts_three_quarters() -> None:
    told = [*commits(0, 1), *commits(2, 3, first=2, share=0.75)]
    assert steps_inside(told, Window(from_s=0, until_s=3)) == pytest.approx(2.5)


def test_only_what_the_schedule_took_away_is_no_living_member() -> None:
    where = Window(from_s=10, until_s=20)
    absences = [Absence(place=0, from_s=5, until_s=12), Absence(place=1, from_s=18, until_s=float("inf"))]
    assert alive_s(absences, where, places=4) == pytest.approx(10 - 4 / 4)


def test_goodput_is_one_where_nothing_but_the_dead_is_missing() -> None:
    """Four members make a step per second; one is away for four seconds, and the others go on at their own pace."""
    where = Window(from_s=0, until_s=10)
    third = 4 / 3
    told = commits(0, 1, 2, 3, 3 + third, 3 + 2 * third, 3 + 3 * third, 8, 9, 10)
    away = [Absence(place=2, from_s=3, until_s=7)]
    assert goodput(told, away, where, places=4, step_s=1) == pytest.approx(1)


def test_standing_still_costs_goodput() -> None:
    told = commits(0, 1, 2, 7, 8, 9, 10)
    assert goodput(told, [], Window(from_s=0, until_s=10), places=4, step_s=1) == pytest.approx(0.6)
