"""What a job's keys have said so far, for a store that comes back without its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastrain.launcher.notices import Over
from elastrain.launcher.store import Item, Store
from elastrain.launcher.storethread import StoreThread
from elastrain.launcher.values import NodeRecord, Roster
from elastrain.launcher.views import JobKeys
from elastrain.world import View


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


class StandingKeys:
    """Remembers, and puts again what is missing. Calls go through `thread`; their answers are of no interest."""

    def __init__(self, keys: JobKeys, thread: StoreThread) -> None:
        self._keys, self._thread = keys, thread
        self._terms: Mapping[str, Any] | None = None
        self._roster: Roster | None = None
        self._spec: Mapping[str, Any] | None = None
        self.view: View | None = None
        self.begun = False
        self._used: dict[str, int] = {}
        """Counter -> how many of its numbers are used up, by all that this agent has seen."""

    def unused_member(self, at_least: int) -> int:
        return max(at_least, self._used.get("members", 0))

    def member_used(self, number: int) -> None:
        self._used["members"] = max(self._used.get("members", 0), number + 1)

    def compare(self, news: News, items: Mapping[str, Item]) -> None:
        """A store that has lost its data is told again what stood."""
        keys, view, roster, spec, terms = self._keys, self.view, self._roster, self._spec, self._terms
        if view is not None and (news.view is None or news.view.generation < view.generation):
            self._call(lambda _: keys.put_view(view))
        if roster is not None and news.roster is None:
            self._call(lambda _: keys.put_roster(roster))
        if spec is not None and news.spec is None:
            self._call(lambda _: keys.put_spec(spec))
        if terms is not None and news.terms is None:
            self._call(lambda _: keys.put_once("job", terms))
        if self.begun and not news.begun:
            self._call(lambda _: keys.put_once("begun", {}))
        self._compare_counters(items)
        self._remember(news)

    def _compare_counters(self, items: Mapping[str, Item]) -> None:
        """Numbers are never given twice, whatever the store forgets."""
        for counter in ("members", "incarnations"):
            there = items.get(self._keys.prefix + counter)
            number, used = int(there.value) if there is not None else 0, self._used.get(counter, 0)
            if number < used:
                self._call(lambda _, counter=counter, used=used: self._keys.raise_number(counter, used))  # type: ignore[misc]
            self._used[counter] = max(number, used)

    def _remember(self, news: News) -> None:
        self.begun = self.begun or news.begun
        self._roster, self._spec = news.roster or self._roster, news.spec or self._spec
        self._terms = news.terms or self._terms
        if news.view is not None and (self.view is None or news.view.generation > self.view.generation):
            self.view = news.view

    def _call(self, work: Callable[[Store], object]) -> None:
        self._thread.call(work, lambda _: None)
