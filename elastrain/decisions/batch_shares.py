"""Decisions about a shared evaluation: which member computes which batch now, what is missing, and when it is over.

One member, the collector, decides. It hands out batches in ascending order, a few at a time, so that a fast member gets
more of them, and a lost member leaves few behind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import heappop
from typing import NamedTuple

from elastrain.job.figures import FigureSum, written

AHEAD = 2
"""Batches that a member has at a time, so that it need not wait for the next one."""


class Hand(NamedTuple):
    """Batches that a member shall compute, and those of its earlier ones that are over."""

    member: str
    batches: tuple[int, ...]
    over: tuple[int, ...]


# Handed out and not planned: how long a batch takes is not known before, and members differ in speed.
class Shares:
    """The batches of one evaluation: those that members compute, and the figures of those that they have computed."""

    def __init__(self, plan: str, batches: int) -> None:
        self.plan = plan
        """The call with its data and batches, in words; equal on all members."""
        self.come: set[str] = set()
        """Members that have said in this view that they are in this evaluation, or that it is none of theirs."""
        self._tally = FigureSum(batches)
        self._problem = ""
        self._todo = list(range(batches))
        self._given: dict[str, set[int]] = {}
        """Member in this evaluation -> batches that it computes, or that go through a chain of which it is the head."""
        self._over: dict[str, list[int]] = {}
        """Member -> batches of which it has not been told yet that they are over."""

    @property
    def problem(self) -> str:
        """A sentence if the evaluation has failed, else ""."""
        return self._problem or self._tally.problem

    def begin_view(self) -> None:
        """Begin anew to hear from members: those of the last view may be lost, and their batches with them."""
        # Figures stay, also those of lost members: a batch that is in the sum need not be computed again.
        self.come.clear()
        self._given.clear()
        self._over.clear()
        self._todo = self._tally.missing()

    def join(self, member: str, plan: str) -> None:
        """Let a member take part. Evaluations of different data fail."""
        if plan != self.plan:
            self._problem = self._problem or (
                f"{self.plan} was called on one member and {plan} on {member}: call the same on all members, with the "
                "same data"
            )
        self.come.add(member)
        self._given.setdefault(member, set())

    def is_in(self, member: str) -> bool:
        """Return True if the member takes part."""
        return member in self._given

    def stay_out(self, member: str) -> None:
        """Note that this evaluation was before the member's time. It is not waited for."""
        self.come.add(member)

    def take(self, member: str, batch: int, figures: str, problem: str) -> None:
        """Take the figures of a batch, or the reason why it failed. A batch counts once, whoever sends it."""
        # The sender is the last member of a chain, and the batch was given to the first one.
        for taker in [taker for taker, given in self._given.items() if batch in given]:
            self._given[taker].discard(batch)
            self._over.setdefault(taker, []).append(batch)
        if problem:
            self._problem = self._problem or problem
        else:
            self._tally.add(batch, figures)

    def giver(self, rank: int, members: Sequence[str], voters: Collection[str]) -> tuple[str, ...]:
        """Return the member that gives the value of a broadcast, once all `voters` have come; else no member.

        It is the one of this rank among the `members` of the view. If that one takes no part, or the view has become
        smaller, it is the nearest one of a lower rank that does, or else the first one that does.
        """
        if not self.come >= set(voters):
            return ()
        inside = [m for m in members if m in self._given]
        lower = [m for m in inside if m in members[: rank + 1]]
        return tuple(lower[-1:] or inside[:1])

    def hand_out(self, takers: Mapping[str, int] | None = None) -> list[Hand]:
        """Return the batches that `takers` shall compute besides those that they have.

        Args:
            takers: Member -> batches that it has at a time, more for the head of a chain; None: all members.
        """
        # Whatever the other batches come to, the evaluation has failed.
        if self.problem:
            return []
        ahead = dict.fromkeys(self._given, AHEAD) if takers is None else takers
        hands = [(m, self._more(self._given[m], ahead[m])) for m in sorted(self._given) if m in ahead]
        return [Hand(m, batches, tuple(self._over.pop(m, ()))) for m, batches in hands if batches]

    def _more(self, given: set[int], ahead: int) -> tuple[int, ...]:
        found: list[int] = []
        # The last batches are handed out one at a time. Otherwise one member would have two, and another one none.
        while self._todo and len(given) < (ahead if len(self._todo) > len(self._given) else max(1, ahead - 1)):
            batch = heappop(self._todo)
            if not self._tally.has(batch):  # a member of the last view may have had it
                given.add(batch)
                found.append(batch)
        return tuple(found)

    def result(self, members: Collection[str]) -> tuple[str, str] | None:
        """Return the sum as text, and the problem, once it is known and all `members` have come. Else None."""
        # A member that has not come may have a result: that of a collector that is lost.
        if not self.come >= set(members) or not (self.problem or self._tally.is_complete):
            return None
        return ("", self.problem) if self.problem else (written(self._tally.total), "")
