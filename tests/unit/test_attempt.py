"""The bookkeeping of one attempt."""

from __future__ import annotations

import pytest

from elastrain.attempt import Attempt, PartialSet, join_weights
from elastrain.fold import Fold
from elastrain.values import Contribution

ONE = (Contribution(1.0, 1.0, 1, 5), 0b01)
TWO = (Contribution(2.0, 1.0, 1, 6), 0b11)


def attempt(runs: int = 8, blocks: int = 1) -> Attempt:
    return Attempt(step=0, fold=Fold(runs), blocks=blocks)


def test_what_travels_with_partials_is_joined_with_them() -> None:
    assert join_weights(ONE, TWO) == (Contribution(3.0, 2.0, 2, 11), 0b11)
    partials = PartialSet(Fold(2))
    assert partials.add((1, 2), TWO) == []
    assert partials.nodes == {(1, 2)}
    assert [step.parent for step in partials.add((0, 1), ONE) or ()] == [(0, 2)]
    assert partials.complete
    assert partials.weight((0, 2)) == join_weights(ONE, TWO)


def test_a_covered_partial_is_not_added() -> None:
    partials = PartialSet(Fold(2))
    partials.add((0, 2), ONE)
    assert partials.add((0, 1), TWO) is None
    assert partials.weight((0, 2)) == ONE


def test_a_hand_out_makes_the_fewest_targets() -> None:
    tried = attempt()
    tried.hand([0, 1, 2, 3, 5])
    assert tried.targets == ((0, 4), (5, 6))
    assert tried.target_of(2) == (0, 4)


def test_a_target_that_loses_a_run_shrinks_and_new_runs_make_their_own() -> None:
    tried = attempt()
    tried.hand([0, 1, 2, 3])
    tried.hand([0, 1, 2, 6, 7])
    assert tried.targets == ((0, 2), (2, 3), (6, 8))
    assert tried.pending == [0, 1, 2, 6, 7]


def test_a_run_that_ended_meanwhile_is_not_done_again() -> None:
    tried = Attempt(step=0, fold=Fold(8), blocks=1, running=0)
    tried.hand([0, 1])
    tried.end(0)
    assert tried.running is None
    tried.hand([0, 1, 2])
    assert tried.pending == [1, 2]
    assert tried.targets == ((0, 2), (2, 3))


def test_a_run_that_ends_after_it_was_taken_away_is_only_noted() -> None:
    tried = attempt()
    tried.hand([0])
    tried.hand([])
    tried.end(0)
    assert tried.ended == {0}


def test_complete_targets_are_sent_once_per_block() -> None:
    tried = attempt(blocks=2)
    tried.hand([0, 1])
    tried.own[1].add((0, 1), ONE, within=(0, 2))
    assert list(tried.unsent()) == []
    tried.own[1].add((1, 2), ONE, within=(0, 2))
    assert list(tried.unsent()) == [(1, (0, 2))]
    tried.sent.add((1, (0, 2)))
    assert list(tried.unsent()) == []


def test_each_shard_and_lane_has_one_fold() -> None:
    tried = attempt()
    assert tried.fold_of(1, 0) is tried.fold_of(1, 0)
    assert tried.fold_of(1, 0) is not tried.fold_of(1, 1)


def test_votes_and_acknowledgements_do_not_outlive_the_view() -> None:
    tried = attempt()
    tried.acks[0] = {"a"}
    tried.voted = True
    tried.forget_view()
    assert (tried.acks, tried.votes, tried.voted) == ({}, {}, False)


def test_a_run_without_a_target_is_a_fault() -> None:
    with pytest.raises(StopIteration):
        attempt().target_of(0)
