"""Stores behind threads: answers through an inbox, followed prefixes, presence. No network here."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from elastrain.launcher.store.port import (
    Broken,
    Change,
    ForgedValueError,
    Item,
    Listing,
    MemoryStore,
    StoreError,
    StoreUnavailableError,
    Watch,
)
from elastrain.launcher.store.presence import Lapsed, Presence, Present, Report, Taken, Unreachable
from elastrain.launcher.store.sealed import SealedStore
from elastrain.launcher.store.store_thread import Followed, Inbox, StoreThread

WAIT_S = 5.0
TTL_S = 0.15
"""Of presences under test: they beat three times within it. The memory store's clock does not run by itself here."""


class UnsteadyStore(MemoryStore):
    """A store that can be made silent, that can lose answers, and whose watches can be broken."""

    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)
        self.silent = False
        self.loses_next_answer = False
        self._broken: list[Callable[[Change | Broken], None]] = []
        self._watched = threading.Event()

    def list(self, prefix: str) -> Listing:
        self._answer()
        return super().list(prefix)

    def keep_alive(self, lease: int) -> None:
        self._answer()
        super().keep_alive(lease)

    def commit(
        self,
        *,
        expect: Mapping[str, int],
        put: Mapping[str, bytes] | None = None,
        delete: Sequence[str] = (),
        lease: int | None = None,
    ) -> int | None:
        self._answer()
        revision = super().commit(expect=expect, put=put, delete=delete, lease=lease)
        if self.loses_next_answer:
            self.loses_next_answer = False
            raise StoreUnavailableError("the answer was lost")
        return revision

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> Watch:  # type: ignore[override]
        watch = super().watch(prefix, after_revision, on_change)
        self._broken.append(on_change)
        self._watched.set()
        return watch

    def break_watches(self) -> None:
        assert self._watched.wait(WAIT_S)
        self._watched.clear()
        callbacks, self._broken = self._broken, []
        self._watches.clear()
        for on_change in callbacks:
            on_change(Broken(reason="broken by the test"))

    def _answer(self) -> None:
        if self.silent:
            raise StoreUnavailableError("silent")


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


@pytest.fixture
def store() -> UnsteadyStore:
    return UnsteadyStore()


