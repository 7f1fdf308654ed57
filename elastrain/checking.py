"""Members compute a micro-batch of a neighbour's now and then: what it takes before this one may vote.

Everybody decides for itself whom it checks, and nobody waits for another's check: the votes carry what there is, and
what only one member has computed is compared with nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastrain import protocol as p
from elastrain.backing import Backing
from elastrain.checks import is_due, neighbour, probes


class Checking(Backing):
    """The part of the protocol that notices where two members are not one."""

    def _plan_checks(self, runs: Mapping[str, Sequence[int]], newcomers: Collection[str] = ()) -> None:
        """All runs of the step were handed out, the same to everyone's knowledge."""
        attempt = self.attempt
        everybody = is_due(attempt.step, self.shape.cross_check_every)
        attempt.probes = probes(runs, None if everybody else newcomers)
        if everybody or self.me in newcomers:
            # Who has no runs has carried nothing along yet: the first time is not what counts.
            attempt.recomputes = 1 if runs[self.me] else 2

    def _to_check(self) -> int | None:
        """The run whose first micro-batch this member still has to compute again."""
        attempt, view = self.attempt, self.view
        if not attempt.recomputes or view is None:
            return None
        owner = neighbour(self.me, view.ids, attempt.probes)
        return None if owner is None else attempt.probes[owner]

    def _is_checked(self) -> bool:
        """Nothing that this member is to compare is under way or to come; the training loop sees to it."""
        return not self.attempt.awaited and self._to_check() is None

    def _recompute(self, run: int) -> None:
        self.attempt.recomputes -= 1
        self.attempt.awaited.add(run)
        self._do(p.Recompute(step=self.attempt.step, run=run, loss_scale=self._scaler().scale))

    def _on_checked(self, event: p.Checked) -> None:
        attempt = self.attempt
        if event.step != attempt.step:
            return
        attempt.awaited.discard(event.run)
        if event.check is None:
            attempt.checks.pop(event.run, None)
        else:
            attempt.checks[event.run] = event.check
