"""How an agent leaves the store: what it says last is there before its own key goes."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from msgspec.structs import asdict

from elastrain.base.environment import scope
from elastrain.job.world import Member, View
from elastrain.launcher.shared.job_values import Life, NodeRecord, Roster
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.store import presence, registry
from elastrain.launcher.store.first_commit import FirstCommit
from elastrain.launcher.store.job_keys import JobKeys, encode_roster
from elastrain.launcher.store.life_keys import begin_life, life_key, read_life
from elastrain.launcher.store.port import Broken, Change, Listing, Store, Watch
from elastrain.launcher.store.registry import RegistryEvents, SharedRegistry
from elastrain.launcher.store.standing_keys import News
from elastrain.launcher.store.store_thread import Inbox
from elastrain.launcher.store.tombstones import epitaph, read_ended
from tests.contract.launcher.test_store import IMPLEMENTATIONS

WAIT_S = 10.0
PREFIX = "/elastrain/j/"
FIRST = Life()
VIEW = View(generation=1, members=(Member(id="m0", node="a", address="unix:a"),), reason="first")


class Slow:
    """A store whose commits under one key take their time."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def close(self) -> None:
        """The watcher goes on with it."""

    def commit(self, **transaction: object) -> int | None:
        if self._key in str(transaction.get("put")):
            time.sleep(0.3)
        return self._store.commit(**transaction)  # type: ignore[arg-type]


class Forgetful:
    """A store that has lost its data once `forget` was called, as far as lists and watches tell."""

    def __init__(self, store: Store) -> None:
        self._store, self._is_empty = store, False
        self._on_change: Callable[[Change | Broken], None] = lambda _: None

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def list(self, prefix: str) -> Listing:
        return Listing(items=(), revision=1) if self._is_empty else self._store.list(prefix)

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> Watch:
        self._on_change = on_change
        return self._store.watch(prefix, after_revision, lambda change: None if self._is_empty else on_change(change))

    def forget(self, *, delete: Sequence[str], put: Mapping[str, bytes]) -> None:
        self._is_empty = True
        self._store.commit(expect={}, delete=delete, put=put)
        self._on_change(Broken(reason="started again"))


