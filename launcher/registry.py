"""The agent's access to the store, which never makes its loop wait: for one node inline, for several through a thread.

Calls and answers only; what is asked for, and what follows from the answer, is decided in `core`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec.structs import asdict

from elastrain.launcher.followed import Followed
from elastrain.launcher.notices import Over
from elastrain.launcher.presence import Lapsed, Presence, Report, Unreachable
from elastrain.launcher.store import Item, Store, StoreError
from elastrain.launcher.storethread import Inbox, StoreThread
from elastrain.launcher.values import NodeRecord, Roster
from elastrain.launcher.views import JobKeys, decode_roster, decode_view, encode_record
from elastrain.world import View

T = TypeVar("T")
LEASE_S = 3.0
_AGAIN_S = 0.5
_KEEP_EVERY_S = 60.0
"""At the most: the job's lease is kept alive three times within its life."""
_CLOSE_S = 3.0


class Registry(Protocol):
    """`then` is called with the answer, at once or later, in the agent's loop."""

    def propose(self, view: View, then: Callable[[View | None], None]) -> None:
        """Answers None where the store does not answer; all other calls are repeated until it does."""

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None: ...

    def put_roster(self, roster: Roster, then: Callable[[Roster], None]) -> None: ...

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None: ...

    def put_begun(self) -> None: ...

    def put_record(self, record: NodeRecord) -> None: ...

    def put_end(self, over: Over) -> None: ...

    def put_left(self, incarnation: int) -> None: ...

    def next_deadline_s(self) -> float | None: ...

    def on_tick(self, now: float) -> None: ...

    def close(self) -> None: ...


class LoneRegistry:
    """A job of one node: the store is in memory, and answers at once."""

    def __init__(self, store: Store, job: str) -> None:
        self._keys = JobKeys(store, job)

    def propose(self, view: View, then: Callable[[View | None], None]) -> None:
        then(self._keys.put_view(view))

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        then(self._keys.put_spec(spec))

    def put_roster(self, roster: Roster, then: Callable[[Roster], None]) -> None:
        then(self._keys.put_roster(roster))

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None:
        then(self._keys.take_number("members", at_least=at_least))

    def put_begun(self) -> None: ...

    def put_record(self, record: NodeRecord) -> None: ...

    def put_end(self, over: Over) -> None: ...

    def put_left(self, incarnation: int) -> None: ...

    def next_deadline_s(self) -> float | None:
        return None

    def on_tick(self, now: float) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class News:
    """What the store holds now. `absence_counts`: a node that is not there has lost its lease, by all we know."""

    nodes: Mapping[str, NodeRecord]
    terms: Mapping[str, Any] | None
    """What all nodes have agreed about before anything started."""
    roster: Roster | None
    spec: Mapping[str, Any] | None
    view: View | None
    end: Over | None
    begun: bool
    """A step has been committed."""
    left: frozenset[int]
    """The incarnations of nodes that have gone in good order."""
    removed: bool
    """There was a view, and somebody has taken it away: a store that has merely lost its data begins anew."""
    absence_counts: bool


