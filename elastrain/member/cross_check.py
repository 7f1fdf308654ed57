"""Members compute a micro-batch of a neighbour's now and then: what it takes before this one may vote.

Everybody decides for itself whom it checks, and nobody waits for another's check: the votes carry what there is, and
what only one member has computed is compared with nothing. Which micro-batches these are is decided in checks.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastrain import protocol as p
from elastrain.checks import Due, neighbour, probes
from elastrain.member.commit import Commit
from elastrain.member.runs import Runs
from elastrain.member.views import Views
from elastrain.values import Check


class CrossCheck:
    """Owns what this member checks in the open step, and what came out."""

    def __init__(self, me: str, due: Due, views: Views, commit: Commit, runs: Runs) -> None:
        self._me = me
        self._due = due
        self._views = views
        self._commit = commit
        self._runs = runs
        self.begin()

    def begin(self) -> None:
        """Start anew with a step of which nothing is checked."""
        self.left = 0
        """How often this member still has to compute a neighbour's micro-batch."""
        self._results: dict[int, Check] = {}
        """Run -> what came out here of its first micro-batch."""
        self._probes: dict[str, int] = {}
        """Member -> its run whose first micro-batch a neighbour computes, too."""
        self._awaited: set[int] = set()
        """Runs of such micro-batches that the training loop is at."""

    def plan(self, runs: Mapping[str, Sequence[int]], newcomers: Collection[str] = ()) -> None:
        """Choose whom to check; all runs of the step were handed out, the same to everyone's knowledge."""
        # In other steps only newcomers are checked: they have shown nothing yet.
        everybody = self._due.is_in(self._runs.step)
        self._probes = probes(runs, None if everybody else newcomers)
        if everybody or self._me in newcomers:
            # Who has no runs has carried nothing along yet: the first time is not what counts.
            self.left = 1 if runs[self._me] else 2

    def next_run(self) -> int | None:
        """The run whose first micro-batch this member still has to compute again."""
        if not self.left or self._views.current is None:
            return None
        owner = neighbour(self._me, self._views.current.ids, self._probes)
        return None if owner is None else self._probes[owner]

    def is_done(self) -> bool:
        """Whether this member has computed all that it is to compare; the training loop sees to it."""
        return not self._awaited and self.next_run() is None

    def compute(self, run: int) -> p.Compute:
        """Describe this member's own run for the training loop; of a probe, the first micro-batch is told."""
        # Its owner tells what came out the first time, when nothing was carried along yet.
        is_probe = self._probes.get(self._me) == run
        if is_probe:
            self._awaited.add(run)
        scale = self._commit.next_scaler().scale
        return p.Compute(step=self._runs.step, run=run, loss_scale=scale, probed=is_probe)

    def recompute(self, run: int) -> p.Recompute:
        """Describe another member's run for the training loop: it counts for nothing."""
        self.left -= 1
        self._awaited.add(run)
        return p.Recompute(step=self._runs.step, run=run, loss_scale=self._commit.next_scaler().scale)

    def on_checked(self, event: p.Checked) -> None:
        # A step that begins anew is checked anew: what came out of the void attempt may be what voided it.
        if event.step != self._runs.step or self._runs.is_void:
            return
        self._awaited.discard(event.run)
        # Given up where the drive did not give activations back: the micro-batch comes again, with a check of its own.
        if event.check is None:
            self._results.pop(event.run, None)
        else:
            self._results[event.run] = event.check

    def results(self) -> tuple[Check, ...]:
        """What came out, for the vote."""
        # In the order of runs, so that the same checks make the same vote.
        return tuple(check for _, check in sorted(self._results.items()))