class Agent:
    """A registry, and the news that it has brought."""

    def __init__(self, store: Store, name: str, incarnation: int, life: Life = FIRST) -> None:
        self.inbox, self.news = Inbox(), list[News]()
        ignore: Callable[[object], None] = lambda _: None  # noqa: E731
        events = RegistryEvents(on_news=self.news.append, on_trouble=ignore, on_away=ignore)
        self.registry = SharedRegistry(store, scope("j", life.number), self.inbox, events, life=life, key_ttl_s=60.0)
        self.registry.put_record(NodeRecord(name=name, incarnation=incarnation, workers=1))

    def until(self, true: Callable[[News], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not any(true(news) for news in self.news):
            assert time.monotonic() < deadline_s
            select.select([self.inbox.fd], [], [], 0.1)
            self.inbox.deliver()


@pytest.fixture(params=["memory", "etcd", "quorum"])
def store(request: pytest.FixtureRequest) -> Store:
    return IMPLEMENTATIONS[request.param](request)


@pytest.fixture
def watcher(store: Store) -> Iterator[Agent]:
    made = Agent(store, "watcher", 1)
    yield made
    made.registry.close()
    made.inbox.close()


SAYS: list[tuple[str, Callable[[SharedRegistry], None], Callable[[News], bool]]] = [
    ("left", lambda leaver: leaver.put_left(2, is_done=True), lambda news: news.left == {2}),
    ("end", lambda leaver: leaver.put_end(Over(code=0, sentence="done")), lambda news: news.end is not None),
]


@pytest.mark.parametrize(("key", "say", "known"), SAYS, ids=[key for key, _, _ in SAYS])
def test_how_a_node_ended_is_known_when_its_key_goes(
    store: Store,
    watcher: Agent,
    key: str,
    say: Callable[[SharedRegistry], None],
    known: Callable[[News], bool],
) -> None:
    leaver = Agent(Slow(store, f"/j/{key}"), "leaver", 2)  # type: ignore[arg-type]
    watcher.until(lambda news: "leaver" in news.nodes)
    watcher.news.clear()
    say(leaver.registry)
    leaver.registry.close(answering={"watcher": 1})
    watcher.until(lambda news: "leaver" not in news.nodes)
    assert all(known(news) for news in watcher.news if "leaver" not in news.nodes)


def test_number_is_not_given_twice_by_a_store_that_has_forgotten(store: Store, watcher: Agent) -> None:
    taken: list[int] = []
    watcher.registry.put_roster(Roster(nodes=(NodeRecord(name="watcher", incarnation=1, workers=1),)), lambda _: None)
    watcher.registry.take_number(5, taken.append)
    watcher.until(lambda news: taken == [5])
    store.commit(expect={}, delete=[PREFIX + "members"])
    watcher.until(lambda news: store.get(PREFIX + "members") is not None)
    other = Agent(Slow(store, "nothing"), "other", 2)  # type: ignore[arg-type]
    other.registry.take_number(0, taken.append)
    other.until(lambda news: len(taken) == 2)
    assert taken == [5, 6]
    other.registry.close(answering={"watcher": 1})
    other.inbox.close()


def test_first_commit_is_known_to_all_and_said_again_to_a_store_that_has_forgotten(
    store: Store, watcher: Agent
) -> None:
    watcher.registry.put_begun()
    watcher.until(lambda news: news.first_commit is FirstCommit.MADE)
    store.commit(expect={}, delete=[PREFIX + "begun"])
    watcher.until(lambda news: store.get(PREFIX + "begun") is not None)


def test_a_first_commit_that_is_due_is_known_to_all_and_said_again_to_a_store_that_has_forgotten(
    store: Store, watcher: Agent
) -> None:
    watcher.registry.put_roster(Roster(nodes=(NodeRecord(name="watcher", incarnation=1, workers=1),)), lambda _: None)
    watcher.until(lambda news: news.roster is not None)
    watcher.registry.propose(VIEW, lambda _: None)
    watcher.until(lambda news: news.view == VIEW)
    watcher.registry.put_due()
    watcher.until(lambda news: news.first_commit is FirstCommit.DUE)
    assert next(news.view for news in watcher.news if news.first_commit is FirstCommit.DUE) == VIEW
    store.commit(expect={}, delete=[PREFIX + "due"])
    watcher.until(lambda news: store.get(PREFIX + "due") is not None)


class LosesWhatIsDue(Slow):
    """A store that loses that the first commit is due, once, before it tells anybody."""

    lost = untold = 0

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> Watch:
        def tell(change: Change | Broken) -> None:
            if PREFIX + "due" in str(change) and self.untold < 2:  # that it came, and that it went
                self.untold += 1
            else:
                on_change(change)

        return self._store.watch(prefix, after_revision, tell)

    def commit(self, **transaction: object) -> int | None:
        revision = super().commit(**transaction)
        if PREFIX + "due" in str(transaction.get("put")) and not self.lost:
            self.lost = 1
            self._store.commit(expect={}, delete=[PREFIX + "due"])
        return revision


def test_a_first_commit_that_is_due_is_put_again_where_the_store_has_lost_it_at_once(store: Store) -> None:
    losing = LosesWhatIsDue(store, "nothing")
    agent = Agent(losing, "a", 1)  # type: ignore[arg-type]
    agent.registry.put_roster(Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),)), lambda _: None)
    agent.until(lambda news: news.roster is not None)
    agent.registry.propose(VIEW, lambda _: None)
    agent.until(lambda news: news.view == VIEW)
    agent.registry.put_due()
    agent.until(lambda news: losing.lost == 1 and news.first_commit is FirstCommit.DUE)
    agent.registry.close()
    agent.inbox.close()


def test_life_that_stands_is_said_again_to_a_store_that_has_forgotten(store: Store) -> None:
    life = Life(number=3, step=9, first_member=7, barren=1)
    begin_life(store, "j", life, None)
    # With what this node would have started it from, which is no other node's business.
    agent = Agent(store, "a", 1, replace(life, start="the job goes on after step 9", named="checkpoints/1-9"))
    roster = Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),), first_member=7)
    agent.registry.put_roster(roster, lambda _: None)
    agent.until(lambda news: news.roster == roster)
    store.commit(expect={}, delete=[life_key("j"), "/elastrain/j~3/roster"])
    agent.until(lambda news: news.removed)
    agent.registry.put_roster(roster, lambda _: None)  # most of its nodes are here, says the core
    agent.until(lambda news: store.get("/elastrain/j~3/roster") is not None)
    assert read_life(store, "j")[1] == life
    agent.registry.close()
    agent.inbox.close()


def test_first_roster_is_not_put_into_a_store_that_has_forgotten_the_nodes_it_names(store: Store) -> None:
    """It may have forgotten another roster with them, by which workers are running."""
    node = Agent(store, "a", 1)
    node.until(lambda news: "a" in news.nodes)
    roster = Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),))
    stands: list[Roster | None] = []
    there = store.get(PREFIX + "nodes/a")
    assert there is not None
    store.commit(expect={}, put={PREFIX + "nodes/a": there.value})
    node.news.clear()
    node.registry.put_roster(roster, stands.append)
    node.until(lambda _: bool(stands))  # and has heard of the change
    assert stands == [None]
    assert store.get(PREFIX + "roster") is None
    node.registry.put_roster(roster, stands.append)  # by what it has heard since
    node.until(lambda _: stands == [None, roster])
    node.registry.close()
    node.inbox.close()