class SharedRegistry:
    """A job of several nodes. `on_news` hears of every change, `on_trouble` of failed calls, `on_away` of a store that
    does not answer, and with None of its return."""

    def __init__(
        self,
        store: Store,
        job: str,
        inbox: Inbox,
        *,
        key_ttl_s: float,
        on_news: Callable[[News], None],
        on_trouble: Callable[[StoreError], None],
        on_away: Callable[[StoreError | None], None],
    ) -> None:
        self._store, self._inbox = store, inbox
        self._keys = JobKeys(store, job, key_ttl_s)
        self._on_news, self._on_away = on_news, on_away
        self._thread = StoreThread(store, inbox)
        self._followed = Followed(store, inbox, self._keys.prefix, self._on_items, on_trouble)
        self._presence: Presence | None = None
        self._items: Mapping[str, Item] | None = None
        self._revision = 0
        self._distrust_until_s: float | None = None
        self._again: list[tuple[float, Callable[[], None]]] = []
        self._keep_every_s = min(_KEEP_EVERY_S, key_ttl_s / 3)
        self._keep()
        self._terms: Mapping[str, Any] | None = None
        self._roster: Roster | None = None
        self._spec: Mapping[str, Any] | None = None
        self._view: View | None = None
        self._begun = False
        self._used: dict[str, int] = {}
        """Counter -> how many of its numbers are used up, by all that this agent has seen."""
        self._is_away = False

    def propose(self, view: View, then: Callable[[View | None], None]) -> None:
        def answered(answer: View | StoreError) -> None:
            then(None if isinstance(answer, StoreError) else answer)

        self._thread.call(lambda _: self._keys.put_view(view), answered)

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        self._until_answered(lambda: self._keys.put_spec(spec), then)

    def put_roster(self, roster: Roster, then: Callable[[Roster], None]) -> None:
        self._until_answered(lambda: self._keys.put_roster(roster), then)

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None:
        at_least = max(at_least, self._used.get("members", 0))

        def taken(number: int) -> None:
            self._used["members"] = max(self._used.get("members", 0), number + 1)
            then(number)

        self._until_answered(lambda: self._keys.take_number("members", at_least=at_least), taken)

    def put_begun(self) -> None:
        self._begun = True
        self._until_answered(lambda: self._keys.put_once("begun", {}), lambda _: None)

    def put_record(self, record: NodeRecord) -> None:
        value = encode_record(record)
        if self._presence is not None:
            self._presence.update(value)
            return
        key = self._keys.node(record.name)
        self._presence = Presence(self._store, self._inbox, key, value, LEASE_S, self._on_presence)

    def put_end(self, over: Over) -> None:
        self._thread.call(lambda _: self._keys.put_once("end", asdict(over)), lambda _: None)

    def put_left(self, incarnation: int) -> None:
        self._thread.call(lambda _: self._keys.put_left(incarnation), lambda _: None)

    def next_deadline_s(self) -> float | None:
        dues = [due_s for due_s, _ in self._again]
        return min(dues + ([self._distrust_until_s] if self._distrust_until_s is not None else []), default=None)

    def on_tick(self, now: float) -> None:
        due = [call for due_s, call in self._again if due_s <= now]
        self._again = [(due_s, call) for due_s, call in self._again if due_s > now]
        for call in due:
            call()
        if self._distrust_until_s is not None and self._distrust_until_s <= now:
            self._distrust_until_s = None
            if self._items is not None:
                self._on_items(self._items, self._revision)

    def close(self, answering: Collection[str] = ()) -> None:
        """Leave the store; who is the last takes the job's keys along. `answering`: nodes whose agents live."""
        # How this node ended is there before its own key goes: else the others would take it for dead.
        deadline_s = time.monotonic() + _CLOSE_S
        self._thread.settle(_CLOSE_S)
        if self._presence is not None:
            self._presence.close(max(deadline_s - time.monotonic(), 0.0))
        self._followed.close()
        # After an outage the keys of the others may have lapsed with their leases: who answers is there nevertheless.
        if not answering or not (self._is_away or self._distrust_until_s is not None):
            self._thread.call(lambda _: self._keys.remove_all(answering, 2 * LEASE_S), lambda _: None)
        self._thread.close(_CLOSE_S + 2 * LEASE_S)
        self._store.close()

    def _keep(self) -> None:
        """The next time is counted from the answer, so that an outage leaves no row of such calls."""

        def answered(_: StoreError | None) -> None:
            self._again.append((time.monotonic() + self._keep_every_s, self._keep))

        self._thread.call(lambda _: self._keys.keep(), answered)

    def _until_answered(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        def answered(answer: T | StoreError) -> None:
            if isinstance(answer, StoreError):
                self._again.append((time.monotonic() + _AGAIN_S, lambda: self._until_answered(work, then)))
            else:
                then(answer)

        self._thread.call(lambda _: work(), answered)

    def _on_presence(self, report: Report) -> None:
        # The one call that is made again and again, whatever happens.
        self._is_away = isinstance(report, Unreachable)
        self._on_away(report.error if isinstance(report, Unreachable) else None)
        if isinstance(report, Lapsed):
            # The store was away, or forgot: everybody's lease may have gone. Give the others time to come back.
            self._distrust_until_s = time.monotonic() + 2 * LEASE_S

    def _on_items(self, items: Mapping[str, Item], revision: int) -> None:
        lost_its_data = revision < self._revision
        self._items, self._revision = items, revision
        roster, view = items.get(self._keys.prefix + "roster"), items.get(self._keys.prefix + "view")
        spec, end = items.get(self._keys.prefix + "spec"), items.get(self._keys.prefix + "end")
        terms = items.get(self._keys.prefix + "job")
        over = self._keys.read(end) if end is not None else None
        news = News(
            nodes=self._keys.records(items),
            terms=self._keys.read(terms) if terms is not None else None,
            roster=decode_roster(roster.value) if roster is not None else None,
            spec=self._keys.read(spec) if spec is not None else None,
            view=decode_view(view.value) if view is not None else None,
            end=Over(**over) if over is not None else None,
            begun=self._keys.prefix + "begun" in items,
            left=self._keys.left(items),
            removed=view is None and self._view is not None and not lost_its_data,
            absence_counts=self._distrust_until_s is None,
        )
        if not news.removed:
            self._remind(news)
            self._remind_counters(items)
        self._on_news(news)

    def _remind_counters(self, items: Mapping[str, Item]) -> None:
        """Numbers are never given twice, whatever the store forgets."""
        for counter in ("members", "incarnations"):
            there = items.get(self._keys.prefix + counter)
            number, used = int(there.value) if there is not None else 0, self._used.get(counter, 0)
            if number < used:
                self._thread.call(
                    lambda _, counter=counter, used=used: self._keys.raise_number(counter, used),  # type: ignore[misc]
                    lambda _: None,
                )
            self._used[counter] = max(number, used)

    def _remind(self, news: News) -> None:
        """A store that has lost its data is told again what stood."""
        if self._view is not None and (news.view is None or news.view.generation < self._view.generation):
            view = self._view
            self._thread.call(lambda _: self._keys.put_view(view), lambda _: None)
        if self._roster is not None and news.roster is None:
            roster = self._roster
            self._thread.call(lambda _: self._keys.put_roster(roster), lambda _: None)
        if self._spec is not None and news.spec is None:
            spec = self._spec
            self._thread.call(lambda _: self._keys.put_spec(spec), lambda _: None)
        if self._terms is not None and news.terms is None:
            terms = self._terms
            self._thread.call(lambda _: self._keys.put_once("job", terms), lambda _: None)
        if self._begun and not news.begun:
            self._thread.call(lambda _: self._keys.put_once("begun", {}), lambda _: None)
        self._begun = self._begun or news.begun
        self._roster, self._spec = news.roster or self._roster, news.spec or self._spec
        self._terms = news.terms or self._terms
        if news.view is not None and (self._view is None or news.view.generation > self._view.generation):
            self._view = news.view
