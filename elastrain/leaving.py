"""The end of the training loops: who has left before which step, and what follows when not all have. No I/O.

Loops end by `until`, or by a decision of each script (`break`). Where these differ, the majority of the members decides
for all: nothing of the step in question can be committed meanwhile, since that needs everybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastrain import protocol as p
from elastrain.committing import Committing
from elastrain.messages import EndsBefore, GoesOn


def job_ends(voters: Sequence[str], left: Collection[str], going: Collection[str]) -> bool | None:
    """Whether more than half of the `voters` (in rank order) have left their loops; None: that is open yet.

    Where the two halves are equal, the lowest rank is in the one that decides.
    """
    votes_left, votes_going = (sum(voter in side for voter in voters) for side in (left, going))
    if 2 * max(votes_left, votes_going) > len(voters):
        return votes_left > votes_going
    if votes_left + votes_going == len(voters):
        return voters[0] in left
    return None


class Leaving(Committing):
    """One member's part in the end of the job."""

    def _say_done(self) -> None:
        if self._finishing is not None and self.me not in self._done and self._is_settled():
            self._done[self.me] = self._finishing
            for member in self._others:
                self._send(member, EndsBefore(step=self._finishing))

    def _is_settled(self) -> bool:
        """The last step's parameters and copies are compared, too."""
        if self.recovering or self.committed < 0 or not self._others:
            return not self.recovering
        backed = [s for s, holders in enumerate(self.now) if self.me in holders.backups]
        return (
            self._is_compared()
            and not self._digesting
            and not self._is_in_doubt()
            and all(shard in self.held and self.held[shard].version == self.committed for shard in backed)
        )

    def _go_on(self) -> None:
        """Some loops have ended before the step in which this one asks for work: all count who is in it."""
        if self._finishing is None and any(self._asked >= step for step in self._done.values()):
            self._going[self.me] = self._asked
            for member in self._others:
                self._send(member, GoesOn(step=self._asked))

    def _voters(self) -> tuple[str, ...]:
        """Who had begun to train when this view began: a newcomer's own counters may stand elsewhere."""
        assert self.view is not None
        begun = tuple(m for m in self.view.ids if self._reports[m].begun >= 0)
        return begun or self.view.ids

    def _judge_end(self) -> None:
        """All members come to the same verdict: each has left before the step or is in it, and does not change that."""
        if self.recovering or not self._done:
            return
        step = min(self._done.values())
        going = [m for m, asked in self._going.items() if asked >= step and m not in self._done]
        ends = job_ends(self._voters(), self._done, going)
        if ends is None:
            return
        if self._finishing is not None and not ends:
            self._fail(
                "StoppedError",
                f"the training loop was left here before step {self._finishing}, but {', '.join(going)} went on: leave "
                "it on all members after the same step",
            )
        elif self._finishing is None and ends and self._asked >= step:
            self._overruled, self._finishing = True, step
            self._say_done()

    def _leave(self) -> None:
        if self._finishing is not None and self.view is not None and self._done.keys() >= set(self.view.ids):
            self._let_go()

    def _let_go(self) -> None:
        self._over = True
        self._do(p.Leave(overruled=self._overruled))
