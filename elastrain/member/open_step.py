"""The open step: the parts that begin anew with every step."""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.integrity.checks import Due
from elastrain.job.fold import Fold
from elastrain.job.values import Shape
from elastrain.member.contract import MemberPart, handles
from elastrain.member.integrity.cross_checks import Auditing, CrossCheck
from elastrain.member.pipeline.assignments import Tasks, Tracing
from elastrain.member.pipeline.plan_fetch import PlanFetch
from elastrain.member.pipeline.proposals import Proposals
from elastrain.member.shards.reduction import Reduction
from elastrain.member.state.ballot import Ballot, Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.member.state.runs import Runs


class OpenStep(MemberPart):
    """Parts of one step. A part that is added here begins anew with the others."""

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, out: Commands) -> None:
        first = commit.step + 1
        self.runs = Runs(Fold(shape.runs), shape.blocks, first)
        self.tracing = Tracing(me, shape.pipelining, views, commit, out)
        self.tasks = Tasks(me, self.tracing, views, commit, self.runs, out)
        self.proposals = Proposals(me, shape, views, commit, self.tracing, out)
        self.plan_fetch = PlanFetch(views, commit, out)
        self.reduction = Reduction(me, shape, views, commit.roles, self.runs, out)
        self.check = CrossCheck(me, Due(first, shape.cross_check_every), views, commit, self.runs)
        self.audits = Auditing(me, shape, views, commit, self.runs)
        self.ballot = Ballot()
        self.parts: tuple[MemberPart, ...] = (
            self.runs,
            self.tracing,
            self.reduction,
            self.tasks,
            self.proposals,
            self.plan_fetch,
            self.check,
            self.audits,
            self.ballot,
        )

    @property
    def number(self) -> int:
        """Number of the open step."""
        return self.runs.step

    @handles(p.Checked)
    def on_checked(self, event: p.Checked) -> None:
        """Note the result of a run that was computed again, or of a run's first micro-batch."""
        (self.audits if event.whole else self.check).on_checked(event)

    @handles(p.Computed)
    def on_computed(self, event: p.Computed) -> None:
        """Note a computed action, and how long it took."""
        self.proposals.measures.note(event)
        self.tasks.on_computed(event)

    def is_computing(self) -> bool:
        """Return True if work is left to compute here, or none was handed out yet."""
        return not self.tasks.are_done() if self.tasks.are_handed_out else self.runs.is_computing()

    def are_computed(self) -> bool:
        """Return True if all runs and tasks of this member have their gradients."""
        return self.tasks.are_done() and self.runs.are_computed()

    def is_done(self) -> bool:
        """Return True if this member has computed its runs and tasks, and its checks of other members."""
        # A comparison before the checks would miss parameters that are wrong in a check only. They would accuse the
        # other member.
        return self.are_computed() and self.check.is_done() and self.audits.is_done()

    def begin_attempt(self, number: int) -> None:
        """Begin step `number`, or begin it anew. All parts of the step forget the last attempt."""
        for part in self.parts:
            part.begin(number)