def serve_until(inbox: Inbox, reached: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not reached():
        readable, _, _ = select.select([inbox.fd], [], [], max(0.0, until_s - time.monotonic()))
        assert readable, f"it did not arrive within {WAIT_S} s"
        inbox.deliver()


def put(store: MemoryStore, key: str, value: bytes) -> None:
    assert store.commit(expect={}, put={key: value}) is not None


# ---- calls


def test_answer_comes_through_the_inbox_in_the_caller_s_thread(inbox: Inbox, store: UnsteadyStore) -> None:
    put(store, "/a", b"1")
    answers: list[tuple[Item | StoreError | None, str]] = []
    calls = StoreThread(store, inbox)
    calls.call(lambda s: s.get("/a"), lambda answer: answers.append((answer, threading.current_thread().name)))
    serve_until(inbox, lambda: bool(answers))
    assert answers == [(store.get("/a"), threading.current_thread().name)]
    assert calls.close(WAIT_S)


def test_error_of_the_store_is_an_answer(inbox: Inbox, store: UnsteadyStore) -> None:
    store.silent = True
    answers: list[Listing | StoreError] = []
    calls = StoreThread(store, inbox)
    calls.call(lambda s: s.list("/"), answers.append)
    serve_until(inbox, lambda: bool(answers))
    assert isinstance(answers[0], StoreUnavailableError)
    assert calls.close(WAIT_S)


def test_call_that_waits_for_the_store_does_not_hold_its_caller_up(inbox: Inbox, store: UnsteadyStore) -> None:
    gate = threading.Event()
    answers: list[bool | StoreError] = []
    calls = StoreThread(store, inbox)
    calls.call(lambda s: gate.wait(WAIT_S), answers.append)
    calls.call(lambda s: True, answers.append)
    assert answers == []
    assert not calls.close(timeout_s=0.0)
    gate.set()
    serve_until(inbox, lambda: len(answers) == 2)
    assert answers == [True, True]


def test_closed_inbox_drops_what_is_posted() -> None:
    inbox = Inbox()
    inbox.close()
    inbox.post(lambda: pytest.fail("delivered after the end"))


# ---- a followed prefix


class Follower:
    def __init__(self, store: UnsteadyStore, inbox: Inbox) -> None:
        self.seen: list[dict[str, bytes]] = []
        self.troubles: list[StoreError] = []
        self.followed = Followed(store, inbox, "/job/", self._on_items, self.troubles.append)

    def _on_items(self, items: Mapping[str, Item], revision: int) -> None:
        self.seen.append({key: item.value for key, item in items.items()})


@pytest.fixture
def follower(store: UnsteadyStore, inbox: Inbox) -> Iterator[Follower]:
    put(store, "/job/a", b"1")
    made = Follower(store, inbox)
    serve_until(inbox, lambda: bool(made.seen))
    yield made
    made.followed.close()


def test_followed_prefix_is_seen_at_first_and_after_every_change(
    store: UnsteadyStore, inbox: Inbox, follower: Follower
) -> None:
    put(store, "/job/b", b"2")
    put(store, "/elsewhere", b"3")
    assert store.commit(expect={}, delete=["/job/a"]) is not None
    serve_until(inbox, lambda: len(follower.seen) == 3)
    assert follower.seen == [{"/job/a": b"1"}, {"/job/a": b"1", "/job/b": b"2"}, {"/job/b": b"2"}]


def test_prefix_is_listed_again_after_its_watch_broke_and_nothing_is_missed(
    store: UnsteadyStore, inbox: Inbox, follower: Follower
) -> None:
    store.silent = True
    store.break_watches()
    serve_until(inbox, lambda: bool(follower.troubles))
    store.silent = False
    put(store, "/job/a", b"missed")
    serve_until(inbox, lambda: follower.seen[-1] == {"/job/a": b"missed"})
    put(store, "/job/a", b"seen")
    serve_until(inbox, lambda: follower.seen[-1] == {"/job/a": b"seen"})


def test_prefix_that_is_no_longer_followed_is_not_listed_again(
    store: UnsteadyStore, inbox: Inbox, follower: Follower
) -> None:
    follower.followed.close(WAIT_S)
    put(store, "/job/a", b"2")
    store.break_watches()
    inbox.deliver()
    assert follower.seen == [{"/job/a": b"1"}]


# ---- presence


class Here:
    def __init__(self, store: MemoryStore, inbox: Inbox, value: bytes) -> None:
        self.reports: list[Report] = []
        self._inbox = inbox
        self.presence = Presence(store, inbox, "/nodes/n0", value, TTL_S, self.reports.append)

    def await_report(self, kind: type[Report]) -> Report:
        serve_until(self._inbox, lambda: any(isinstance(report, kind) for report in self.reports))
        while not isinstance(report := self.reports.pop(0), kind):
            pass
        return report


@pytest.fixture
def here(store: UnsteadyStore, inbox: Inbox) -> Iterator[Here]:
    made = Here(store, inbox, b"first")
    made.await_report(Present)
    yield made
    store.silent = False
    made.presence.close(WAIT_S)
    assert store.get("/nodes/n0") is None


def value_of(store: MemoryStore) -> bytes | None:
    item = store.get("/nodes/n0")
    return None if item is None else item.value


def test_presence_is_written_changed_and_taken_away(store: UnsteadyStore, here: Here) -> None:
    assert value_of(store) == b"first"
    here.presence.update(b"second")
    here.await_report(Present)
    assert value_of(store) == b"second"


def test_presence_whose_lease_was_lost_says_so_and_is_written_again(store: UnsteadyStore, here: Here) -> None:
    for lease in tuple(store._leases):
        store.revoke(lease)
    here.await_report(Lapsed)
    here.await_report(Present)
    assert value_of(store) == b"first"


def test_presence_whose_lease_was_lost_comes_again_with_what_is_to_be_said_then(
    store: UnsteadyStore, here: Here
) -> None:
    here.presence.after_loss(b"first, again")
    here.presence.turn()
    assert value_of(store) == b"first"
    for lease in tuple(store._leases):
        store.revoke(lease)
    here.await_report(Lapsed)
    here.await_report(Present)
    assert value_of(store) == b"first, again"


def test_presence_reports_an_outage_and_goes_on_after_it(store: UnsteadyStore, here: Here) -> None:
    store.silent = True
    here.presence.update(b"second")
    here.await_report(Unreachable)
    store.silent = False
    here.await_report(Present)
    assert value_of(store) == b"second"


def test_presence_that_has_nothing_to_write_tells_of_an_outage_and_of_its_end(store: UnsteadyStore, here: Here) -> None:
    store.silent = True
    here.await_report(Unreachable)
    store.silent = False
    assert isinstance(here.await_report(Present), Present)
    assert value_of(store) == b"first"


def test_presence_recognizes_its_own_value_after_the_answer_was_lost(store: UnsteadyStore, here: Here) -> None:
    store.loses_next_answer = True
    here.presence.update(b"second")
    here.await_report(Unreachable)
    assert isinstance(here.await_report(Present), Present)
    here.presence.update(b"third")
    here.await_report(Present)
    assert value_of(store) == b"third"


def test_second_owner_of_a_presence_waits_until_the_first_has_gone(
    store: UnsteadyStore, inbox: Inbox, here: Here
) -> None:
    second = Here(store, inbox, b"other")
    taken = second.await_report(Taken)
    assert isinstance(taken, Taken)
    assert (taken.value, value_of(store)) == (b"first", b"first")
    here.presence.close(WAIT_S)
    second.await_report(Present)
    assert value_of(store) == b"other"
    second.presence.close(WAIT_S)


# ---- sealed values


def test_value_with_another_secret_or_moved_to_another_key_is_refused() -> None:
    plain = MemoryStore()
    sealed = SealedStore(plain, secret=b"a" * 32)
    put_sealed = sealed.commit(expect={}, put={"/job/a": b"1"})
    assert put_sealed is not None
    stored = plain.get("/job/a")
    assert stored is not None
    put(plain, "/job/moved", stored.value)
    put(plain, "/job/short", b"x")
    put(plain, "/job/changed", stored.value[:-1] + b"2")
    item = sealed.get("/job/a")
    assert item is not None
    assert item.value == b"1"
    for key in ("/job/moved", "/job/short", "/job/changed"):
        with pytest.raises(ForgedValueError, match=key):
            sealed.get(key)
    with pytest.raises(ForgedValueError):
        SealedStore(plain, secret=b"b" * 32).get("/job/a")
    with pytest.raises(ForgedValueError):
        sealed.list("/job/")


def test_watch_ends_at_the_first_value_that_does_not_verify() -> None:
    plain = MemoryStore()
    sealed = SealedStore(plain, secret=b"a" * 32)
    seen: list[Change | Broken] = []
    sealed.watch("/job/", sealed.list("/job/").revision, seen.append)
    sealed.commit(expect={}, put={"/job/a": b"1"})
    put(plain, "/job/a", b"forged")
    sealed.commit(expect={}, put={"/job/a": b"2"})
    assert isinstance(seen[0], Change)
    assert seen[0].value == b"1"
    assert [type(change) for change in seen] == [Change, Broken]


def test_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        SealedStore(MemoryStore(), secret=b"short")
