"""The job's keys as they stood, remembered for a store that comes back without its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elastrain.job.world import View
from elastrain.launcher.shared.job_values import Life, NodeRecord, Roster
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.store.first_commit import FirstCommit
from elastrain.launcher.store.job_keys import JobKeys, is_older
from elastrain.launcher.store.port import Item, Store
from elastrain.launcher.store.store_thread import StoreThread


@dataclass(frozen=True, kw_only=True)
class News:
    """The content of the store now. `absence_counts`: a missing node has lost its lease, as far as can be known."""

    nodes: Mapping[str, NodeRecord]
    terms: Mapping[str, Any] | None
    """The settings on which all nodes agreed before anything started."""
    roster: Roster | None
    restored: bool
    """True if the roster had been lost and was put again."""
    spec: Mapping[str, Any] | None
    view: View | None
    end: Over | None
    first_commit: FirstCommit
    left: frozenset[int]
    """Incarnations of nodes that have left in good order."""
    removed: bool
    """True if another node has removed the job's keys. A store that has lost its data begins again instead."""
    absence_counts: bool
    forgot: bool
    """True once after a loss of data, when living nodes have put the keys again.

    Keys of dead nodes are gone for good.
    """


NOTHING = News(
    nodes={},
    terms=None,
    roster=None,
    restored=False,
    spec=None,
    view=None,
    end=None,
    first_commit=FirstCommit.NONE,
    left=frozenset(),
    removed=True,
    absence_counts=False,
    forgot=False,
)
"""The news of a store from which the job's keys were removed."""


class Trust:
    """Trust in missing keys. They prove nothing for a while after this node's lease has lapsed, or data were lost."""

    def __init__(self) -> None:
        self.until_s: float | None = None
        """Missing keys prove nothing before this monotonic time. None: they count."""
        self.lost_data = False
        """True while the store has other data than before, and not all keys are there again."""
        self.may_be_over = False
        """True while the job may have ended since the loss of data, because this node has not checked."""
        self._is_loss_new = False

    def lapse(self, until_s: float) -> None:
        """Distrust missing keys until this time, because this node's lease has lapsed."""
        self.until_s = until_s

    def doubt(self, until_s: float) -> None:
        """Distrust missing keys, because the store had lost data before this node came.

        Other nodes may still put keys again.
        """
        self.lost_data, self.may_be_over, self.until_s = True, True, until_s

    def lose(self, until_s: float) -> None:
        """Distrust missing keys, because the store has lost its data."""
        self.lost_data, self.may_be_over, self._is_loss_new, self.until_s = True, True, True, until_s

    def take_loss(self) -> bool:
        """Return True once per loss of data, when living nodes have had time to come back."""
        if not self._is_loss_new or self.until_s is not None:
            return False
        self._is_loss_new = False
        return True

    def settle(self, *, is_lacking: bool) -> None:
        """Update after news. `is_lacking`: some of the lost keys are still missing."""
        self.lost_data = self.lost_data and (is_lacking or self.until_s is not None)


def is_another(known: Mapping[str, Item], last: int, items: Mapping[str, Item], revision: int) -> bool:
    """Return True if the store with `items` at `revision` has another past than the one with `known` at `last`.

    Then it has lost its data. Its revision may be higher nevertheless, if other nodes have written a lot since.
    """
    # An item changed by revision `last` must be known in this form. Changes of one revision may come one by one.
    told = [item for item in items.values() if item.revision < last or item.revision == last < revision]
    return revision < last or any(known.get(item.key) != item for item in told)


