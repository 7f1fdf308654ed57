"""Decisions about members: who may go, who may come, when a worker is started again, when the job ends."""

from __future__ import annotations

import pytest

from elastrain.base.resume import LOADED
from elastrain.decisions.blame import Failure, ends_job
from elastrain.decisions.membership import (
    Outcome,
    first_view,
    may_restart,
    missing_state,
    propose,
    redundancy,
    spec_difference,
    without_a_suspect,
)
from elastrain.job.world import Member, View


def members(*ids: str) -> tuple[Member, ...]:
    return tuple(Member(id=m, node="n0", address=f"unix:{m}") for m in ids)


def view(*ids: str, generation: int = 4) -> View:
    return View(generation=generation, members=members(*ids))


RING = {"0": ("a", "b"), "1": ("b", "c"), "2": ("c", "d"), "3": ("d", "a")}
"""Each shard on two neighbours of a, b, c, d."""


def test_first_view_is_generation_1_in_the_given_order() -> None:
    first = first_view(members("a", "b"))
    assert (first.generation, first.ids) == (1, ("a", "b"))
    assert first.reason == "all 2 workers are ready"


def test_nothing_to_do_keeps_the_view() -> None:
    proposal = propose(view("a", "b"), holders={}, dead=["x"], suspected=["y"], joining=members("a"))
    assert (proposal.outcome, proposal.view) == (Outcome.KEEP, None)


def test_proven_dead_member_goes_and_the_others_keep_their_order() -> None:
    proposal = propose(view("a", "b", "c", "d"), holders=RING, dead=["b"])
    assert proposal.outcome is Outcome.CHANGE
    assert proposal.view == view("a", "c", "d", generation=5)
    assert proposal.reason == proposal.view.reason == "b lost"


def test_minority_may_go_on_when_all_others_are_proven_dead() -> None:
    proposal = propose(view("a", "b", "c"), holders={"0": ("a", "b")}, dead=["b", "c"])
    assert proposal.view == view("a", generation=5)


def test_removal_and_join_are_one_view_with_joiners_last() -> None:
    proposal = propose(view("a", "b", "c"), holders={"0": ("a",)}, dead=["b"], joining=members("e", "f"))
    assert proposal.view == view("a", "c", "e", "f", generation=5)
    assert proposal.reason == "b lost; e, f joined"


def test_join_alone_needs_no_death() -> None:
    proposal = propose(view("a"), holders={"0": ("a",)}, joining=members("b"))
    assert proposal.view == view("a", "b", generation=5)
    assert proposal.reason == "b joined"


def test_joiner_that_has_died_meanwhile_is_left_out() -> None:
    assert propose(view("a"), holders={}, dead=["b"], joining=members("b")).outcome is Outcome.KEEP


@pytest.mark.parametrize("holders", [RING, None])
def test_dead_go_whatever_is_believed_about_holders_for_those_who_remain_know_better(
    holders: dict[str, tuple[str, ...]] | None,
) -> None:
    assert propose(view("a", "b", "c", "d"), holders=holders, dead=["a", "b"]).view == view("c", "d", generation=5)


def test_silent_are_not_removed_by_who_knows_of_no_holders() -> None:
    proposal = propose(view("a", "b", "c"), holders=None, suspected=["c"], joining=members("d"))
    assert proposal.outcome is Outcome.WAIT
    assert proposal.reason == (
        "c suspected but not proven dead, and no member of this node can tell what the others hold"
    )


def test_nobody_left_is_lost_even_before_the_first_commit() -> None:
    proposal = propose(view("a"), holders={}, dead=["a"], joining=members("b"))
    assert proposal.outcome is Outcome.LOST
    assert "every member of the view is gone" in proposal.reason


def test_silent_minority_goes_when_a_strict_majority_remains() -> None:
    proposal = propose(view("a", "b", "c"), holders={"0": ("a", "c")}, suspected=["c"], joining=members("d"))
    assert proposal.view == view("a", "b", "d", generation=5)


