"""Hand-outs, by example."""

from __future__ import annotations

import pytest

from elastrain.job.run_plan import assign, level, plan, shares_by_speed


def test_earlier_ranks_take_the_remainder() -> None:
    assert plan(["a", "b", "c"], 8) == {"a": (0, 1, 2), "b": (3, 4, 5), "c": (6, 7)}


def test_who_is_busy_gets_less() -> None:
    assert assign([4, 5, 6], {"a": 3, "b": 1, "c": 0}) == {"a": (), "b": (4,), "c": (5, 6)}


def test_more_members_than_runs_leaves_some_without() -> None:
    assert plan(["a", "b"], 1) == {"a": (0,), "b": ()}


def test_a_plan_needs_a_member() -> None:
    with pytest.raises(ValueError, match="at least one member"):
        plan([], 4)


def test_a_newcomer_takes_runs_that_are_not_under_way() -> None:
    levelled = level({"a": (0, 1, 2, 3), "new": ()}, {"a": 2, "new": 0})
    assert levelled == {"a": (0, 1), "new": (3, 2)}


def test_what_is_fixed_is_not_moved_however_uneven() -> None:
    assert level({"a": (0, 1, 2), "b": ()}, {"a": 3, "b": 0}) == {"a": (0, 1, 2), "b": ()}


def test_a_member_with_half_the_speed_gets_half_as_many() -> None:
    assert plan(["a", "b", "c"], 10, {"b": 50}) == {"a": (0, 1, 2, 3), "b": (4, 5), "c": (6, 7, 8, 9)}


def test_a_slow_member_gets_none_where_all_have_few() -> None:
    assert plan(["a", "b", "c"], 6, {"b": 25}) == {"a": (0, 1, 2), "b": (), "c": (3, 4, 5)}


def test_runs_move_to_where_they_are_done_first() -> None:
    assert level({"slow": (0, 1, 2, 3), "a": (4, 5)}, {"slow": 1, "a": 0}, {"slow": 50}) == {
        "slow": (0, 1),
        "a": (4, 5, 3, 2),
    }


def test_a_chain_of_twice_as_many_members_takes_twice_as_many_runs() -> None:
    assert shares_by_speed(9, [2, 1]) == [6, 3]
