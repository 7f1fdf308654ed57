"""What a job's keys have said so far, for a store that comes back without its data."""

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
    """What the store holds now. `absence_counts`: a node that is not there has lost its lease, by all we know."""

    nodes: Mapping[str, NodeRecord]
    terms: Mapping[str, Any] | None
    """What all nodes have agreed about before anything started."""
    roster: Roster | None
    restored: bool
    """The roster had been lost, and was put again."""
    spec: Mapping[str, Any] | None
    view: View | None
    end: Over | None
    first_commit: FirstCommit
    left: frozenset[int]
    """The incarnations of nodes that have gone in good order."""
    removed: bool
    """Somebody has taken the job's keys away: a store that has merely lost its data begins anew."""
    absence_counts: bool
    forgot: bool
    """The store has lost its data, and who lives has put again what stood: what else was in it nobody can read."""


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
"""What a store says whose keys somebody has taken away."""


class Trust:
    """What the absence of a key proves: nothing for a while after this node's lease has lapsed, or data were lost."""

    def __init__(self) -> None:
        self.until_s: float | None = None
        """Nothing is proven before this time; None: absence counts."""
        self.lost_data = False
        """The store is another one than it was, and what stood in it is not all there again."""
        self.may_be_over = False
        """The job may have ended since data were lost: this node has not looked yet."""
        self._is_loss_new = False

    def lapse(self, until_s: float) -> None:
        self.until_s = until_s

    def doubt(self, until_s: float) -> None:
        """The store says that data were lost before this node came: others may not have put again all they know."""
        self.lost_data, self.may_be_over, self.until_s = True, True, until_s

    def lose(self, until_s: float) -> None:
        """The store has lost its data."""
        self.lost_data, self.may_be_over, self._is_loss_new, self.until_s = True, True, True, until_s

    def take_loss(self) -> bool:
        """Whether data were lost, and who lives has had its time to come back: once for each loss."""
        if not self._is_loss_new or self.until_s is not None:
            return False
        self._is_loss_new = False
        return True

    def settle(self, *, is_lacking: bool) -> None:
        """What stood is there again, or not yet."""
        self.lost_data = self.lost_data and (is_lacking or self.until_s is not None)


def is_another(known: Mapping[str, Item], last: int, items: Mapping[str, Item], revision: int) -> bool:
    """Whether a store that says this at `revision` has another past than the one that said what is `known` at `last`.

    Then it has lost its data, although others may have put so much since that it is no shorter.
    """
    # What was changed by then would be known as it is now. Of one revision several changes come one by one.
    told = [item for item in items.values() if item.revision < last or item.revision == last < revision]
    return revision < last or any(known.get(item.key) != item for item in told)


class StandingKeys:
    """Remembers, and puts again what is missing. Calls go through `thread`; their answers are of no interest."""

    def __init__(self, keys: JobKeys, thread: StoreThread, life: Life) -> None:
        self._keys, self._thread, self._life = keys, thread, life
        self._terms: Mapping[str, Any] | None = None
        self.roster: Roster | None = None
        """The first that this agent has heard of: any other is that of another job, under the same name."""
        self._spec: Mapping[str, Any] | None = None
        self.view: View | None = None
        self.first_commit = FirstCommit.NONE
        self.may_follow = False
        """Another life of the job, upon this one: whoever comes meanwhile is to see how this one has ended."""
        self._checkpoint: Mapping[str, Any] = {}
        """What stood of the newest durable checkpoint."""
        self._used: dict[str, int] = {}
        """Counter -> how many of its numbers are used up, by all that this agent has seen."""

    def unused_member(self, at_least: int) -> int:
        return max(at_least, self._used.get("members", 0))

    def member_used(self, number: int) -> None:
        self._used["members"] = max(self._used.get("members", 0), number + 1)

    def are_removed(self, view: View | None, roster: Roster | None, items: Mapping[str, Item]) -> bool:
        """There was a view, a roster, or at least the count of starts, and somebody has taken it away, as a last node
        does. Whoever comes afterwards counts starts again: only the roster says then that it is gone.
        """
        # Any one that is gone will do: another may have been put again by a call of ours that was on its way.
        has_counted = self._keys.prefix + "incarnations" in items
        return (
            (view is None and self.view is not None)
            or (roster is None and self.roster is not None)
            or (not has_counted and self._used.get("incarnations", 0) > 0)
        )

    def put_again(self) -> None:
        """All that stood: it has been taken away, with the job's lease or by a node that took itself for the last."""
        self.compare(NOTHING, {}, is_lost=True)

    def put_roster(self, roster: Roster, seen: Mapping[str, int] | None) -> Roster | None:
        """Returns the one that the store holds, None where what was `seen` (None: it is put again) has changed."""
        # With the count of members: a fresh node may take a number as soon as it sees a roster. With the life: who
        # reads of none would begin the job's first.
        # Before it: who reads the roster has to know that more may be lacking. Where one stands nothing was forgotten:
        # this node has heard of it while its own proposal was on the way.
        if seen is None and not self._keys.has_roster():
            self._keys.put_once("restored", {})
        return self._keys.put_roster(roster, self.unused_member(0), self._life, seen=seen)

    def compare(self, news: News, items: Mapping[str, Item], *, is_lost: bool) -> None:
        """A store that has lost its data is told again what stood. is_lost: the news are not merely old."""
        keys, view, roster, spec, terms = self._keys, self.view, self.roster, self._spec, self._terms
        if roster is not None and news.roster is not None and news.roster != roster:
            return  # another job has begun in an empty store: what stood in this one would mislead it
        if view is not None and (news.view is None or news.view.generation < view.generation):
            self._call(lambda _: keys.put_view_again(view, roster))
        if roster is not None and news.roster is None and is_lost:  # from old news it is only still to come
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
        """Without it a member that was left behind could make an older one the newest."""
        there = items.get(self._keys.prefix + "checkpoint")
        told = self._keys.read(there) if there is not None else {}
        if self._checkpoint and (not told or is_older(told, self._checkpoint)):
            self._call(lambda _, value=self._checkpoint: self._keys.put_checkpoint_again(value))  # type: ignore[misc]
        else:
            self._checkpoint = told

    def _compare_counters(self, items: Mapping[str, Item]) -> None:
        """Numbers are never given twice, whatever the store forgets."""
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
        """The store has said so: in its news, or as the answer to a call, which may be all that comes here of it."""
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
