"""Placement, by example."""

from __future__ import annotations

from elastrain.job.placement import Holders, effective, handed_over, living, next_roles, target

FOUR = {"a": "n0", "b": "n1", "c": "n0", "d": "n1"}


def test_a_fresh_job_spreads_primaries_and_puts_backups_on_the_other_node() -> None:
    placed = target([None] * 4, [1] * 4, FOUR, 1)
    assert [holders.primary for holders in placed] == ["a", "b", "c", "d"]
    assert all(FOUR[holders.primary] != FOUR[holders.backups[0]] for holders in placed)


def test_on_one_node_a_backup_on_the_same_node_is_better_than_none() -> None:
    placed = target([None] * 2, [1, 1], {"a": "n0", "b": "n0"}, 2)
    assert [set(holders.all) for holders in placed] == [{"a", "b"}] * 2


def test_a_member_alone_has_no_backups() -> None:
    assert target([None], [1], {"a": "n0"}, 2) == (Holders("a"),)


def test_large_shards_are_weighed() -> None:
    placed = target([None] * 3, [4, 2, 2], {"a": "a", "b": "b"}, 0)
    assert [holders.primary for holders in placed] == ["a", "b", "b"]


def test_a_joiner_takes_over_from_the_heaviest() -> None:
    now = [Holders("a"), Holders("a"), Holders("b")]
    placed = target(now, [1, 1, 1], {"a": "a", "b": "b", "c": "c"}, 0)
    assert sorted(holders.primary for holders in placed) == ["a", "b", "c"]
    assert placed[2].primary == "b"


def test_backups_of_one_member_are_spread_over_the_others() -> None:
    now = [Holders("a"), Holders("a"), Holders("b"), Holders("c")]
    nodes = {"a": "a", "b": "b", "c": "c"}
    placed = target(now, [1, 1, 1, 1], nodes, 1)
    assert {holders.backups[0] for holders in placed if holders.primary == "a"} == {"b", "c"}


def test_the_first_living_holder_takes_over() -> None:
    assert living(Holders("a", ("b", "c")), {"b", "c"}) == Holders("b", ("c",))
    assert living(Holders("a", ("b",)), {"c"}) is None


def test_effective_names_lost_shards() -> None:
    assert effective((Holders("a"), Holders("b")), {"b"}) == ((None, Holders("b")), (0,))


def test_roles_move_when_the_whole_goal_is_verified() -> None:
    now, goal = Holders("a", ("b",)), Holders("c", ("d",))
    assert next_roles(now, goal, {"a", "b", "c", "d"}) == goal
    assert next_roles(now, goal, {"a", "b", "d"}) == now


def test_a_gap_is_filled_by_whoever_is_ready() -> None:
    assert next_roles(Holders("a"), Holders("c", ("d",)), {"a", "d"}) == Holders("a", ("d",))
    assert next_roles(Holders("a"), Holders("c", ("d",)), {"a", "c"}) == Holders("a", ("c",))


def test_the_giver_of_a_block_backs_it_up_where_that_is_another_node() -> None:
    over_the_link = handed_over(Holders("b", ("a",)), "a", {"a", "b"}, FOUR)
    assert over_the_link == Holders("a", ("b",))
    within_a_node = handed_over(Holders("a", ("b",)), "c", {"a", "b", "c"}, FOUR)
    assert within_a_node == Holders("c", ("b",)), "the giver is on the new primary's node"
    assert handed_over(Holders("a"), "b", {"a", "b"}, FOUR) == Holders("b"), "no backups, as before"


def test_a_shard_that_was_short_of_holders_is_not_short_once_it_was_handed_over() -> None:
    assert handed_over(Holders("a"), "b", {"a", "b"}, FOUR, backups=1) == Holders("b", ("a",))
    assert handed_over(Holders("a", ("d",)), "b", {"a", "b", "d"}, FOUR, backups=2) == Holders("b", ("a", "d"))
