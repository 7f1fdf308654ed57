"""The agent's access to the store of a job with several nodes: calls go through a thread, so that its loop never waits.

Only `core` decides what is asked for, and what follows from an answer.
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
"""Longest interval for renewals of the job's lease, which happen at least three times within its life."""
_CLOSE_S = 3.0


class Registry(Protocol):
    """The agent's access to the store. `then` is called with the answer, at once or later, in the agent's loop."""

    def propose(self, view: View, then: Callable[[View | None], None]) -> None:
        """Propose a view, once; other calls are repeated.

        Answers None without the store or without the preceding view.
        """

    def remember(self, view: View) -> None:
        """Remember a view that another agent reports. It is put again if the store has lost it."""

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        """Put the spec if there is none. Answers with the one that the store holds."""
        ...

    def put_roster(self, roster: Roster, then: Callable[[Roster | None], None]) -> None:
        """Put the roster if there is none. Answers with the store's, or None if its basis has changed."""

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None:
        """Take the number of a new member."""
        ...

    def put_due(self) -> None:
        """Record that the job's first commit is due. The confirmation comes with the store's news."""

    def put_begun(self) -> None:
        """Record that a step has been committed."""
        ...

    def put_record(self, record: NodeRecord, *, if_lost: bool = False) -> None:
        """Put this node's record. `if_lost`: use it only if the key is lost and written again."""

    def put_checkpoint(self, command: PutCheckpoint, then: Callable[[str], None]) -> None:
        """Record a checkpoint as the newest one. Answers with the reason if that is refused, else ""."""

    def put_end(self, over: Over) -> None:
        """Record how the job ended."""
        ...

    def put_left(self, incarnation: int, *, is_done: bool) -> None:
        """Record that this node leaves. `is_done`: in good order, because its work is done."""

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time of the next repetition, or None."""
        ...

    def on_tick(self, now: float) -> None:
        """Repeat the calls that are due."""
        ...

    def close(self) -> None:
        """Leave the store."""
        ...


@dataclass(frozen=True, kw_only=True)
class RegistryEvents:
    """Callbacks that tell the agent about the store."""

    on_news: Callable[[News], None]
    """Called with the store's whole content, after every change."""
    on_trouble: Callable[[StoreError], None]
    """Called when a call has failed."""
    on_away: Callable[[StoreError | None], None]
    """Called with an error when the store does not answer, and with None when it answers again."""


