"""Dealing of shards to members: equally many for each, up to one, with as few moves as possible.

Pure. A *hand* is a list of shards that are dealt together: those of one block, or of one block and primary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence


class Dealing:
    """The members of all shards while hands are dealt one after the other.

    held: the present member of each shard, if any. banned: per shard, the members that may not have it.
    """

    def __init__(
        self, held: Sequence[str | None], sizes: Sequence[int], members: Sequence[str], banned: Sequence[frozenset[str]]
    ) -> None:
        self.load = dict.fromkeys(members, 0)
        """Bytes of each member."""
        self.placed: list[str | None] = [None] * len(sizes)
        """Member of each shard. None while it has none."""
        self._held, self._sizes, self._banned = held, sizes, banned
        for shard, member in enumerate(held):
            if member in self.load and member not in banned[shard]:
                self._place(shard, member)

    def deal(self, shards: Sequence[int]) -> None:
        """Deal one hand: shards stay where they may, and all members get equally many, up to one."""
        lists: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            giver = self._held[shard]
            if self.placed[shard] is None and giver in self.load:
                lists[giver].append(shard)
        keeps = {self.placed[shard] for shard in shards}
        moving = [shard for given in lists.values() for shard in given]
        free = [m for m in self.load if m not in keeps and not any(m in self._banned[shard] for shard in moving)]
        # As many takers as givers: each takes one giver's whole list, so that all links work at once and others keep
        # what they have.
        if len(lists) <= len(free):
            for giver in sorted(lists, key=lambda m: -len(lists[m])):
                taker = min(free, key=lambda m: self.load[m])
                free.remove(taker)
                for shard in lists[giver]:
                    self._place(shard, taker)
        count = Counter(self.placed[shard] for shard in shards)
        for shard in sorted((s for s in shards if self.placed[s] is None), key=lambda s: -self._sizes[s]):
            taker = min(self._takers(shard), key=lambda m: (count[m], self.load[m]))
            count[taker] += 1
            self._place(shard, taker)
        while (move := self._move(shards, count)) is not None:
            shard, taker = move
            count[self.placed[shard]] -= 1
            count[taker] += 1
            self._place(shard, taker)

    def even_out(self, hands: Iterable[Sequence[int]]) -> None:
        """Give members that have less than half of what others have further shards of these hands."""
        # A move of blocks leaves smaller differences, which are not worth further moves. Newcomers have less.
        others = {shard: hand for hand in hands for shard in hand}
        while True:
            fits = [
                (self.load[giver] - self.load[taker], shard, taker)
                for shard, hand in others.items()
                if (giver := self.placed[shard]) is not None
                for taker in self._takers(shard)
                if self.load[giver] > 2 * self.load[taker]
                and self.load[giver] - self.load[taker] > self._sizes[shard]
                and all(self.placed[each] != taker for each in hand)
            ]
            if not fits:
                return
            _, shard, taker = max(fits)
            self._place(shard, taker)

    def _takers(self, shard: int) -> list[str]:
        return [member for member in self.load if member not in self._banned[shard]]

    def _move(self, shards: Sequence[int], count: Counter[str | None]) -> tuple[int, str] | None:
        """Return a shard and its new member, where its present one has two more than that one."""
        for shard in sorted(shards, key=lambda s: -count[self.placed[s]]):
            taker = min(self._takers(shard), key=lambda m: (count[m], self.load[m]))
            if count[self.placed[shard]] > count[taker] + 1:
                return shard, taker
        return None

    def _place(self, shard: int, member: str) -> None:
        before = self.placed[shard]
        if before is not None:
            self.load[before] -= self._sizes[shard]
        self.placed[shard] = member
        self.load[member] += self._sizes[shard]