def test_even_split_waits_since_silence_is_no_proof() -> None:
    proposal = propose(view("a", "b"), holders={}, suspected=["b"])
    assert (proposal.outcome, proposal.view) == (Outcome.WAIT, None)
    assert proposal.reason == "b suspected but not proven dead, and the others are no strict majority"


def test_joiners_do_not_turn_a_minority_into_a_majority() -> None:
    assert propose(view("a", "b"), holders={}, suspected=["b"], joining=members("c", "d")).outcome is Outcome.WAIT


def test_proven_dead_do_not_count_towards_the_majority() -> None:
    # Two of four are heard; one of the other two may merely be cut off, with the same idea about us.
    proposal = propose(view("a", "b", "c", "d"), holders={}, dead=["d"], suspected=["c"], joining=members("e"))
    assert proposal.view == view("a", "b", "c", generation=5)
    assert proposal.reason == "d lost"


def test_suspicion_that_would_lose_state_waits() -> None:
    proposal = propose(view("a", "b", "c"), holders={"0": ("c",)}, suspected=["c"])
    assert proposal.outcome is Outcome.WAIT
    assert "1 of 1 shards have no living holder" in proposal.reason


def test_missing_state_shortens_long_lists() -> None:
    sentence = missing_state({str(shard): ("x",) for shard in range(9)}, {"a"})
    assert sentence.startswith("9 of 9 shards have no living holder (0, 1, 2, 3, 4, 5 and 3 more; held by x)")
    assert missing_state({"0": ("x", "a")}, {"a"}) == ""


@pytest.mark.parametrize(
    ("exit_code", "finishing", "refused", "used", "yes", "reason"),
    [
        (-9, False, False, 0, True, "restart 1 of 2"),
        (1, False, False, 1, True, "restart 2 of 2"),
        (1, False, False, 2, False, "all 2 restarts are used up (--max-restarts)"),
        (0, False, False, 0, False, "its script ended by itself"),
        (-9, True, False, 0, False, "the job is finishing"),
        (1, False, True, 0, False, "it was refused; the same worker would be refused again"),
    ],
)
def test_restart(exit_code: int, finishing: bool, refused: bool, used: int, yes: bool, reason: str) -> None:
    verdict = may_restart(exit_code=exit_code, finishing=finishing, refused=refused, used=used, allowed=2)
    assert (verdict.yes, verdict.reason) == (yes, reason)


def failure(member: str, *, step: int = 7, micro_batch: int | None = 3, signature: str = "ValueError: x") -> Failure:
    return Failure(member=member, step=step, micro_batch=micro_batch, signature=signature)


def test_exception_before_the_first_commit_ends_the_job() -> None:
    assert ends_job(failure("a"), [], committed=False).yes


def test_first_exception_after_a_commit_does_not_end_the_job() -> None:
    verdict = ends_job(failure("a"), [], committed=True)
    assert (verdict.yes, "step 7, micro-batch 3" in verdict.reason) == (False, True)


def test_same_exception_on_a_second_member_ends_the_job() -> None:
    verdict = ends_job(failure("b"), [failure("a", step=1), failure("a")], committed=True)
    assert verdict.yes
    assert verdict.reason.startswith("a and b raised the same exception at step 7, micro-batch 3")


@pytest.mark.parametrize(
    "earlier",
    [failure("b"), failure("a", step=6), failure("a", micro_batch=4), failure("a", signature="KeyError: x")],
    ids=["same member", "other step", "other micro-batch", "other exception"],
)
def test_other_exceptions_do_not_end_the_job(earlier: Failure) -> None:
    assert not ends_job(failure("b"), [earlier], committed=True).yes


def test_failure_outside_a_micro_batch_is_named_by_its_step() -> None:
    assert failure("a", micro_batch=None).place == "step 7"


def test_spec_difference_names_the_key_and_both_values() -> None:
    assert spec_difference({"a": 1, "torch": "2.13"}, {"a": 1, "torch": "2.13"}) == ""
    sentence = spec_difference({"a": 1, "torch": "2.13"}, {"a": 1, "torch": "2.11"})
    assert sentence == "its torch is 2.11, the job's is 2.13: start every worker with the same torch"
    assert "its threads is (unset), the job's is 1" in spec_difference({"threads": 1}, {})


