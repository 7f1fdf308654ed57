"""The agent's access to the store of a job of several nodes: through a thread, so that its loop never waits.

Calls and answers only; what is asked for, and what follows from the answer, is decided in `core`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from msgspec.structs import asdict

from elastrain.job.world import View
from elastrain.launcher.shared.job_values import Life, NodeRecord, PutCheckpoint, Roster
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.store.first_commit import FirstCommit, first_commit_in, put_due
from elastrain.launcher.store.job_keys import JobKeys, decode_roster, decode_view, encode_record
from elastrain.launcher.store.life_keys import OutlivedError
from elastrain.launcher.store.port import Item, Store, StoreError, StoreUnavailableError
from elastrain.launcher.store.presence import Lapsed, Presence, Report, Unreachable
from elastrain.launcher.store.standing_keys import NOTHING, News, StandingKeys, Trust, is_another
from elastrain.launcher.store.store_thread import Followed, Inbox, RepeatedCalls, StoreThread
from elastrain.launcher.store.tombstones import read_ended

Answer = TypeVar("Answer", Roster | None, dict[str, Any])
LEASE_S = 3.0
_KEEP_EVERY_S = 60.0
"""At the most: the job's lease is kept alive three times within its life."""
_CLOSE_S = 3.0


class Registry(Protocol):
    """`then` is called with the answer, at once or later, in the agent's loop."""

    def propose(self, view: View, then: Callable[[View | None], None]) -> None:
        """Answers None where the store does not answer, or has not what the view follows upon; all other calls are
        repeated until it does.
        """

    def remember(self, view: View) -> None:
        """Another agent has told of it: it is put again where the store has lost it."""

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None: ...

    def put_roster(self, roster: Roster, then: Callable[[Roster | None], None]) -> None:
        """Answers with the one that stands; None: what it was made by has changed, and nothing was put."""

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None: ...

    def put_due(self) -> None:
        """Say that the first commit of the job is due; that the store knows comes back with its news."""

    def put_begun(self) -> None: ...

    def put_record(self, record: NodeRecord, *, if_lost: bool = False) -> None:
        """`if_lost`: this one where the key was lost, and is written again."""

    def put_checkpoint(self, command: PutCheckpoint, then: Callable[[str], None]) -> None:
        """Answers with the problem where it may not be the newest; empty: it is."""

    def put_end(self, over: Over) -> None: ...

    def put_left(self, incarnation: int, *, is_done: bool) -> None:
        """This node goes; `is_done`: in good order, as its work is done."""

    def next_deadline_s(self) -> float | None: ...

    def on_tick(self, now: float) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RegistryEvents:
    """What the agent is told of the store."""

    on_news: Callable[[News], None]
    """Its whole content, after every change."""
    on_trouble: Callable[[StoreError], None]
    """A call has failed."""
    on_away: Callable[[StoreError | None], None]
    """It does not answer; None: it does again."""


