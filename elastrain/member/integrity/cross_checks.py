"""Members compute runs of each other's a second time, whole: what it takes before this one may vote.

Which runs these are, and who was wrong where two results differ, is decided in audits.py. An audit counts for nothing.

Members compute a micro-batch of a neighbour's now and then: what it takes before this one may vote.

Everybody decides for itself whom it checks, and nobody waits for another's check: the votes carry what there is, and
what only one member has computed is compared with nothing. Which micro-batches these are is decided in checks.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from elastrain import protocol as p
from elastrain.integrity.audits import Audits, audits_of
from elastrain.integrity.checks import Due, neighbour, probes
from elastrain.job.values import Accusation, Check, Shape
from elastrain.member.contract import MemberPart
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.member.state.runs import Runs


class Auditing(MemberPart):
    """Owns what this member audits in the open step, and what came out."""

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, runs: Runs) -> None:
        self._me = me
        self._shape = shape
        self._views = views
        self._commit = commit
        self._runs = runs
        self._voted: tuple[int, tuple[Check, ...]] = (-1, ())
        """Step of the last vote, and what this member told in it: it stays when the step begins anew."""
        self.accused: tuple[Accusation, ...] = ()
        """What votes have shown to this member, until all have heard it."""
        self._convicted = (-1, 0)
        """The step in which this member was last found at fault, and the generation of the votes."""
        self.begin(runs.step)

    def begin(self, step: int) -> None:
        """Start anew with a step of which nothing is audited."""
        self._audits = Audits()
        self._owners: dict[int, str] = {}
        """Run -> who computes it, and counts with it."""
        self._results: dict[int, Check | None] = {}
        """Run -> what came out here; None: the drive did not give activations back."""
        self._awaited: set[int] = set()
        """Audited runs that the training loop is at."""

    def plan(self, runs: Mapping[str, Sequence[int]], *, is_anew: bool = False) -> None:
        """Choose the audits; all runs of the step were handed out, the same to everyone's knowledge."""
        plan, count = self._shape.audit, self._shape.runs
        self._audits = audits_of(plan, self._runs.step, count, tuple(runs), is_anew=is_anew)
        self.hand(runs)

    def hand(self, runs: Mapping[str, Sequence[int]]) -> None:
        """Note that runs are handed out again: others than before answer for them."""
        # What is left with its owner stays as it was: its result is told by that one.
        self._owners.update({run: member for member, todo in runs.items() for run in todo})

    def next_run(self) -> int | None:
        """The run that this member still has to audit."""
        if self._views.current is None:
            return None
        return next((run for run in self._audits.runs if run not in self._results and self._is_mine(run)), None)

    def _is_mine(self, run: int) -> bool:
        # What a member has computed that is gone is compared with nothing: it tells no result any more.
        owner, living = self._owners[run], self._views.view.ids
        known = owner in self._audits.ring and owner in living
        return known and self._me in self._audits.auditors_of(owner, living)

    def is_done(self) -> bool:
        """Whether all that is to be compared here has been computed; the training loop sees to it."""
        return not self._awaited and self.next_run() is None

    def why_not_yet(self) -> str:
        """Compute all audits: they read the parameters of the open step."""
        return "" if self.is_done() else f"audits of step {self._runs.step} are still to be computed here"

    def compute(self, command: p.Compute) -> p.Compute:
        """Describe this member's own run for the training loop; where it is audited, its result goes into the vote."""
        if command.run not in self._audits.runs:
            return command
        self._awaited.add(command.run)
        return replace(command, audited=True)

    def recompute(self, run: int) -> p.Recompute:
        """Describe another member's run for the training loop: it counts for nothing."""
        self._awaited.add(run)
        return p.Recompute(step=self._runs.step, run=run, loss_scale=self._commit.next_scaler().scale, whole=True)

    def on_checked(self, event: p.Checked) -> None:
        if event.step != self._runs.step or self._runs.is_void:
            return
        # None counts as done: what a drive does not give back would be asked for again and again.
        self._awaited.discard(event.run)
        self._results[event.run] = event.check

    def results(self) -> tuple[Check, ...]:
        """What came out, for the vote."""
        return tuple(check for _, check in sorted(self._results.items()) if check is not None)

    def told_before(self) -> tuple[Check, ...]:
        """What this member has told of this step in an earlier vote, which came to nothing."""
        # Of this very step only: another one has other micro-batches under the same numbers.
        step, checks = self._voted
        return checks if step == self._runs.step else ()

    def tell(self, checks: tuple[Check, ...]) -> None:
        """Note what this member's vote tells of its audits."""
        # Without audits nobody would read it.
        if self._shape.audit.every:
            self._voted = (self._runs.step, checks)

    def hear(self, accused: Sequence[Accusation]) -> list[str]:
        """Take in what all members hear alike. Returns why this one is at fault, as far as it did not know that."""
        # By the generation: who tells it once more in a later view does not accuse anew.
        self.accused = ()
        mine = [each for each in accused if each.member == self._me and each.generation > self._convicted[1]]
        if mine:
            self._convicted = (self._runs.step, max(each.generation for each in mine))
            self._voted = (-1, ())  # a fault is counted once: it is not told again
        return [each.reason for each in mine]

    @property
    def is_convicted(self) -> bool:
        """Whether all members know that this one has computed the open step wrongly."""
        return self._convicted[0] == self._runs.step


class CrossCheck(MemberPart):
    """Owns what this member checks in the open step, and what came out."""

    def __init__(self, me: str, due: Due, views: Views, commit: Commit, runs: Runs) -> None:
        self._me = me
        self._due = due
        self._views = views
        self._commit = commit
        self._runs = runs
        self.begin(runs.step)

    def begin(self, step: int) -> None:
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

    def why_not_yet(self) -> str:
        """Compute all checks: they read the parameters of the open step."""
        return (
            ""
            if self.is_done()
            else f"checks of other members' micro-batches of step {self._runs.step} are still to be computed here"
        )

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
