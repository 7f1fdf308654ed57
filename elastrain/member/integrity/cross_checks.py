"""Second computations of other members' work: `Auditing` repeats whole runs, `CrossCheck` single micro-batches.

Results of a second computation are not added to the gradient; they go into the vote. No member waits for another's
check, and a result without a second one is compared with nothing. audits.py and checks.py choose the runs and
micro-batches, and judge differences.
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
    """Part that owns the runs that this member audits in the open step, and their results."""

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, runs: Runs) -> None:
        self._me = me
        self._shape = shape
        self._views = views
        self._commit = commit
        self._runs = runs
        self._voted: tuple[int, tuple[Check, ...]] = (-1, ())
        """Step of the last vote, and the results in it. They are kept when the step begins anew."""
        self.accused: tuple[Accusation, ...] = ()
        """Accusations that this member found in the votes, until all members have them."""
        self._convicted = (-1, 0)
        """Step in which this member was last found at fault, and the generation of these votes."""
        self.begin(runs.step)

    def begin(self, step: int) -> None:
        """Start anew with a step of which nothing is audited."""
        self._audits = Audits()
        self._owners: dict[int, str] = {}
        """Run -> its owner, the member whose result counts."""
        self._results: dict[int, Check | None] = {}
        """Run -> result computed here. None if a drive did not give activations back."""
        self._awaited: set[int] = set()
        """Audited runs that the training loop has been given and has not finished."""

    def plan(self, runs: Mapping[str, Sequence[int]], *, is_anew: bool = False) -> None:
        """Choose the audits of a step whose runs were all handed out. All members choose alike."""
        plan, count = self._shape.audit, self._shape.runs
        self._audits = audits_of(plan, self._runs.step, count, tuple(runs), is_anew=is_anew)
        self.hand(runs)

    def hand(self, runs: Mapping[str, Sequence[int]]) -> None:
        """Note the new owners of runs that are handed out again."""
        # A run that stays with its owner is not in `runs`: that owner sends its result.
        self._owners.update({run: member for member, todo in runs.items() for run in todo})

    def next_run(self) -> int | None:
        """Return the next run that this member has to begin to audit, or None."""
        return next((run for run in self.left() if run not in self._awaited), None)

    def left(self) -> list[int]:
        """Return the runs that this member has to audit and whose results are not here."""
        if self._views.current is None:
            return []
        return [run for run in self._audits.runs if run not in self._results and self._is_mine(run)]

    def _is_mine(self, run: int) -> bool:
        # A lost member sends no result, so its runs are compared with nothing.
        owner, living = self._owners[run], self._views.view.ids
        known = owner in self._audits.ring and owner in living
        return known and self._me in self._audits.auditors_of(owner, living)

    def is_done(self) -> bool:
        """Return True once all audits of this member are computed."""
        return not self._awaited and self.next_run() is None

    def why_not_yet(self) -> str:
        """Compute all audits: they read the parameters of the open step."""
        return "" if self.is_done() else f"audits of step {self._runs.step} are still to be computed here"

    def compute(self, command: p.Compute) -> p.Compute:
        """Mark the command to compute an own run if that run is audited: its result then goes into the vote."""
        if command.run not in self._audits.runs:
            return command
        self._awaited.add(command.run)
        return replace(command, audited=True)

    def recompute(self, run: int) -> p.Recompute:
        """Return the command to compute another member's run again. The result is not added to the gradient."""
        self._awaited.add(run)
        return p.Recompute(step=self._runs.step, run=run, loss_scale=self._commit.next_scaler().scale, whole=True)

    def on_checked(self, event: p.Checked) -> None:
        """Note the result of an audited run."""
        if event.step != self._runs.step or self._runs.is_void:
            return
        # None counts as done: otherwise a drive that does not give activations back would be asked for ever.
        self._awaited.discard(event.run)
        self._results[event.run] = event.check

    def results(self) -> tuple[Check, ...]:
        """Return the results for this member's vote, in the order of runs."""
        return tuple(check for _, check in sorted(self._results.items()) if check is not None)

    def told_before(self) -> tuple[Check, ...]:
        """Return the results in this member's earlier vote on this step, if that attempt was void."""
        # Another step has other micro-batches under the same numbers.
        step, checks = self._voted
        return checks if step == self._runs.step else ()

    def tell(self, checks: tuple[Check, ...]) -> None:
        """Note the results that this member's vote carries."""
        if self._shape.audit.every:
            self._voted = (self._runs.step, checks)

    def accuse(self, accused: tuple[Accusation, ...]) -> None:
        """Keep the accusations found in the votes for the next report: not all members may have got these votes."""
        self.accused = accused

    def hear(self, accused: Sequence[Accusation]) -> list[str]:
        """Take the accusations that all members know. Returns the reasons why this one is newly at fault."""
        # The generation tells repeated accusations of a later view from new ones.
        self.accused = ()
        mine = [each for each in accused if each.member == self._me and each.generation > self._convicted[1]]
        if mine:
            self._convicted = (self._runs.step, max(each.generation for each in mine))
            self._voted = (-1, ())  # a fault is counted once: it is not sent again
        return [each.reason for each in mine]

    @property
    def is_convicted(self) -> bool:
        """True if all members know that this one has computed the open step wrongly."""
        return self._convicted[0] == self._runs.step


