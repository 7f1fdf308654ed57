"""Decisions about a shared evaluation: which member computes which batch now, what is missing, and when it is over.

One member, the collector, decides. It hands out batches in ascending order, a few at a time, so that a fast member gets
more of them, and a lost member leaves few behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heappop

from elastrain.job.figures import FigureSum, written

AHEAD = 2
"""Batches that a member has at a time, so that it need not wait for the next one."""


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
        """Member in this evaluation -> batches that it computes."""

    @property
    def problem(self) -> str:
        """A sentence if the evaluation has failed, else ""."""
        return self._problem or self._tally.problem

    def begin_view(self) -> None:
        """Begin anew to hear from members: those of the last view may be lost, and their batches with them."""
        # Figures stay, also those of lost members: a batch that is in the sum need not be computed again.
        self.come.clear()
        self._given.clear()
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

    def stay_out(self, member: str) -> None:
        """Note that this evaluation was before the member's time. It is not waited for."""
        self.come.add(member)

    def take(self, member: str, batch: int, figures: str, problem: str) -> None:
        """Take the figures of a batch, or the reason why it failed. A batch counts once, whoever sends it."""
        self._given.get(member, set()).discard(batch)
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

    def hand_out(self, takers: Collection[str] | None = None) -> list[tuple[str, tuple[int, ...]]]:
        """Return the batches that `takers` (None: all members) shall compute besides those that they have."""
        # Whatever the other batches come to, the evaluation has failed.
        if self.problem:
            return []
        takers = sorted(m for m in self._given if takers is None or m in takers)
        return [(m, batches) for m in takers if (batches := self._more(self._given[m]))]

    def _more(self, given: set[int]) -> tuple[int, ...]:
        found: list[int] = []
        # The last batches are handed out one at a time. Otherwise one member would have two, and another one none.
        while self._todo and len(given) < (AHEAD if len(self._todo) > len(self._given) else 1):
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
