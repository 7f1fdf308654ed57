"""A job's keys over every store: they lie under one lease of the job's, and go when nobody keeps it alive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastrain.job.world import Member, View
from elastrain.launcher.shared.job_values import NodeRecord, Roster
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.first_commit import put_due
from elastrain.launcher.store.job_keys import JobKeys, encode_view
from elastrain.launcher.store.port import LeaseLostError, MemoryStore, Store, StoreUnavailableError
from tests.contract.launcher.test_store import IMPLEMENTATIONS, Clock, Seen

TTL_S = 600.0


@pytest.fixture(params=IMPLEMENTATIONS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made = IMPLEMENTATIONS[request.param](request)
    yield made
    made.close()


def view(generation: int) -> View:
    members = (Member(id="m0", node="a", address="tcp:a:1"),)
    return View(generation=generation, members=members, reason="r")


def roster() -> Roster:
    return Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),))


def write_all(keys: JobKeys) -> None:
    keys.put_once("job", {"nodes": "1:2"})
    keys.take_number("incarnations", at_least=1)
    keys.put_roster(roster())
    keys.put_spec({"seed": 0})
    keys.put_view(view(1))
    keys.put_once("end", {"code": 0})
    keys.put_once("left/1", {})


def names(store: Store) -> list[str]:
    return [item.key.removeprefix("/elastrain/j/") for item in store.list("/elastrain/").items]


def test_all_keys_of_a_job_go_with_its_lease(store: Store) -> None:
    keys = JobKeys(store, "j", TTL_S)
    write_all(keys)
    assert names(store) == ["end", "incarnations", "job", "lease", "left/1", "members", "roster", "spec", "view"]
    lease = keys.lease()
    assert lease is not None
    store.revoke(lease)
    assert names(store) == []


def test_agents_share_one_lease_and_each_keeps_it_alive(store: Store) -> None:
    one, two = JobKeys(store, "j", TTL_S), JobKeys(store, "j", TTL_S)
    one.put_view(view(1))
    two.put_view(view(2))
    assert one.lease() == two.lease()
    three = JobKeys(store, "j", TTL_S)
    three.keep()
    assert three.lease() == one.lease()


def test_lost_lease_is_replaced_by_whoever_writes_next_and_the_others_follow(store: Store) -> None:
    one, two = JobKeys(store, "j", TTL_S), JobKeys(store, "j", TTL_S)
    one.put_view(view(1))
    two.put_spec({"seed": 0})
    lost = one.lease()
    assert lost is not None
    store.revoke(lost)
    one.keep()
    assert names(store) == []  # an agent that merely keeps it alive makes no keys
    assert two.put_view(view(2)) is None  # the view that it follows upon is not there: the job may be over
    two.put_view_again(view(1))
    one.put_spec({"seed": 0})
    assert one.lease() == two.lease() != lost
    assert names(store) == ["lease", "spec", "view"]


def test_last_agent_takes_keys_and_lease_along(store: Store) -> None:
    keys = JobKeys(store, "j", TTL_S)
    write_all(keys)
    lease = keys.lease()
    assert lease is not None
    assert JobKeys(store, "j", TTL_S).remove_all()
    assert names(store) == ["/elastrain/.ended/j"], "how it ended, for a while"
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease)


def test_keys_stay_while_a_node_of_the_job_may_only_sleep(store: Store) -> None:
    keys, roster = JobKeys(store, "j", TTL_S), Roster(nodes=tuple(node(name) for name in (1, 2)))
    keys.put_roster(roster)
    keys.put_once("gone/1", {})
    assert not keys.remove_all(), "before the first view, one that the roster names"
    members = [Member(id=f"m{n}", node=f"n{n}", address="", incarnation=n) for n in (2, 3)]
    keys.put_view(View(generation=1, members=tuple(members), reason="r"))
    keys.put_once("left/2", {})
    assert not keys.remove_all(), "one with a member in the view"
    keys.put_once("gone/3", {})
    assert keys.remove_all()


def test_a_job_is_not_ended_while_a_node_of_its_view_has_a_key_that_the_proposer_has_not_seen(store: Store) -> None:
    keys, end = JobKeys(store, "j", TTL_S), View(generation=2, members=(), reason="r")
    keys.put_view(view(1))
    store.commit(expect={}, put={keys.node("a"): b"back"})
    assert keys.put_view(end, set()) is None
    assert keys.newest_view()[1] == view(1)
    assert keys.put_view(end, {keys.node("a")}) == end, "what was seen is the proposer's to judge"


def test_a_job_is_not_begun_anew_where_a_first_commit_is_due_that_the_proposer_has_not_seen(store: Store) -> None:
    keys = JobKeys(store, "j", TTL_S)
    keys.put_view(view(1))
    put_due(keys, view(1))
    others = (Member(id="m1", node="b", address="tcp:b:1"),)
    anew = View(generation=2, members=others, reason="r")
    assert keys.put_view(anew, set()) is None
    assert keys.put_view(anew, {keys.prefix + "due"}) == anew, "what was seen is the proposer's to judge"
    both = View(generation=3, members=(*others, *view(1).members), reason="r")
    assert keys.put_view(both, set()) == both, "who has been there knows what was committed"


def test_first_commit_is_due_only_while_the_view_stands(store: Store) -> None:
    keys = JobKeys(store, "j", TTL_S)
    keys.put_view(view(1))
    keys.put_view(view(2))
    for stale in (None, view(1)):
        with pytest.raises(StoreUnavailableError):
            put_due(keys, stale)
    assert store.get(keys.prefix + "due") is None
    for _ in range(2):
        put_due(keys, view(2))
    assert store.get(keys.prefix + "due") is not None


class Unwatched(MemoryStore):
    """Another view is put between the look for the one that stands and the transaction."""

    def commit(self, *, expect: Mapping[str, int], put: Mapping[str, bytes] | None = None, **more: Any) -> int | None:
        if put is not None and "/elastrain/j/due" in put and self.item == 0:
            self.item = 1
            super().commit(expect={}, put={"/elastrain/j/view": encode_view(view(2))})
        return super().commit(expect=expect, put=put or {}, **more)

    item = 0


def test_a_view_that_is_put_meanwhile_makes_no_first_commit_due() -> None:
    store = Unwatched()
    keys = JobKeys(store, "j", TTL_S)
    keys.put_view(view(1))
    with pytest.raises(StoreUnavailableError):
        put_due(keys, view(1))
    assert store.get(keys.prefix + "due") is None


def test_keys_of_a_job_that_has_ended_go_whoever_sleeps(store: Store) -> None:
    keys = JobKeys(store, "j", TTL_S)
    keys.put_roster(Roster(nodes=(node(1), node(2))))
    keys.put_once("end", {"code": 0, "sentence": "finished", "detail": "", "lost": False})
    assert keys.remove_all()


def node(incarnation: int) -> NodeRecord:
    return NodeRecord(name=f"n{incarnation}", incarnation=incarnation, workers=1)


class Overtaken(MemoryStore):
    """Another agent takes the job's lease between this one's look and its commit."""

    def grant(self, ttl_s: float) -> int:
        lease = super().grant(ttl_s)
        if lease == 1:
            JobKeys(self, "j", TTL_S).put_spec({"seed": 0})
        return lease


def test_of_two_agents_that_take_a_lease_at_once_the_slower_gives_its_own_back() -> None:
    store = Overtaken()
    keys = JobKeys(store, "j", TTL_S)
    keys.put_view(view(1))
    assert (keys.lease(), names(store)) == (2, ["lease", "spec", "view"])
    with pytest.raises(LeaseLostError):
        store.keep_alive(1)


def test_keys_outlive_their_last_agent_by_their_time_to_live() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    keys = JobKeys(store, "j", TTL_S)
    keys.put_view(view(1))
    for _ in range(3):
        clock.now_s += 0.9 * TTL_S
        keys.keep()
    assert names(store) == ["lease", "view"]
    clock.now_s += 1.1 * TTL_S
    assert names(store) == []


def test_etcd_itself_forgets_a_job_whose_agents_are_gone(request: pytest.FixtureRequest) -> None:
    store = IMPLEMENTATIONS["etcd"](request)
    assert isinstance(store, EtcdStore)
    gone = Seen()
    store.watch("/elastrain/j/view", store.list("/elastrain/").revision, gone)
    write_all(JobKeys(store, "j", 1.0))
    assert gone.pairs(2)[1] == ("/elastrain/j/view", None)
    assert names(store) == []
    store.close()


def test_keys_without_a_time_to_live_have_no_lease(store: Store) -> None:
    keys = JobKeys(store, "j")
    keys.put_view(view(1))
    keys.keep()
    assert (keys.lease(), names(store)) == (None, ["view"])


def test_nothing_of_a_job_is_put_among_the_keys_of_another_that_has_begun_in_an_empty_store(store: Store) -> None:
    keys, mine = JobKeys(store, "j", TTL_S), roster()
    keys.put_roster(replace(mine, first_member=7))
    keys.put_view(view(1))
    assert keys.put_next_view(view(2), mine) is None
    assert keys.put_view_again(view(5), mine) == view(5)
    assert keys.put_view(view(1)) == view(1), "the other job's view stands"
    with pytest.raises(StoreUnavailableError, match="roster is not in the store"):
        keys.take_member(at_least=0, roster=mine)
    assert keys.put_next_view(view(2), replace(mine, first_member=7)) == view(2)


def test_no_first_view_is_put_where_the_last_node_takes_the_keys_along_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, look = JobKeys(store, "j", TTL_S), JobKeys.newest_view
    keys.put_roster(roster())

    def late(asked: JobKeys) -> tuple[int, View | None]:
        store.commit(expect={}, delete=[keys.prefix + "roster", keys.prefix + "members"])
        return look(asked)

    monkeypatch.setattr(JobKeys, "newest_view", late)
    assert keys.put_next_view(view(1), roster()) is None
    assert "view" not in names(store)
