"""The fold's tree, by example."""

from __future__ import annotations

import pytest

from elastrain.job.fold import Combine, Fold, absorb, covers, is_covered, leaves, split


def test_a_node_splits_at_the_largest_power_of_two_below_its_length() -> None:
    assert split((0, 8)) == ((0, 4), (4, 8))
    assert split((0, 5)) == ((0, 4), (4, 5))
    assert split((4, 7)) == ((4, 6), (6, 7))


def test_a_leaf_has_no_children() -> None:
    with pytest.raises(ValueError, match="run 3 is a leaf"):
        split((3, 4))


def test_the_root_has_no_parent() -> None:
    with pytest.raises(ValueError, match="is the root"):
        Fold(4).parent((0, 4))


def test_a_step_without_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one run; got 0"):
        Fold(0)


def test_cover_joins_what_the_tree_joins() -> None:
    assert Fold(8).cover([0, 1, 2, 3, 6, 7]) == ((0, 4), (6, 8))
    assert Fold(8).cover([1, 2]) == ((1, 2), (2, 3))
    assert Fold(8).cover([]) == ()


def test_siblings_are_combined_left_to_right_and_upwards() -> None:
    held = frozenset({(0, 2), (3, 4)})
    after, steps = absorb(Fold(4), held, (2, 3))
    assert after == {(0, 4)}
    assert steps == [
        Combine(left=(2, 3), right=(3, 4), parent=(2, 4)),
        Combine(left=(0, 2), right=(2, 4), parent=(0, 4)),
    ]


def test_a_covered_partial_changes_nothing() -> None:
    held = frozenset({(0, 2)})
    assert absorb(Fold(4), held, (1, 2)) == (held, [])


def test_a_partial_replaces_those_that_it_covers() -> None:
    assert absorb(Fold(4), frozenset({(0, 1), (2, 3)}), (0, 2))[0] == {(0, 2), (2, 3)}


def test_nothing_is_combined_above_the_target() -> None:
    assert absorb(Fold(4), frozenset({(0, 2)}), (2, 4), within=(2, 4))[0] == {(0, 2), (2, 4)}


def test_covers_and_leaves() -> None:
    assert covers((0, 4), (1, 2)) and covers((1, 2), (1, 2)) and not covers((1, 2), (0, 4))
    assert leaves([(0, 2), (5, 6)]) == {0, 1, 5}


def test_a_set_covers_what_one_of_its_partials_covers() -> None:
    assert is_covered((0, 1), frozenset({(0, 2)}))
    assert not is_covered((0, 2), frozenset({(0, 1), (1, 2)}))