class SharedRegistry:
    """A job of several nodes."""

    def __init__(
        self, store: Store, job: str, inbox: Inbox, events: RegistryEvents, *, life: Life, key_ttl_s: float
    ) -> None:
        self._store, self._inbox, self._events = store, inbox, events
        self._keys = JobKeys(store, job, key_ttl_s)
        self._thread = StoreThread(store, inbox)
        self._calls = RepeatedCalls(self._thread)
        self._standing = StandingKeys(self._keys, self._thread, life)
        self._followed = Followed(store, inbox, self._keys.prefix, self._on_items, events.on_trouble)
        self._presence: Presence | None = None
        self._content: tuple[Mapping[str, Item], int] | None = None
        """The newest items, and their revision."""
        self._trust = Trust()
        self._is_away = False
        self._calls.for_ever(min(_KEEP_EVERY_S, key_ttl_s / 3), self._keys.keep)

    def propose(self, view: View, then: Callable[[View | None], None]) -> None:
        def answered(answer: View | StoreError | None) -> None:
            view = None if isinstance(answer, StoreError) else answer
            self._standing.learn(view)
            then(view)

        if view == self._standing.view:  # most of its nodes are here, and its keys are gone
            self._standing.put_again()
            self._thread.call(lambda _: self._keys.put_view_again(view, self._standing.roster), answered)
            return
        # A store that has lost its data holds whatever came back first: until all have put again what they know, an
        # older view could be followed by another one than the newest was.
        if self._trust.lost_data and self._trust.until_s is not None:
            self._thread.call(lambda _: None, answered)
        else:
            seen = set(self._content[0]) if self._content is not None else set()
            self._thread.call(lambda _: self._keys.put_next_view(view, self._standing.roster, seen), answered)

    def remember(self, view: View) -> None:
        if self._standing.view is None:  # what the store has not yet shown of the first one is not lost
            return
        self._standing.learn(view)
        if self._content is not None and self._keys.prefix + "restored" in self._content[0]:
            self._inbox.post(self._look_again)

    def _look_again(self) -> None:
        if self._content is not None:
            self._on_items(*self._content)

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        self._calls.until_answered(lambda: self._keys.put_spec(spec), self._learned(then))

    def put_roster(self, roster: Roster, then: Callable[[Roster | None], None]) -> None:
        # The first one is made by what the store says; the one that stood is put again whatever it has forgotten.
        seen = self._seen_of(roster) if self._standing.roster is None else None

        def put() -> tuple[bool, Roster | None]:
            with suppress(OutlivedError):
                return False, self._standing.put_roster(roster, seen)
            return True, None

        def answered(answer: tuple[bool, Roster | None]) -> None:
            is_outlived, stands = answer
            if is_outlived:  # this life is over: the launcher asks for the one that stands
                self._events.on_news(NOTHING)
            else:
                self._learned(then)(stands)

        self._calls.until_answered(put, answered)

    def _seen_of(self, roster: Roster) -> dict[str, int]:
        """The keys of its nodes, and their revisions."""
        items = self._content[0] if self._content is not None else {}
        keys = [self._keys.node(record.name) for record in roster.nodes]
        return {key: items[key].revision for key in keys if key in items}

    def _learned(self, then: Callable[[Answer], None]) -> Callable[[Answer], None]:
        def learn(answer: Answer) -> None:
            self._standing.learn(answer)
            then(answer)

        return learn

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None:
        at_least = self._standing.unused_member(at_least)

        def taken(number: int) -> None:
            self._standing.member_used(number)
            then(number)

        def take() -> int:
            if self._trust.lost_data:  # others may know of higher numbers, and have not put them again yet
                raise StoreUnavailableError("what stood in the store is not all there again")
            return self._keys.take_member(at_least=at_least, roster=self._standing.roster)

        self._calls.until_answered(take, taken)

    def put_due(self) -> None:
        # Until the view that this agent knows is the one that stands: where it is not, news of the other are coming.
        def known(_: None) -> None:
            self._standing.learn(FirstCommit.DUE)  # a store that loses it before it has told of it is told again
            self._look_again()

        self._calls.until_answered(lambda: put_due(self._keys, self._standing.view), known)

    def put_begun(self) -> None:
        self._standing.first_commit = FirstCommit.MADE
        self._calls.until_answered(lambda: self._keys.put_once(FirstCommit.MADE.key, {}), lambda _: None)

    def put_record(self, record: NodeRecord, *, if_lost: bool = False) -> None:
        value = encode_record(record)
        if self._presence is not None:
            (self._presence.after_loss if if_lost else self._presence.update)(value)
            return
        key = self._keys.node(record.name)
        self._presence = Presence(self._store, self._inbox, key, value, LEASE_S, self._on_presence)

    def put_checkpoint(self, command: PutCheckpoint, then: Callable[[str], None]) -> None:
        self._calls.until_answered(lambda: self._keys.put_checkpoint(command), then)

    def put_end(self, over: Over) -> None:
        self._standing.may_follow = over.lost
        self._thread.call(lambda _: self._keys.put_once("end", asdict(over)), lambda _: None)

    def put_left(self, incarnation: int, *, is_done: bool) -> None:
        kind = "left" if is_done else "gone"
        self._thread.call(lambda _: self._keys.put_once(f"{kind}/{incarnation}", {}), lambda _: None)

    def next_deadline_s(self) -> float | None:
        dues = (self._calls.next_deadline_s(), self._trust.until_s)
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def on_tick(self, now: float) -> None:
        self._calls.on_tick(now)
        if self._trust.until_s is not None and self._trust.until_s <= now:
            self._trust.until_s = None
            self._look_again()

    def close(self, answering: Mapping[str, int] = MappingProxyType({})) -> None:
        """Leave the store; who is the last takes the job's keys along. `answering`: nodes whose agents live, and their
        incarnations.
        """
        # How this node ended is there before its own key goes: else the others would take it for dead.
        deadline_s = time.monotonic() + _CLOSE_S
        self._thread.settle(_CLOSE_S)
        if self._presence is not None:
            self._presence.close(max(deadline_s - time.monotonic(), 0.0))
        self._followed.close()
        # After an outage the keys of the others may have lapsed with their leases: who answers is there nevertheless.
        if not self._standing.may_follow and (not answering or not (self._is_away or self._trust.until_s is not None)):
            self._thread.call(lambda _: self._keys.remove_all(answering, 2 * LEASE_S), lambda _: None)
        self._thread.close(_CLOSE_S + 2 * LEASE_S)
        self._store.close()

    def _on_presence(self, report: Report) -> None:
        # The one call that is made again and again, whatever happens.
        self._is_away = isinstance(report, Unreachable)
        self._events.on_away(report.error if isinstance(report, Unreachable) else None)
        if isinstance(report, Lapsed):
            # The store was away, or forgot: everybody's lease may have gone. Give the others time to come back.
            self._trust.lapse(time.monotonic() + 2 * LEASE_S)

    def _on_items(self, items: Mapping[str, Item], revision: int) -> None:
        self._look_for_losses(items, revision)
        self._content = items, revision
        there = items.get(self._keys.prefix + "roster")
        roster = decode_roster(there.value) if there is not None else None
        there = items.get(self._keys.prefix + "view")
        view = decode_view(there.value) if there is not None else None
        spec, end, terms = (items.get(self._keys.prefix + key) for key in ("spec", "end", "job"))
        over = self._keys.read(end) if end is not None else None
        # News may be older than an answer to a call: then what it lacks is only still to come.
        is_removed = self._standing.are_removed(view, roster, items) and revision >= self._keys.newest_revision
        self._trust.settle(is_lacking=is_removed)
        if is_removed and self._trust.lost_data and self._trust.may_be_over:
            self._ask_for_the_end()
            return
        news = News(
            nodes=self._keys.records(items),
            terms=self._keys.read(terms) if terms is not None else None,
            roster=roster,
            restored=self._keys.prefix + "restored" in items,
            spec=self._keys.read(spec) if spec is not None else None,
            view=view,
            end=Over(**over) if over is not None else None,
            first_commit=first_commit_in(items, self._keys),
            left=self._keys.left(items),
            removed=is_removed and not self._trust.lost_data,
            absence_counts=self._trust.until_s is None,
            forgot=self._trust.take_loss(),
        )
        if news.removed:
            roster = self._standing.roster
            self._thread.call(lambda store: read_ended(store, self._keys.life, roster), partial(self._removed, news))
            return
        self._standing.compare(news, items, is_lost=is_removed)
        self._events.on_news(news)

    def _look_for_losses(self, items: Mapping[str, Item], revision: int) -> None:
        """Note what makes an absent key prove nothing for a while."""
        if self._content is not None and is_another(*self._content, items, revision):
            self._trust.lose(time.monotonic() + 2 * LEASE_S)
            self._keys.newest_revision = 0
        restored = self._keys.prefix + "restored"
        if restored in items and (self._content is None or restored not in self._content[0]):
            self._trust.doubt(time.monotonic() + 2 * LEASE_S)
        if self._has_lapsed(items):
            self._trust.lapse(time.monotonic() + 2 * LEASE_S)

    def _ask_for_the_end(self) -> None:
        """Whoever was cut off while the store lost its data may find a job that the others put again, and ended."""
        roster = self._standing.roster

        def answered(end: Over | None) -> None:
            self._trust.may_be_over = end is not None
            if end is not None:
                self._events.on_news(replace(NOTHING, end=end))
            else:
                self._look_again()

        self._calls.until_answered(lambda: read_ended(self._store, self._keys.life, roster), answered)

    def _has_lapsed(self, items: Mapping[str, Item]) -> bool:
        """Whether this node's own key has just gone: an outage took it, and may have taken those of all others."""
        # The call that keeps it alive may hear of that later: it can still be waiting for the store's answer.
        key, before = self._presence and self._presence.key, self._content
        return before is not None and key in before[0] and key not in items

    def _removed(self, news: News, end: Over | StoreError | None) -> None:
        """Say that the job's keys were gone, and how it ended where that can be read."""
        # Although newer news may have come meanwhile, in which this node's own key stands again: the job is over.
        self._events.on_news(replace(news, end=end if isinstance(end, Over) else news.end))
