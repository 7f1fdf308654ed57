"""Who holds which shard: as the last commit says, as it is in this view, and as it should be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from elastrain.placement import Holders, Placement, first_copies


class Roles:
    """Owns the three placements and the members that follow a shard without being its holders yet."""

    def __init__(self, me: str) -> None:
        self.committed: Placement | None = None
        """Changed by a commit only; None before the first recovery."""
        self.target: Placement = ()
        """Where the shards should be in this view."""
        self.mine: list[int] = []
        """Shards whose primary this member is."""
        self._me = me
        self._live: Placement = ()
        self._followers: dict[int, set[str]] = defaultdict(set)

    @property
    def live(self) -> Placement:
        """The committed holders that are in this view."""
        return self._live

    def settle(self, committed: Placement, live: Placement, target: Placement) -> None:
        """Take over what a recovery has decided."""
        self.committed, self.target = committed, target
        self.set_live(live)

    def change(self, roles: Iterable[tuple[int, Holders]]) -> None:
        """Carry out what a commit says."""
        assert self.committed is not None
        committed, live = list(self.committed), list(self._live)
        # A record names only members of its view: what it says lives.
        for shard, holders in roles:
            committed[shard] = live[shard] = holders
        self.committed = tuple(committed)
        self.set_live(tuple(live))

    def is_mine(self, shard: int) -> bool:
        return self._live[shard].primary == self._me

    def elsewhere(self, nodes: Mapping[str, str]) -> dict[int, frozenset[str]]:
        """Each shard that this member holds -> its holders on other nodes. `nodes`: of the view's members."""
        here = nodes[self._me]
        mine = [(shard, holders.all) for shard, holders in enumerate(self._live) if self._me in holders.all]
        return {shard: frozenset(m for m in holders if nodes.get(m, here) != here) for shard, holders in mine}

    def set_live(self, live: Placement) -> None:
        # Kept beside, since every message asks for it; it changes with `live` only.
        self._live = live
        self.mine = [shard for shard, holders in enumerate(live) if holders.primary == self._me]

    def follow(self, shard: int, member: str) -> None:
        """The member has a verified copy: from now on it gets each gradient, and is a holder after a commit."""
        self._followers[shard].add(member)

    def unfollow(self, shard: int, holders: Iterable[str]) -> None:
        self._followers[shard] -= set(holders)

    def forget_followers(self) -> None:
        # Who primaries are may change with the view, and only a primary knows its followers.
        self._followers.clear()

    def readers(self, shard: int) -> set[str]:
        """Members that get the shard's finished gradient: who keeps a copy, or is about to."""
        # Followers, too, or their copy would be a step behind when their time as holders comes.
        return {*self._live[shard].backups, *self._followers[shard]}

    def copies_to_make(self, nodes: Mapping[str, str]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """(shard of this member's, member that should hold it and does not get it yet).

        First those that give a shard as many holders as it should have, then those that only move it.
        """
        first: list[tuple[int, str]] = []
        moving: list[tuple[int, str]] = []
        # By its primary alone: nobody else knows that a copy is verified.
        for shard in self.mine:
            have = list(dict.fromkeys((*self._live[shard].all, *sorted(self._followers[shard]))))
            soon = first_copies(have, self.target[shard], nodes)
            first += [(shard, member) for member in soon]
            moving += [(shard, m) for m in self.target[shard].all if m not in have and m not in soon]
        return first, moving
