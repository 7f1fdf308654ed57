"""What a member computes of a step, and its partials."""

from __future__ import annotations

import pytest

from elastrain.job.checkpoint_plan import CheckpointVote
from elastrain.job.fold import Fold
from elastrain.job.values import Contribution, Vote
from elastrain.member.state.ballot import Ballot
from elastrain.member.state.runs import PartialSet, Runs, join_weights

ONE = (Contribution(1.0, 1.0, 1, 5), 0b01)
TWO = (Contribution(2.0, 1.0, 1, 6), 0b11)
VOTE = Vote(
    step=0,
    seen=1,
    contribution=None,
    square_norms=(),
    roles=(),
    settings="",
    checks=(),
    before=(),
    checkpoint=CheckpointVote(),
    graph="",
    plan=None,
)


def handed(*runs: int, blocks: int = 1) -> Runs:
    """Of eight runs, these."""
    made = Runs(Fold(8), blocks, 0)
    made.hand(runs)
    return made


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
    assert handed(0, 1, 2, 3, 5).targets[0] == ((0, 4), (5, 6))


def test_a_partial_is_added_up_to_its_target_and_no_further() -> None:
    runs = handed(0, 1, 2)
    assert [step.parent for run in range(3) for step in runs.add(0, run, ONE)] == [(0, 2)]
    assert runs.own[0].nodes == {(0, 2), (2, 3)}


def test_a_target_that_loses_a_run_shrinks_and_new_runs_make_their_own() -> None:
    runs = handed(0, 1, 2, 3)
    runs.hand([0, 1, 2, 6, 7])
    assert runs.targets[0] == ((0, 2), (2, 3), (6, 8))
    assert runs.pending == [0, 1, 2, 6, 7]


def test_a_run_that_ended_meanwhile_is_not_done_again() -> None:
    runs = handed(0, 1)
    runs.start_running(0)
    runs.end_running()
    assert runs.running == []
    runs.hand([0, 1, 2])
    assert runs.pending == [1, 2]
    assert runs.targets[0] == ((0, 2), (2, 3))


def test_a_run_that_ends_after_it_was_taken_away_is_not_done_again_either() -> None:
    runs = handed(0)
    runs.start_running(0)
    runs.hand([])
    runs.end_running()
    runs.hand([0, 1])
    assert runs.pending == [1]


@pytest.mark.parametrize(("running", "under_way"), [((), 1), ((0,), 2), ((0, 1), 3)])
def test_the_next_run_counts_as_under_way(running: tuple[int, ...], under_way: int) -> None:
    runs = handed(0, 1, 2, 3)
    for run in running:
        runs.start_running(run)
    assert runs.under_way == under_way


def test_runs_end_in_the_order_in_which_they_began() -> None:
    runs = handed(0, 1, 2)
    for run in (0, 1):
        runs.start_running(run)
    runs.end_running()
    assert (runs.running, runs.pending, runs.under_way) == ([1], [1, 2], 2)


def test_a_step_that_begins_anew_awaits_nothing_of_what_is_outstanding() -> None:
    runs = handed(0, 1)
    for run in (0, 1):
        runs.start_running(run)
    runs.begin(0)
    runs.hand([0, 1])
    assert (runs.is_void, runs.running, runs.under_way) == (True, [], 1)
    runs.end_running()
    runs.start_running(0)
    assert (runs.is_void, runs.running) == (True, [0]), "the second one is void, too"
    runs.end_running()
    assert (runs.is_void, runs.pending) == (False, [0, 1]), "the void runs are still to be computed"
    runs.end_running()
    assert runs.pending == [1]


def test_complete_targets_are_sent_once_per_block() -> None:
    runs = handed(0, 1, blocks=2)
    runs.add(1, 0, ONE)
    assert list(runs.take_unsent()) == []
    runs.add(1, 1, ONE)
    assert list(runs.take_unsent()) == [(1, (0, 2))]
    assert list(runs.take_unsent()) == []


def test_all_is_computed_when_every_block_has_every_run() -> None:
    runs = handed(0, blocks=2)
    assert not runs.are_computed()
    runs.add(0, 0, ONE)
    assert not runs.are_computed()
    runs.add(1, 0, ONE)
    assert runs.are_computed()


def test_votes_and_acknowledgements_do_not_outlive_the_view() -> None:
    ballot = Ballot()
    ballot.acknowledge("a", [0])
    ballot.cast("b", VOTE)
    assert (ballot.acknowledged(0), ballot.votes(["b"]), ballot.has_voted) == ({"a"}, [VOTE], True)
    ballot.clear()
    assert (ballot.acknowledged(0), ballot.votes(["b"]), ballot.has_voted) == (set(), None, False)


def test_a_run_that_was_not_handed_out_is_a_fault() -> None:
    with pytest.raises(StopIteration):
        handed().add(0, 0, ONE)