@pytest.mark.parametrize(("ours", "theirs"), [({LOADED: "a"}, {LOADED: "b"}), ({LOADED: "a"}, {}), ({}, {LOADED: "b"})])
def test_what_a_script_has_loaded_is_compared_except_for_members_that_join_later(
    ours: dict[str, str], theirs: dict[str, str]
) -> None:
    assert LOADED in spec_difference(ours, theirs)
    assert spec_difference(ours, theirs, late=True) == ""


@pytest.mark.parametrize(
    ("suspicions", "holders", "gone", "words"),
    [
        ({"a": "bc", "c": "a"}, {"0": "abc"}, "a", "a lives, but b, c cannot reach it: it is ended"),
        ({"a": "b", "b": "a"}, {"0": "abc"}, "b", "b lives, but a cannot reach it: it is ended"),
        ({"a": "b"}, {"0": "ab"}, "a", "a lives, but b cannot reach it: it is ended"),  # it may hang
        ({"a": "bc"}, {"0": "a"}, "c", "c lives, but it cannot reach a: it is ended"),  # newcomers and the only holder
        ({"a": "bc"}, {"0": "ad"}, "c", "c lives, but it cannot reach a: it is ended"),  # a newcomer is cheaper
        ({"a": "b", "b": "a"}, {"0": "bc", "1": "b"}, "a", "a lives, but b cannot reach it: it is ended"),
        ({"a": "bd", "d": "a"}, {"0": "abc"}, "a", "a lives, but b, d cannot reach it: it is ended"),
        ({"a": "b", "b": "a"}, {}, "b", "b lives, but a cannot reach it: it is ended"),
        ({"a": "b", "b": "a"}, None, "b", "b lives, but a cannot reach it: it is ended"),
        (
            {"a": "b", "b": "a"},
            {"0": "a", "1": "b"},
            "b",
            "b lives, but a cannot reach it: it is ended, though each of them holds state that no other member holds",
        ),
    ],
)
def test_of_those_who_do_not_reach_one_another_the_cheapest_loss_is_ended(
    suspicions: dict[str, str], holders: dict[str, str] | None, gone: str, words: str
) -> None:
    now = view("a", "b", "c", "d")
    proposal = without_a_suspect(now, suspicions, holders=holders, answering=now.ids)
    assert proposal.view is not None
    assert proposal.view.ids == tuple(m for m in "abcd" if m != gone)
    assert proposal.reason == words


def test_nobody_is_ended_on_the_word_of_nobody_of_outsiders_or_of_those_who_do_not_answer() -> None:
    now = view("a", "b", "c")
    for suspicions, answering in (({}, "abc"), ({"a": "z", "z": "a"}, "abc"), ({"a": "b"}, "ac"), ({"a": "b"}, "bc")):
        proposal = without_a_suspect(now, suspicions, holders={"0": ("a", "b")}, answering=answering)
        assert (proposal.outcome, proposal.view) == (Outcome.KEEP, None)


@pytest.mark.parametrize(
    ("alive", "backups", "words"),
    [
        ("abc", 1, "every shard survives the loss of 1 more"),
        ("abc", 2, "every shard survives the loss of 1 more, copying"),
        ("ac", 1, "some shards are held by one member only, copying"),
        ("a", 1, "some shards have no living holder"),
        ("", 1, ""),
    ],
)
def test_redundancy_counts_living_holders_and_says_what_is_being_mended(alive: str, backups: int, words: str) -> None:
    holders = {"0": ["a", "b"], "1": ["b", "c"], "2": ["c", "a"]}
    assert redundancy(holders, list(alive), backups) == words


def test_redundancy_of_one_member_alone_wants_no_copies() -> None:
    assert redundancy({"0": ["a", "b"]}, ["a"], 1) == "some shards are held by one member only"
    assert redundancy({}, ["a"], 1) == ""