class StandingKeys:
    """Remembers the job's keys, and puts them again if they are lost.

    Calls go through `thread`, and answers are ignored.
    """

    def __init__(self, keys: JobKeys, thread: StoreThread, life: Life) -> None:
        self._keys, self._thread, self._life = keys, thread, life
        self._terms: Mapping[str, Any] | None = None
        self.roster: Roster | None = None
        """The first roster that this agent has heard of. Any other one belongs to another job of the same name."""
        self._spec: Mapping[str, Any] | None = None
        self.view: View | None = None
        self.first_commit = FirstCommit.NONE
        self.may_follow = False
        """True if another life of the job may follow. The end of this one must then stay readable for late nodes."""
        self._checkpoint: Mapping[str, Any] = {}
        """The record of the newest durable checkpoint."""
        self._used: dict[str, int] = {}
        """Counter -> used numbers, as far as this agent knows."""

    def unused_member(self, at_least: int) -> int:
        """Return the lowest member number that is not used, at least `at_least`."""
        return max(at_least, self._used.get("members", 0))

    def member_used(self, number: int) -> None:
        """Record that this member number is used."""
        self._used["members"] = max(self._used.get("members", 0), number + 1)

    def are_removed(self, view: View | None, roster: Roster | None, items: Mapping[str, Item]) -> bool:
        """Return True if the view, the roster, or the count of starts was there, and is gone.

        The last node removes all keys. A node that comes later counts starts again, so that only the roster is missing.
        """
        # One missing key is enough: this agent's own calls may have put others again meanwhile.
        has_counted = self._keys.prefix + "incarnations" in items
        return (
            (view is None and self.view is not None)
            or (roster is None and self.roster is not None)
            or (not has_counted and self._used.get("incarnations", 0) > 0)
        )

    def put_again(self) -> None:
        """Put all keys again, because another node or the end of the job's lease has removed them."""
        self.compare(NOTHING, {}, is_lost=True)

    def put_roster(self, roster: Roster, seen: Mapping[str, int] | None) -> Roster | None:
        """Put the roster. Returns the store's, or None if a key in `seen` has changed. `seen` is None after a loss."""
        # The count of members is put too, because a new node may take a number as soon as it sees a roster; and the
        # life, because without it a node would begin the job's first one. "restored" comes before the roster, so that
        # its readers know that keys may be missing. If there is a roster, nothing was lost: this node heard of it while
        # its proposal was under way.
        if seen is None and not self._keys.has_roster():
            self._keys.put_once("restored", {})
        return self._keys.put_roster(roster, self.unused_member(0), self._life, seen=seen)

    def compare(self, news: News, items: Mapping[str, Item], *, is_lost: bool) -> None:
        """Put again the keys that the news lack. `is_lost`: the news are not merely older than this agent's calls."""
        keys, view, roster, spec, terms = self._keys, self.view, self.roster, self._spec, self._terms
        if roster is not None and news.roster is not None and news.roster != roster:
            return  # another job has begun in an empty store, and the keys of this one would mislead it
        if view is not None and (news.view is None or news.view.generation < view.generation):
            self._call(lambda _: keys.put_view_again(view, roster))
        if roster is not None and news.roster is None and is_lost:  # after old news it may still come
            self._call(lambda _: self.put_roster(roster, None))
        if spec is not None and news.spec is None:
            self._call(lambda _: keys.put_spec(spec))
        if terms is not None and news.terms is None:
            self._call(lambda _: keys.put_once("job", terms))
        if (stage := self.first_commit) > news.first_commit:
            self._call(lambda _: keys.put_once(stage.key, {}))
        self._compare_checkpoint(items)
        self._compare_counters(items)
        self._remember(news)

    def _compare_checkpoint(self, items: Mapping[str, Item]) -> None:
        """Put the newest checkpoint's record again. Without it a member left behind could record an older one."""
        there = items.get(self._keys.prefix + "checkpoint")
        told = self._keys.read(there) if there is not None else {}
        if self._checkpoint and (not told or is_older(told, self._checkpoint)):
            self._call(lambda _, value=self._checkpoint: self._keys.put_checkpoint_again(value))  # type: ignore[misc]
        else:
            self._checkpoint = told

    def _compare_counters(self, items: Mapping[str, Item]) -> None:
        """Raise the counters to the used numbers, so that no number is given twice."""
        for counter in ("members", "incarnations"):
            there = items.get(self._keys.prefix + counter)
            number, used = int(there.value) if there is not None else 0, self._used.get(counter, 0)
            if number < used:
                self._call(lambda _, counter=counter, used=used: self._keys.raise_number(counter, used))  # type: ignore[misc]
            self._used[counter] = max(number, used)

    def _remember(self, news: News) -> None:
        self._terms = news.terms or self._terms
        for stands in (news.roster, news.spec, news.view, news.first_commit):
            self.learn(stands)

    def learn(self, stands: Roster | View | FirstCommit | Mapping[str, Any] | None) -> None:
        """Remember a value that the store holds, from its news or from the answer to a call."""
        match stands:
            case Roster():
                self.roster = self.roster or stands
            case View() if self.view is None or stands.generation > self.view.generation:
                self.view = stands
            case FirstCommit():
                self.first_commit = max(self.first_commit, stands)
            case dict():
                self._spec = stands

    def _call(self, work: Callable[[Store], object]) -> None:
        self._thread.call(work, lambda _: None)
