"""Lives of a job: whether another begins, and how nodes agree upon it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastrain.base.environment import job_of, scope
from elastrain.decisions.membership import first_view
from elastrain.job.world import Member
from elastrain.launcher.shared.job_values import End, Life, NodeRecord, PutCheckpoint, Roster
from elastrain.launcher.start import restarts
from elastrain.launcher.start.registration import Terms, enrol
from elastrain.launcher.start.restarts import BARREN_MAX, LifeEnd, agree, last_end, next_life
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.life_keys import OutlivedError, begin_life, life_key, read_life
from elastrain.launcher.store.port import MemoryStore, StoreUnavailableError
from elastrain.launcher.store.sealed import SealedStore

LOST = End(code=1, sentence="all holders of shard 0 are gone", lost=True)
RAISED = End(code=1, sentence="m0 and m1 raised the same exception")
TTL_S = 60.0


# ---- whether another begins


def test_a_job_that_has_lost_its_state_goes_on_from_its_newest_checkpoint() -> None:
    following = next_life(Life(), LOST, newest_step=7, first_member=5)
    assert following.life == Life(number=2, step=7, first_member=5)
    assert "life 2 begins, and reads the checkpoint of step 7" in following.reason


def test_without_a_checkpoint_it_ends_and_says_why() -> None:
    following = next_life(Life(), LOST, newest_step=None, first_member=5)
    assert following.life is None
    assert last_end(LOST, following).sentence == (
        "all holders of shard 0 are gone; there is no complete checkpoint to go back to yet"
    )


@pytest.mark.parametrize("end", [RAISED, End(code=0, sentence="finished"), End(code=143, sentence="stopped")])
def test_no_life_follows_upon_an_end_with_the_state_whole(end: End) -> None:
    following = next_life(Life(), end, newest_step=7, first_member=5)
    assert following.life is None
    assert last_end(end, following) is end


def test_lives_that_come_no_further_have_an_end_and_progress_begins_the_count_anew() -> None:
    life, begun = Life(), 0
    while (following := next_life(life, LOST, newest_step=7, first_member=0).life) is not None:
        life, begun = following, begun + 1
    assert begun == BARREN_MAX
    assert (
        "came no further than the checkpoint of step 7" in next_life(life, LOST, newest_step=7, first_member=0).reason
    )
    further = next_life(life, LOST, newest_step=8, first_member=0).life
    assert further is not None
    assert (further.step, further.barren) == (8, 0)


def test_numbers_of_members_never_fall() -> None:
    life = Life(number=2, step=3, first_member=9)
    following = next_life(life, LOST, newest_step=4, first_member=0).life
    assert following is not None
    assert following.first_member == 9


def test_a_life_has_a_name_of_its_own_and_the_first_has_the_jobs() -> None:
    assert [scope("run", life) for life in (1, 2, 3)] == ["run", "run~2", "run~3"]
    assert {job_of(scope("run", life)) for life in (1, 2, 3)} == {"run"}


# ---- in the store


@pytest.fixture
def store() -> SealedStore:
    return SealedStore(MemoryStore(), b"s" * 32)


def begun(store: SealedStore, workers: int = 2) -> JobKeys:
    """A job in its first life, with a roster."""
    keys = JobKeys(store, "j", TTL_S)
    keys.put_roster(Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=workers),)))
    return keys


def ended(life: Life, end: End = LOST, first_member: int = 2) -> LifeEnd:
    return LifeEnd(life=life, end=end, first_member=first_member)


def test_all_nodes_go_on_in_the_same_life_whatever_checkpoint_each_has_found(store: SealedStore) -> None:
    begun(store)
    first = agree(store, "j", TTL_S, ended(Life()), 7).life
    second = agree(store, "j", TTL_S, ended(Life(), first_member=9), 6).life
    assert first == second == Life(number=2, step=7, first_member=2)


def test_a_node_whose_own_disk_has_no_checkpoint_goes_on_with_the_others(store: SealedStore) -> None:
    keys = begun(store)
    late = LifeEnd(life=Life(), end=LOST, first_member=2, is_local=True)
    assert agree(store, "j", TTL_S, late, None).life is None, "nobody has put one on record"
    assert keys.put_view(first_view([Member(id="m0", node="a")])) is not None
    assert keys.put_checkpoint(PutCheckpoint(member="m0", step=7, name="life-0001-step-0000000007", life=1)) == ""
    following = agree(store, "j", TTL_S, late, None).life
    assert following is not None and (following.number, following.step) == (2, 7)
    # That life is lost before it has written one.
    again = LifeEnd(life=following, end=LOST, first_member=4, is_local=True)
    third = agree(store, "j", TTL_S, again, None).life
    assert third is not None and (third.number, third.step, third.barren) == (3, 7, 1)


def test_the_counter_knows_of_members_that_an_agent_has_never_met(store: SealedStore) -> None:
    keys = begun(store)
    assert keys.take_member(at_least=0) == 2
    following = agree(store, "j", TTL_S, ended(Life(), first_member=2), 7).life
    assert following is not None
    assert following.first_member == 3


def test_a_node_that_heard_nothing_of_the_end_goes_on_in_the_life_that_stands(store: SealedStore) -> None:
    begun(store)
    agree(store, "j", TTL_S, ended(Life()), 7)
    cut_off = End(code=1, sentence="the job has ended while this node could not be reached", everywhere=False)
    assert agree(store, "j", TTL_S, ended(Life(), cut_off), None).life == Life(number=2, step=7, first_member=2)


def test_a_node_that_ends_alone_begins_no_life(store: SealedStore) -> None:
    begun(store)
    alone = End(code=1, sentence="no worker is left on this node; 2 elsewhere go on", everywhere=False)
    assert agree(store, "j", TTL_S, ended(Life(), alone), 7).life is None
    assert read_life(store, "j")[1] == Life()


def test_whoever_comes_or_comes_back_enters_the_life_that_stands(store: SealedStore) -> None:
    begun(store)
    agree(store, "j", TTL_S, ended(Life()), 7)
    life = read_life(store, "j")[1]
    keys = JobKeys(store, scope("j", life.number), TTL_S)
    assert enrol(keys, store, "j", "b", Terms(nodes="1:2", script="train.py", layout="shared")) > 0
    assert life.number == 2


def test_what_an_older_life_still_writes_is_not_read_in_a_later_one(store: SealedStore) -> None:
    zombie = begun(store)
    following = agree(store, "j", TTL_S, ended(Life()), 7).life
    assert following is not None
    roster = Roster(nodes=(NodeRecord(name="b", incarnation=1, workers=1),), first_member=following.first_member)
    assert JobKeys(store, "j~2", TTL_S).put_roster(roster) == roster
    with pytest.raises(OutlivedError):  # whoever has come to a store that had forgotten the life
        begun(store)
    zombie.put_once("roster", {})
    zombie.put_once("end", {})
    assert JobKeys(store, "j~2", TTL_S).put_roster(replace(roster, first_member=0)) == roster
    assert JobKeys(store, "j~2", TTL_S).take_member(at_least=0) == following.first_member + 1


def test_the_last_node_of_an_older_life_leaves_the_keys_of_the_job_that_goes_on(store: SealedStore) -> None:
    keys = begun(store)
    following = agree(store, "j", TTL_S, ended(Life()), 7).life
    assert keys.remove_all()
    assert read_life(store, "j")[1] == following
    last = JobKeys(store, "j~2", TTL_S)
    assert last.remove_all()
    assert store.get(life_key("j")) is None


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_number_that_is_taken_as_the_next_life_begins_is_not_given_there_too(
    store: SealedStore, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    old, real, taken = begun(store), restarts.begin_life, list[int]()

    def begin(*given: Any) -> Life | None:
        if is_first and not taken:
            taken.append(old.take_member(at_least=0))
        return real(*given)

    monkeypatch.setattr(restarts, "begin_life", begin)
    following = agree(store, "j", TTL_S, ended(Life()), 7).life
    assert following is not None
    if not is_first:
        with pytest.raises(StoreUnavailableError):
            old.take_member(at_least=0)
    assert following.first_member > max(taken, default=0)


def test_a_number_is_not_taken_in_a_life_that_ends_between_two_looks(
    store: SealedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, real = begun(store), JobKeys._roster
    store.commit(expect={}, put={old.node("other"): b"{}"})  # that life's keys are there as long as one of its nodes

    def end(keys: JobKeys) -> Roster | None:
        monkeypatch.undo()
        assert agree(store, "j", TTL_S, ended(Life()), 7).life is not None
        return real(keys)

    monkeypatch.setattr(JobKeys, "_roster", end)
    with pytest.raises(StoreUnavailableError):
        old.take_member(at_least=0)


def test_a_life_that_stands_is_not_begun_again(store: SealedStore) -> None:
    later = Life(number=3, step=9)
    assert begin_life(store, "j", later, None) == later
    assert begin_life(store, "j", Life(number=3, step=5), None) == later
    assert begin_life(store, "j", Life(number=2, step=5), None) == later
