"""What every implementation of the store port must do. A new one is added to IMPLEMENTATIONS."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.port import Broken, Change, LeaseLostError, MemoryStore, Store
from elastrain.launcher.store.sealed import SealedStore

WAIT_S = 5.0


def memory(_: pytest.FixtureRequest) -> Store:
    return MemoryStore()


def etcd(request: pytest.FixtureRequest) -> Store:
    server: EmbeddedEtcd = request.getfixturevalue("etcd_server")
    store = EtcdStore(EtcdConfig(endpoints=(server.endpoint,)))
    for item in store.list("").items:  # one server for all tests: each begins with an empty one
        store.commit(expect={}, delete=[item.key])
    return store


def quorum(request: pytest.FixtureRequest) -> Store:
    store = EtcdStore(request.getfixturevalue("local_quorum").config())
    for item in store.list("").items:
        store.commit(expect={}, delete=[item.key])
    return store


def sealed(_: pytest.FixtureRequest) -> Store:
    return SealedStore(MemoryStore(), secret=bytes(32))


IMPLEMENTATIONS: dict[str, Callable[[pytest.FixtureRequest], Store]] = {
    "memory": memory,
    "etcd": etcd,
    "quorum": quorum,
    "sealed": sealed,
}


@pytest.fixture(params=IMPLEMENTATIONS)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made = IMPLEMENTATIONS[request.param](request)
    yield made
    made.close()


def put(store: Store, key: str, value: bytes) -> int:
    item = store.get(key)
    revision = store.commit(expect={key: item.revision if item else 0}, put={key: value})
    assert revision is not None
    return revision


class Seen:
    """Collects what a watch reports."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Change | Broken] = queue.Queue()

    def __call__(self, change: Change | Broken) -> None:
        self._queue.put(change)

    def next(self) -> Change | Broken:
        return self._queue.get(timeout=WAIT_S)

    def pairs(self, count: int) -> list[tuple[str, bytes | None]]:
        changes = [self.next() for _ in range(count)]
        return [(change.key, change.value) for change in changes if isinstance(change, Change)]

    def empty(self) -> bool:
        return self._queue.empty()


def test_missing_key_reads_as_none(store: Store) -> None:
    assert store.get("/a") is None


def test_put_is_read_back_with_its_revision(store: Store) -> None:
    revision = put(store, "/a", b"1")
    item = store.get("/a")
    assert item is not None
    assert (item.key, item.value, item.revision) == ("/a", b"1", revision)


def test_revisions_rise_with_every_change_of_any_key(store: Store) -> None:
    revisions = [put(store, "/a", b"1"), put(store, "/b", b"1"), put(store, "/a", b"2")]
    assert revisions == sorted(set(revisions))


def test_commit_against_an_old_revision_changes_nothing(store: Store) -> None:
    old = put(store, "/a", b"1")
    put(store, "/a", b"2")
    assert store.commit(expect={"/a": old}, put={"/a": b"3", "/b": b"3"}) is None
    item = store.get("/a")
    assert item is not None
    assert (item.value, store.get("/b")) == (b"2", None)


def test_commit_that_expects_absence_fails_where_the_key_exists(store: Store) -> None:
    put(store, "/a", b"1")
    assert store.commit(expect={"/a": 0}, put={"/a": b"2"}) is None


def test_every_expectation_must_hold(store: Store) -> None:
    a = put(store, "/a", b"1")
    assert store.commit(expect={"/a": a, "/b": 5}, put={"/a": b"2"}) is None


def test_keys_of_one_commit_share_its_revision(store: Store) -> None:
    revision = store.commit(expect={}, put={"/a": b"1", "/b": b"2"})
    assert {item.revision for item in store.list("/").items} == {revision}