class SharedRegistry:
    """The registry of a job with several nodes."""

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
        """Propose a view once. A view that stood before is put again if the store has lost it."""

        def answered(answer: View | StoreError | None) -> None:
            view = None if isinstance(answer, StoreError) else answer
            self._standing.learn(view)
            then(view)

        if view == self._standing.view:  # most nodes of this view are here, and its keys are gone
            self._standing.put_again()
            self._thread.call(lambda _: self._keys.put_view_again(view, self._standing.roster), answered)
            return
        # A store that lost its data may hold an older view until all nodes have put again what they know.
        if self._trust.lost_data and self._trust.until_s is not None:
            self._thread.call(lambda _: None, answered)
        else:
            seen = set(self._content[0]) if self._content is not None else set()
            self._thread.call(lambda _: self._keys.put_next_view(view, self._standing.roster, seen), answered)

    def remember(self, view: View) -> None:
        """Remember a view that another agent reports, and put it again if the store has lost it."""
        if self._standing.view is None:  # before the first view has come from the store, it cannot be lost
            return
        self._standing.learn(view)
        if self._content is not None and self._keys.prefix + "restored" in self._content[0]:
            self._inbox.post(self._look_again)

    def _look_again(self) -> None:
        if self._content is not None:
            self._on_items(*self._content)

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        """Put the spec if there is none. Answers with the one that the store holds."""
        self._calls.until_answered(lambda: self._keys.put_spec(spec), self._learned(then))

    def put_roster(self, roster: Roster, then: Callable[[Roster | None], None]) -> None:
        """Put the roster. If a later life has begun, the agent gets the news that the keys are gone."""
        # Only the first roster depends on the store's content. A later one is put again in any case.
        seen = self._seen_of(roster) if self._standing.roster is None else None

        def put() -> tuple[bool, Roster | None]:
            with suppress(OutlivedError):
                return False, self._standing.put_roster(roster, seen)
            return True, None

        def answered(answer: tuple[bool, Roster | None]) -> None:
            is_outlived, stands = answer
            if is_outlived:  # this life is over: the launcher reads the current one
                self._events.on_news(NOTHING)
            else:
                self._learned(then)(stands)

        self._calls.until_answered(put, answered)

    def _seen_of(self, roster: Roster) -> dict[str, int]:
        """Return the keys of the roster's nodes, and their revisions."""
        items = self._content[0] if self._content is not None else {}
        keys = [self._keys.node(record.name) for record in roster.nodes]
        return {key: items[key].revision for key in keys if key in items}

    def _learned(self, then: Callable[[Answer], None]) -> Callable[[Answer], None]:
        def learn(answer: Answer) -> None:
            self._standing.learn(answer)
            then(answer)

        return learn

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None:
        """Take the number of a new member, once everything lost is in the store again."""
        at_least = self._standing.unused_member(at_least)

        def taken(number: int) -> None:
            self._standing.member_used(number)
            then(number)

        def take() -> int:
            if self._trust.lost_data:  # other nodes may know higher numbers and have not put them again yet
                raise StoreUnavailableError("what stood in the store is not all there again")
            return self._keys.take_member(at_least=at_least, roster=self._standing.roster)

        self._calls.until_answered(take, taken)

    def put_due(self) -> None:
        """Record that the first commit is due, once this agent's view is the store's newest."""

        # Repeated until this agent's view is the newest one. If it is not, news of the newer view are on their way.
        def known(_: None) -> None:
            self._standing.learn(FirstCommit.DUE)  # put again if the store loses it before its news
            self._look_again()

        self._calls.until_answered(lambda: put_due(self._keys, self._standing.view), known)

    def put_begun(self) -> None:
        """Record that a step has been committed."""
        self._standing.first_commit = FirstCommit.MADE
        self._calls.until_answered(lambda: self._keys.put_once(FirstCommit.MADE.key, {}), lambda _: None)

    def put_record(self, record: NodeRecord, *, if_lost: bool = False) -> None:
        """Put this node's record under its lease, or set the one to write after a loss."""
        value = encode_record(record)
        if self._presence is not None:
            (self._presence.after_loss if if_lost else self._presence.update)(value)
            return
        key = self._keys.node(record.name)
        self._presence = Presence(self._store, self._inbox, key, value, LEASE_S, self._on_presence)

    def put_checkpoint(self, command: PutCheckpoint, then: Callable[[str], None]) -> None:
        """Record a checkpoint as the newest one. Answers with the reason if that is refused, else ""."""
        self._calls.until_answered(lambda: self._keys.put_checkpoint(command), then)

    def put_end(self, over: Over) -> None:
        """Record how the job ended. If state was lost, another life may follow."""
        self._standing.may_follow = over.lost
        self._thread.call(lambda _: self._keys.put_once("end", asdict(over)), lambda _: None)

    def put_left(self, incarnation: int, *, is_done: bool) -> None:
        """Record that this node leaves, in good order or not."""
        kind = "left" if is_done else "gone"
        self._thread.call(lambda _: self._keys.put_once(f"{kind}/{incarnation}", {}), lambda _: None)

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time of the next repetition or of the end of distrust, or None."""
        dues = (self._calls.next_deadline_s(), self._trust.until_s)
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def on_tick(self, now: float) -> None:
        """Repeat the calls that are due. When distrust ends, look at the store's content again."""
        self._calls.on_tick(now)
        if self._trust.until_s is not None and self._trust.until_s <= now:
            self._trust.until_s = None
            self._look_again()

    def close(self, answering: Mapping[str, int] = MappingProxyType({})) -> None:
        """Leave the store.

        The last node removes the keys. `answering`: nodes whose agents live, and their incarnations.
        """
        # The reason for leaving must be stored before this node's key goes, or other nodes would consider it dead.
        deadline_s = time.monotonic() + _CLOSE_S
        self._thread.settle(_CLOSE_S)
        if self._presence is not None:
            self._presence.close(max(deadline_s - time.monotonic(), 0.0))
        self._followed.close()
        # After an outage the keys of other nodes may have lapsed with their leases, although their agents answer.
        if not self._standing.may_follow and (not answering or not (self._is_away or self._trust.until_s is not None)):
            self._thread.call(lambda _: self._keys.remove_all(answering, 2 * LEASE_S), lambda _: None)
        self._thread.close(_CLOSE_S + 2 * LEASE_S)
        self._store.close()

    def _on_presence(self, report: Report) -> None:
        self._is_away = isinstance(report, Unreachable)
        self._events.on_away(report.error if isinstance(report, Unreachable) else None)
        if isinstance(report, Lapsed):
            # The store was away, or has lost its data, so all leases may be gone. Give other nodes time to come back.
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
        # News may be older than the answer to a call. Then what they lack is still to come.
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
        """Distrust missing keys for a while after a loss of data or a lapse."""
        if self._content is not None and is_another(*self._content, items, revision):
            self._trust.lose(time.monotonic() + 2 * LEASE_S)
            self._keys.newest_revision = 0
        restored = self._keys.prefix + "restored"
        if restored in items and (self._content is None or restored not in self._content[0]):
            self._trust.doubt(time.monotonic() + 2 * LEASE_S)
        if self._has_lapsed(items):
            self._trust.lapse(time.monotonic() + 2 * LEASE_S)

    def _ask_for_the_end(self) -> None:
        """Ask whether the job ended: a node that was cut off during a loss of data may find an ended job's keys."""
        roster = self._standing.roster

        def answered(end: Over | None) -> None:
            self._trust.may_be_over = end is not None
            if end is not None:
                self._events.on_news(replace(NOTHING, end=end))
            else:
                self._look_again()

        self._calls.until_answered(lambda: read_ended(self._store, self._keys.life, roster), answered)

    def _has_lapsed(self, items: Mapping[str, Item]) -> bool:
        """Return True if this node's own key has just gone. An outage may have removed the keys of all nodes."""
        # The renewal may notice this later, because it may still wait for the store's answer.
        key, before = self._presence and self._presence.key, self._content
        return before is not None and key in before[0] and key not in items

    def _removed(self, news: News, end: Over | StoreError | None) -> None:
        """Report that the job's keys are gone, and how the job ended if that can be read."""
        # Newer news, with this node's own key in them, may have come meanwhile. The job is over nevertheless.
        self._events.on_news(replace(news, end=end if isinstance(end, Over) else news.end))
