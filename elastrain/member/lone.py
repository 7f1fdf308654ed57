"""Look at states of which nobody has a second copy: when they are made, and again before the next update."""

from __future__ import annotations

from collections.abc import Iterable

from elastrain.member.commit import Commit
from elastrain.member.comparison import Comparison
from elastrain.member.holdings import Holdings
from elastrain.member.views import Views
from elastrain.values import Shape


class LoneStates:
    """Owns whether the lone states of the open step were looked at.

    They are where audits are on, and else in a job with backups once this member has had others.
    """

    def __init__(
        self, me: str, views: Views, commit: Commit, holdings: Holdings, comparison: Comparison, shape: Shape
    ) -> None:
        self._me = me
        self._views = views
        self._commit = commit
        self._holdings = holdings
        self._comparison = comparison
        self._is_backed = shape.backups > 0
        self._is_on = shape.audit.every > 0
        self._has_looked = False

    def forget_look(self) -> None:
        """Another step, or another view: other states are lone."""
        self._has_looked = False

    def note(self, shards: Iterable[int]) -> None:
        """Digest those of these states that are lone, as they have just been made."""
        # At once, before anything is published: what changes later is known by this digest alone.
        for shard in self._lone(shards):
            self._comparison.look_at_own(shard)

    def look_again(self) -> None:
        """Compare the lone states with what they were, once in each step; `Doubts` judges the answers."""
        if not self._has_looked:
            self._has_looked = True
            self.note(self._commit.roles.mine)

    def may_vote(self) -> bool:
        """Nothing is made of a state that has changed since: nobody else could tell."""
        return self._has_looked or not self._lone(self._commit.roles.mine)

    def _lone(self, shards: Iterable[int]) -> list[int]:
        # Two looks cost almost half an update per step: a job that is meant to have one copy asks for them by audits.
        self._is_on = self._is_on or (self._is_backed and bool(self._views.others))
        if not self._is_on:
            return []
        live, step = self._commit.roles.live, self._commit.step
        return [s for s in shards if live[s].all == (self._me,) and self._holdings.has(s, step)]