def test_of_two_racing_proposals_exactly_one_wins(store: Store) -> None:
    revision = put(store, "/view", b"0")
    outcomes: queue.Queue[int | None] = queue.Queue()
    gate = threading.Barrier(8)

    def propose(value: bytes) -> None:
        gate.wait(WAIT_S)
        outcomes.put(store.commit(expect={"/view": revision}, put={"/view": value}))

    threads = [threading.Thread(target=propose, args=(bytes([n]),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    won = [outcomes.get(timeout=WAIT_S) for _ in threads]
    assert sum(outcome is not None for outcome in won) == 1


def test_deleted_key_is_gone_and_may_be_made_anew(store: Store) -> None:
    revision = put(store, "/a", b"1")
    assert store.commit(expect={"/a": revision}, delete=["/a"]) is not None
    assert store.get("/a") is None
    assert store.commit(expect={"/a": revision}, put={"/a": b"2"}) is None
    assert put(store, "/a", b"2") > revision


def test_list_gives_the_prefix_in_order_and_a_revision_to_watch_from(store: Store) -> None:
    for key in ("/job/b", "/job/a", "/jobs"):
        put(store, key, b"x")
    listing = store.list("/job/")
    assert [item.key for item in listing.items] == ["/job/a", "/job/b"]
    seen = Seen()
    store.watch("/job/", listing.revision, seen)
    put(store, "/job/c", b"y")
    assert seen.pairs(1) == [("/job/c", b"y")]


def test_watch_reports_changes_since_the_revision_in_order_and_each_once(store: Store) -> None:
    start = put(store, "/job/a", b"1")
    put(store, "/job/a", b"2")
    seen = Seen()
    store.watch("/job/", start, seen)
    revision = put(store, "/job/b", b"3")
    store.commit(expect={"/job/b": revision}, delete=["/job/b"])
    put(store, "/other", b"4")
    put(store, "/job/z", b"5")
    assert seen.pairs(4) == [("/job/a", b"2"), ("/job/b", b"3"), ("/job/b", None), ("/job/z", b"5")]
    assert seen.empty()


def test_watcher_may_write_and_all_watchers_see_one_order(store: Store) -> None:
    first, second = Seen(), Seen()

    def echo(change: Change | Broken) -> None:
        first(change)
        if isinstance(change, Change) and change.key == "/question":
            store.commit(expect={}, put={"/answer": b"42"})

    start = store.list("/").revision
    store.watch("/", start, echo)
    store.watch("/", start, second)
    put(store, "/question", b"?")
    expected = [("/question", b"?"), ("/answer", b"42")]
    assert (first.pairs(2), second.pairs(2)) == (expected, expected)


def test_cancelled_watch_is_silent(store: Store) -> None:
    seen, witness = Seen(), Seen()
    start = store.list("/").revision
    watch = store.watch("/", start, seen)
    store.watch("/", start, witness)
    watch.cancel()
    put(store, "/a", b"1")
    assert witness.pairs(1) == [("/a", b"1")]
    assert seen.empty()


def test_revoked_lease_takes_its_keys_and_watchers_see_it(store: Store) -> None:
    lease = store.grant(60)
    store.commit(expect={}, put={"/nodes/n0": b"up"}, lease=lease)
    put(store, "/view", b"v")
    seen = Seen()
    store.watch("/", store.list("/").revision, seen)
    store.revoke(lease)
    assert seen.pairs(1) == [("/nodes/n0", None)]
    assert [item.key for item in store.list("/").items] == ["/view"]
    store.revoke(lease)


def test_key_that_was_put_again_without_the_lease_outlives_it(store: Store) -> None:
    lease = store.grant(60)
    store.commit(expect={}, put={"/a": b"1"}, lease=lease)
    put(store, "/a", b"2")
    store.revoke(lease)
    assert store.get("/a") is not None


def test_lost_lease_is_refused_in_commit_and_keep_alive(store: Store) -> None:
    lease = store.grant(60)
    store.keep_alive(lease)
    store.revoke(lease)
    with pytest.raises(LeaseLostError):
        store.commit(expect={}, put={"/a": b"1"}, lease=lease)
    with pytest.raises(LeaseLostError):
        store.keep_alive(lease)
    assert store.get("/a") is None


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_memory_lease_expires_unless_kept_alive() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    kept, left = store.grant(2.0), store.grant(2.0)
    store.commit(expect={}, put={"/kept": b""}, lease=kept)
    store.commit(expect={}, put={"/left": b""}, lease=left)
    clock.now_s += 1.5
    store.keep_alive(kept)
    clock.now_s += 1.0
    assert [item.key for item in store.list("/").items] == ["/kept"]
    with pytest.raises(LeaseLostError):
        store.keep_alive(left)


def test_memory_watch_from_a_compacted_revision_says_so_and_ends() -> None:
    store = MemoryStore(history=2)
    start = put(store, "/a", b"0")
    for value in (b"1", b"2", b"3"):
        put(store, "/a", value)
    seen = Seen()
    store.watch("/", start, seen)
    assert isinstance(seen.next(), Broken)
    put(store, "/a", b"4")
    assert seen.empty()
    store.watch("/", start + 1, seen)
    assert isinstance(seen.next(), Broken)
    store.watch("/", store.list("/").revision - 2, seen)
    assert seen.pairs(2) == [("/a", b"3"), ("/a", b"4")]