class CrossCheck(MemberPart):
    """Part that owns the micro-batches that this member checks in the open step, and their results."""

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
        """Number of neighbours' micro-batches that this member still has to compute."""
        self._results: dict[int, Check] = {}
        """Run -> result of its first micro-batch, computed here."""
        self._probes: dict[str, int] = {}
        """Member -> its run whose first micro-batch a neighbour computes again."""
        self._awaited: set[int] = set()
        """Runs of checked micro-batches that the training loop has been given and has not finished."""

    def plan(self, runs: Mapping[str, Sequence[int]], newcomers: Collection[str] = ()) -> None:
        """Choose the checks of a step whose runs were all handed out. All members choose alike."""
        # In steps without a regular check only newcomers are checked, because they were never checked before.
        everybody = self._due.is_in(self._runs.step)
        self._probes = probes(runs, None if everybody else newcomers)
        if everybody or self._me in newcomers:
            # A member without runs has no state carried along from a first micro-batch. Its first computation does not
            # count.
            self.left = 1 if runs[self._me] else 2

    def next_run(self) -> int | None:
        """Return the run whose first micro-batch this member has to compute again, or None."""
        if not self.left or self._views.current is None:
            return None
        owner = neighbour(self._me, self._views.current.ids, self._probes)
        run = None if owner is None else self._probes[owner]
        return None if run in self._awaited else run  # each result is of a computation that began after the one before

    def is_done(self) -> bool:
        """Return True once all checks of this member are computed."""
        return not self._awaited and self.next_run() is None

    def why_not_yet(self) -> str:
        """Compute all checks: they read the parameters of the open step."""
        return (
            ""
            if self.is_done()
            else f"checks of other members' micro-batches of step {self._runs.step} are still to be computed here"
        )

    def compute(self, run: int) -> p.Compute:
        """Return the command to compute an own run, marked if a neighbour checks its first micro-batch."""
        # The owner's result is of its first computation, when no state was carried along yet.
        is_probe = self._probes.get(self._me) == run
        if is_probe:
            self._awaited.add(run)
        scale = self._commit.next_scaler().scale
        return p.Compute(step=self._runs.step, run=run, loss_scale=scale, probed=is_probe)

    def recompute(self, run: int) -> p.Recompute:
        """Return the command to compute another member's run again. The result is not added to the gradient."""
        self.left -= 1
        self._awaited.add(run)
        return p.Recompute(step=self._runs.step, run=run, loss_scale=self._commit.next_scaler().scale)

    def on_checked(self, event: p.Checked) -> None:
        """Note the result of a checked micro-batch."""
        # A step that begins anew is checked anew: a result of the void attempt may be the one that was wrong.
        if event.step != self._runs.step or self._runs.is_void:
            return
        self._awaited.discard(event.run)
        # The drive did not give activations back. The micro-batch is computed again, with a check of its own.
        if event.check is None:
            self._results.pop(event.run, None)
        else:
            self._results[event.run] = event.check

    def results(self) -> tuple[Check, ...]:
        """Return the results for this member's vote, in the order of runs."""
        return tuple(check for _, check in sorted(self._results.items()))
