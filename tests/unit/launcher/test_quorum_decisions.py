"""Single decisions of the quorum: its founding, and its members afterwards. The simulator plays whole schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastrain.launcher.core.quorum.founding import (
    GRACE_S,
    Charter,
    Founding,
    FoundingState,
    HeardState,
    Named,
    Outlook,
    step,
)
from elastrain.launcher.core.quorum.quorum_members import (
    LEARN_S,
    LOST_S,
    AddMe,
    EndedEtcd,
    Observed,
    Promote,
    QuorumCandidate,
    QuorumMember,
    Remove,
    decide,
    keeps_data,
    meaning,
)


def named(place: int, instance: str = "") -> Named:
    return Named(place=place, instance=instance or f"i{place}", peer=f"h{place}:2380")


def state(place: int, **fields: object) -> FoundingState:
    return replace(FoundingState(me=named(place)), **fields)  # type: ignore[arg-type]


def after(mine: FoundingState, *others: FoundingState, waited_s: float = 0.0, age_s: float = 0.0) -> Founding:
    heard = {other.me.place: HeardState(state=other, age_s=age_s) for other in others}
    return step(mine, Outlook(named=3, heard=heard, waited_s=waited_s, fresh_token="t"))


ALL = Charter(token="t", members=(named(0), named(1), named(2)))
TWO = Charter(token="t", members=(named(0), named(1)))


def test_first_host_drafts_once_all_are_here_and_starts_once_all_have_promised() -> None:
    assert after(state(0)).reason == "1 of 3 named hosts are here"
    assert after(state(0), state(1)).state.promised is None
    drafted = after(state(0), state(1), state(2)).state
    assert drafted.promised == ALL and drafted.started is None
    assert after(drafted, state(1, promised=ALL), state(2)).state.started is None
    assert after(drafted, state(1, promised=ALL), state(2, promised=ALL)).state.started == ALL


def test_majority_founds_without_a_host_that_stays_away() -> None:
    assert after(state(0), state(1), waited_s=GRACE_S + 1).state.promised == TWO
    assert after(state(0), state(1), waited_s=GRACE_S + 1, age_s=60.0).state.promised is None


def test_later_host_promises_to_the_founder_and_takes_the_promise_back_with_the_draft() -> None:
    promised = after(state(1), state(0, promised=ALL)).state
    assert promised.promised == ALL
    assert after(promised, state(0)).state.promised is None
    assert (
        after(state(1), state(0, promised=replace(ALL, members=(named(0), named(1, "older"))))).state.promised is None
    )


def test_host_starts_with_a_host_that_has_started_only_if_the_charter_lists_its_instance() -> None:
    assert after(state(1), state(0, started=ALL)).state.started == ALL
    older = Charter(token="t", members=(named(0), named(1, "older")))
    waiting = after(state(1), state(0, started=older))
    assert waiting.state.started is None and waiting.joins is None
    assert after(state(1), state(0, started=older, serves=True)).joins == older


def test_charter_that_has_never_worked_is_given_up_for_one_that_works() -> None:
    mine = state(0, started=TWO)
    other = replace(ALL, token="u")
    assert after(mine, state(1, started=other)).joins is None
    assert after(mine, state(1, started=other, serves=True)).joins == other
    assert after(replace(mine, serves=True), state(1, started=other, serves=True)).joins is None


def voter(name: str, silent_s: float = 0.0) -> QuorumMember:
    return QuorumMember(id=f"id-{name}", instance=name, silent_s=silent_s)


def learner(name: str, silent_s: float = 0.0) -> QuorumMember:
    return replace(voter(name, silent_s), is_learner=True)


def seen(members: Sequence[QuorumMember], present: str, *, me: str = "a", leads: bool = True) -> Observed:
    candidates = tuple(
        QuorumCandidate(instance=name, is_named=name in "abc", since=number) for number, name in enumerate(present)
    )
    return Observed(members=tuple(members), candidates=candidates, me=me, leads=leads)


A, B, C = voter("a"), voter("b"), voter("c")
GONE = voter("c", LOST_S + 1)


def test_lost_voter_is_removed_by_the_leader_before_another_comes_in() -> None:
    assert decide(seen([A, B, GONE], "abd")).action == Remove(member="id-c")
    assert decide(seen([A, B, GONE], "abd", me="d", leads=False)).action is None
    assert decide(seen([A, B], "abd", me="d", leads=False)).action == AddMe()
    assert decide(seen([A, B], "abd")).action is None


def test_silent_voter_whose_agent_lives_and_voters_without_a_majority_stay() -> None:
    assert decide(seen([A, B, GONE], "abcd")).action is None
    assert decide(seen([A, B, GONE], "abcd", me="d", leads=False)).action is None
    assert decide(seen([A, GONE], "a")).action is None
    assert decide(seen([A, voter("b", LOST_S + 1), GONE], "a")).action is None


def test_one_learner_at_a_time_is_promoted_or_given_up() -> None:
    assert decide(seen([A, B, learner("d")], "abd")).action == Promote(member="id-d")
    assert decide(seen([A, B, learner("d")], "abd", leads=False)).action is None
    assert decide(seen([A, learner("d")], "abd", me="b", leads=False)).action is None
    assert decide(seen([A, B, learner("", 1.0)], "abd")).action is None
    assert decide(seen([A, B, learner("", LEARN_S)], "abd")).action == Remove(member="id-")
    assert decide(seen([A, B, learner("d", LOST_S)], "ab")).action == Remove(member="id-d")
    assert decide(seen([A, B, C, learner("d")], "abcd")).action == Remove(member="id-d")


def test_named_hosts_come_in_first_and_no_more_than_three_or_than_there_are_nodes() -> None:
    assert decide(seen([A], "adb", me="b", leads=False)).action == AddMe()
    assert decide(seen([A], "adb", me="d", leads=False)).action is None
    assert decide(seen([A, B, C], "abcd", me="d", leads=False)).action is None
    assert decide(seen([A], "a")).action is None
    assert decide(seen([A, B], "xyz", me="a")).reason == "another node is to become a member"


def test_data_is_kept_only_where_the_others_do_not_work_without_it() -> None:
    assert keeps_data(EndedEtcd(others_work=False))
    assert not keeps_data(EndedEtcd(others_work=True))


def test_what_a_loss_means_is_said_for_each_size() -> None:
    assert meaning(1).startswith("one etcd member")
    assert "parks" in meaning(2)
    assert "survived" in meaning(3)