def test_a_roster_that_stands_was_not_put_again(store: Store) -> None:
    """A node may hear of the first one while its own proposal is on the way."""
    roster = Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),))
    JobKeys(store, "j", 60.0).put_roster(roster)
    stands: list[Roster | None] = []
    node = Agent(store, "a", 1)
    node.until(lambda news: news.roster == roster)
    node.registry.put_roster(roster, stands.append)
    node.until(lambda _: stands == [roster])
    assert store.get(PREFIX + "restored") is None
    store.commit(expect={}, delete=[PREFIX + "roster"])
    node.registry.put_roster(roster, stands.append)
    node.until(lambda _: stands == [roster, roster])
    assert store.get(PREFIX + "restored") is not None
    node.registry.close()
    node.inbox.close()


def test_who_reads_that_the_roster_was_put_again_takes_no_number_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node may know of higher ones, and has not put them again yet."""
    keys, taken = JobKeys(store, "j", 60.0), list[int]()
    keys.put_once("restored", {})
    keys.put_roster(Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),)))
    monkeypatch.setattr(registry, "LEASE_S", 0.5)
    late = Agent(store, "late", 2)

    def has_taken(_: News) -> bool:
        late.registry.on_tick(time.monotonic())
        return bool(taken)

    late.until(lambda news: news.restored)
    late.registry.take_number(0, taken.append)
    time.sleep(0.3)  # long enough for a call that does not wait
    keys.raise_number("members", 7)
    late.until(has_taken)
    assert taken == [7]
    late.registry.close()
    late.inbox.close()


def test_absence_proves_nothing_to_a_node_whose_own_key_has_gone_with_it(store: Store, watcher: Agent) -> None:
    """The call that keeps it alive may still wait for an answer when the news come."""
    other = Agent(Slow(store, "nothing"), "other", 2)  # type: ignore[arg-type]
    watcher.until(lambda news: {"watcher", "other"} <= news.nodes.keys())
    watcher.news.clear()
    store.commit(expect={}, delete=[PREFIX + "nodes/other"])
    watcher.until(lambda news: "other" not in news.nodes)
    assert watcher.news[-1].absence_counts
    watcher.news.clear()
    store.commit(expect={}, delete=[PREFIX + "nodes/watcher"])
    watcher.until(lambda news: "watcher" not in news.nodes)
    assert not any(news.absence_counts for news in watcher.news)
    other.registry.close(answering={"watcher": 1})
    other.inbox.close()


def test_node_that_came_while_the_life_was_forgotten_does_not_begin_the_job_anew(store: Store) -> None:
    late = Agent(store, "late", 1)
    late.until(lambda news: "late" in news.nodes)
    begin_life(store, "j", Life(number=3, step=9), None)
    stands: list[Roster | None] = []
    late.registry.put_roster(Roster(nodes=(NodeRecord(name="late", incarnation=1, workers=1),)), stands.append)
    late.until(lambda news: news.removed)
    assert not stands
    assert store.get(PREFIX + "roster") is None
    late.registry.close()
    late.inbox.close()


@pytest.mark.parametrize("has_ended", [True, False])
def test_job_that_has_ended_since_the_store_lost_its_data_is_not_put_again(store: Store, has_ended: bool) -> None:
    """The others have put it again, done the work and gone, while this node was cut off from them and the store."""
    roster = Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),))
    forgetful = Forgetful(store)
    agent = Agent(forgetful, "a", 1)  # type: ignore[arg-type]
    agent.registry.put_roster(roster, lambda _: None)
    agent.until(lambda news: news.roster == roster)
    agent.news.clear()
    over = Over(code=0, sentence="finished after step 7")
    told = epitaph("j", {"end": json.dumps(asdict(over)).encode(), "roster": encode_roster(roster)})
    forgetful.forget(delete=[PREFIX + "roster"], put=told if has_ended else {})
    if has_ended:
        agent.until(lambda news: news.removed and news.end == over)
        # What was on its way before the loss has the roster.
        assert all(news.end == over for news in agent.news if news.roster is None)
    else:
        agent.until(lambda news: store.get(PREFIX + "roster") is not None)
        assert not any(news.removed for news in agent.news)
    assert (store.get(PREFIX + "restored") is None) == has_ended
    agent.registry.close()
    agent.inbox.close()


def test_view_that_another_agent_has_told_is_put_again_where_the_store_has_lost_it(store: Store) -> None:
    """It had stood while this node did not reach the store: what it knew from there was an older one."""
    keys = JobKeys(store, "j", 60.0)
    first = VIEW
    told = View(generation=2, members=first.members, reason="told")
    roster = Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=1),))
    keys.put_roster(roster)
    agent = Agent(store, "a", 1)
    agent.registry.remember(told)
    agent.until(lambda news: news.roster == roster)
    assert not any(news.removed for news in agent.news), "nothing was lost yet"
    keys.put_view(first)
    keys.put_once("restored", {})
    agent.until(lambda news: news.view == first and news.restored)
    agent.registry.remember(told)
    agent.until(lambda news: news.view == told)
    agent.registry.close()
    agent.inbox.close()


@pytest.mark.parametrize("left", [None, {"life": 1, "step": 3}])
def test_newest_checkpoint_is_said_again_to_a_store_that_has_forgotten_it_or_remembers_an_older_one(
    store: Store, watcher: Agent, left: dict[str, int] | None
) -> None:
    key, keys, newest = PREFIX + "checkpoint", JobKeys(store, "j"), {"life": 1, "step": 7}
    keys.put_once("checkpoint", newest)
    watcher.until(lambda news: watcher.registry._standing._checkpoint == newest)
    store.commit(expect={}, delete=[key])
    if left is not None:
        store.commit(expect={}, put={key: json.dumps(left).encode()})
    watcher.until(lambda news: (there := store.get(key)) is not None and keys.read(there) == newest)


def test_node_that_leaves_right_after_an_outage_does_not_take_the_keys_of_others_that_answer(store: Store) -> None:
    leaver = Agent(Slow(store, "nothing"), "leaver", 1)  # type: ignore[arg-type]
    leaver.registry.put_begun()
    leaver.until(lambda news: news.first_commit is FirstCommit.MADE)
    leaver.registry._on_presence(presence.Lapsed())  # so the keys of the others may have lapsed, too
    leaver.registry.close(answering={"other": 2})
    assert store.get(PREFIX + "begun") is not None
    leaver.inbox.close()


@pytest.mark.parametrize("has_said_that_it_goes", [False, True])
def test_node_that_leaves_takes_no_keys_of_one_that_answers_and_is_only_cut_off_from_the_store(
    store: Store, has_said_that_it_goes: bool
) -> None:
    other = Agent(Slow(store, "nothing"), "other", 2)  # type: ignore[arg-type]
    leaver = Agent(Slow(store, "nothing"), "leaver", 1)  # type: ignore[arg-type]
    leaver.registry.put_begun()
    leaver.until(lambda news: news.first_commit is FirstCommit.MADE and "other" in news.nodes)
    if has_said_that_it_goes:
        other.registry.put_left(2, is_done=False)
        leaver.until(lambda _: store.get(PREFIX + "gone/2") is not None)
    assert other.registry._presence is not None
    other.registry._presence.close(1.0)  # its lease is gone
    leaver.registry.put_left(1, is_done=False)
    leaver.registry.close(answering={"other": 2})
    assert (store.get(PREFIX + "begun") is None) is has_said_that_it_goes
    other.registry.close(answering={})
    leaver.inbox.close()
    other.inbox.close()


def test_who_was_away_when_the_last_node_took_the_keys_along_reads_how_the_job_ended(store: Store) -> None:
    last, away = Agent(Slow(store, "nothing"), "last", 1), Agent(Slow(store, "nothing"), "away", 2)  # type: ignore[arg-type]
    last.registry.put_roster(Roster(nodes=(NodeRecord(name="last", incarnation=1, workers=1),)), lambda _: None)
    last.registry.take_number(0, lambda _: None)
    away.until(lambda news: news.roster is not None and "last" in news.nodes)
    JobKeys(store, "j").raise_number("incarnations", 2)
    away.until(lambda news: away.registry._standing._used.get("incarnations", 0) == 2)
    assert away.registry._presence is not None
    away.registry._presence.close(1.0)  # its lease is gone
    last.registry.put_end(Over(code=0, sentence="done"))
    last.registry.close(answering={})
    away.until(lambda news: news.removed)
    removed = next(news for news in away.news if news.removed)
    assert removed.end == Over(code=0, sentence="done")
    another = Roster(nodes=(NodeRecord(name="last", incarnation=7, workers=1),))
    assert read_ended(store, "j", another) is None, "a later job of the same name"
    for agent in (last, away):
        agent.inbox.close()


def test_who_was_away_sees_that_the_job_is_gone_though_another_counts_its_starts_by_now(
    store: Store, watcher: Agent
) -> None:
    roster = Roster(nodes=(NodeRecord(name="last", incarnation=1, workers=1),))
    watcher.registry.put_roster(roster, lambda _: None)
    watcher.until(lambda news: news.roster == roster)
    told = epitaph("j", {"end": b'{"code": 0, "sentence": "done"}', "roster": encode_roster(roster)})
    store.commit(expect={}, put={PREFIX + "incarnations": b"9", **told}, delete=[PREFIX + "roster"])
    watcher.until(lambda news: news.removed)
    removed = next(news for news in watcher.news if news.removed)
    assert removed.end == Over(code=0, sentence="done")
