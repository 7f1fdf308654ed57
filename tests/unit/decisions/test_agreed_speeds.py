"""Speeds by which runs are handed out: what the votes tell changes them, and what is within the noise does not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.decisions.agreed_speeds import _LEAST_GAIN, _step_takes, agreed_speeds, speeds_of, told_speeds
from elastrain.job.run_plan import Speeds, plan

MEMBERS = ("a", "b", "c")


def agreed(present: Speeds | None = None, runs: int = 24, **told_s: float) -> Speeds:
    return agreed_speeds(present or {}, told_s, MEMBERS, runs)


def test_a_member_at_half_speed_gets_half_as_many_runs() -> None:
    speeds = agreed(a=0.1, b=0.2, c=0.1)
    assert speeds == {"b": 50}
    assert [len(runs) for runs in plan(MEMBERS, 10, speeds).values()] == [4, 2, 4]


def test_a_member_that_is_faster_than_the_others_gets_more() -> None:
    assert agreed(a=0.1, b=0.05, c=0.1) == {"b": 200}


def test_of_two_members_the_median_lies_between() -> None:
    assert agreed_speeds({}, {"a": 0.1, "b": 0.3}, ("a", "b"), 8) == {"a": 150, "b": 50}


@pytest.mark.parametrize(
    "told_s",
    [
        {},
        {"a": 0.1, "b": 0.104, "c": 0.1},
        {"a": 0.001, "b": 0.005, "c": 0.001},
        {"a": 0.1, "b": math.nan, "c": 0.1},
        {"a": 0.1, "b": -1.0, "c": 0.0},
        {"b": 9.0},
        {"gone": 9.0, "a": 0.1, "b": 0.1},
    ],
)
def test_what_shows_no_difference_changes_nothing(told_s: dict[str, float]) -> None:
    assert agreed_speeds({}, told_s, MEMBERS, 24) == {}


def test_where_all_are_slow_none_is() -> None:
    assert agreed({"b": 50}, a=1.0, b=2.0, c=1.0) == {"b": 50}
    assert agreed(a=5.0, b=5.1, c=4.9) == {}


def test_a_member_that_has_recovered_gets_its_share_again() -> None:
    assert agreed({"b": 50}, a=0.1, b=0.1, c=0.1) == {}


def test_other_speeds_that_gain_nothing_are_not_taken() -> None:
    assert agreed({"b": 50}, a=0.1, b=0.205, c=0.1) == {"b": 50}
    assert agreed(runs=3, a=0.1, b=0.12, c=0.1) == {}, "each of them gets one run in any case"


def test_a_member_without_runs_keeps_its_speed_and_a_joiner_counts_as_the_median() -> None:
    assert agreed({"b": 10}, a=0.1, c=0.1) == {"b": 10}
    assert agreed_speeds({"b": 10}, {"a": 0.1, "c": 0.1}, ("a", "b", "c", "new"), 24) == {"b": 10}


def test_speeds_of_lost_members_are_forgotten() -> None:
    assert agreed_speeds({"b": 50, "gone": 10}, {}, MEMBERS, 24) == {"b": 50}


def test_before_the_first_commit_all_are_alike() -> None:
    assert speeds_of(None) == {}


def test_a_change_is_told_with_its_members() -> None:
    assert told_speeds({}, {"b": 50}).endswith("b 50 % of the median member's")
    assert told_speeds({"b": 50}, {}).startswith("b about as fast as the other members again")


seconds = st.floats(0.001, 100.0) | st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])
hundredths = st.integers(1, 10_000)


@given(
    members=st.lists(st.sampled_from("abcdefgh"), min_size=1, unique=True),
    present=st.dictionaries(st.sampled_from("abcdefghxyz"), hundredths),
    told_s=st.dictionaries(st.sampled_from("abcdefghxyz"), seconds),
    runs=st.integers(1, 40),
)
def test_whatever_is_told_speeds_are_whole_of_this_view_and_settle_at_once(
    members: list[str], present: dict[str, int], told_s: dict[str, float], runs: int
) -> None:
    found = agreed_speeds(present, told_s, members, runs)
    assert set(found) <= set(members)
    assert all(isinstance(speed, int) and 1 <= speed <= 10_000 for speed in found.values())
    assert list(found.items()) == list(agreed_speeds(present, told_s, members, runs).items())
    assert sorted(run for its in plan(members, runs, found).values() for run in its) == list(range(runs))
    again = agreed_speeds(found, told_s, members, runs)
    gained = _step_takes(again, again, members, runs) / _step_takes(found, again, members, runs)
    assert again == found or gained <= 1 - _LEAST_GAIN


@given(factor=st.floats(0.2, 5.0), noise=st.lists(st.floats(0.985, 1.015), min_size=4, max_size=4))
def test_noise_of_a_few_percent_moves_no_run(factor: float, noise: list[float]) -> None:
    told_s = {"a": 0.1, "b": 0.1 * factor, "c": 0.1, "d": 0.1}
    members = tuple(told_s)
    settled = agreed_speeds({}, told_s, members, 16)
    noisy = {m: s * n for (m, s), n in zip(told_s.items(), noise, strict=True)}
    assert plan(members, 16, agreed_speeds(settled, noisy, members, 16)) == plan(members, 16, settled)
