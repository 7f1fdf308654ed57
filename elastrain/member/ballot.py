"""Votes and acknowledgements of the open step; both belong to one view and are void in the next."""

from __future__ import annotations

from collections.abc import Collection

from elastrain.values import Vote


class Ballot:
    """Owns who has acknowledged which shard of this member's, and who has voted."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all. A new view asks again: who voted in the last one may be gone, and its record with it."""
        self.has_voted = False
        self._acks: dict[int, set[str]] = {}
        self._votes: dict[str, Vote] = {}

    def acknowledge(self, source: str, shards: Collection[int]) -> None:
        for shard in shards:
            self._acks.setdefault(shard, set()).add(source)  # a set: a gradient may come, and be acknowledged, twice

    def acknowledged(self, shard: int) -> set[str]:
        """Members that keep the shard's gradient, and whose state of the step before is verified."""
        return self._acks.get(shard, set())

    def cast(self, me: str, vote: Vote) -> None:
        self.has_voted = True
        self.add(me, vote)

    def add(self, member: str, vote: Vote) -> None:
        self._votes[member] = vote

    def votes(self, members: Collection[str]) -> list[Vote] | None:
        """The votes of all these members, in their order; None while one is missing."""
        # All of them: a record that one member has not voted for could be unknown to it, and undone with the others.
        if not self._votes.keys() >= set(members):
            return None
        return [self._votes[member] for member in members]
