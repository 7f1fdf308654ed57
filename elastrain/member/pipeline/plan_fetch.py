"""Fetch of the plan in force by a member that knows only its digest, in a recovery."""

from __future__ import annotations

from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import AskPlan, TellPlan


class PlanFetch(MemberPart):
    """Part that owns the question for a plan that this member lacks."""

    def __init__(self, views: Views, commit: Commit, out: Commands) -> None:
        self._views, self._commit, self._out = views, commit, out
        self._asked = False

    def forget_view(self) -> None:
        """Forget the question: the member that was asked may be lost."""
        self._asked = False

    def has_plan(self) -> bool:
        """Return True if the plan of the highest committed step is known here. Else ask for it, once per view."""
        reports = self._views.reports
        # A member has the plan of its own record. It stays in this step, because no step is committed without this one.
        giver = max(self._views.view.ids, key=lambda member: reports[member].committed)
        record = reports[giver].record
        if record is None or not isinstance(record.plan, str) or self._commit.plan_of(record) is not None:
            return True
        if not self._asked:
            self._asked = True
            self._out.send(giver, AskPlan(digest=record.plan))
        return False

    @handles(AskPlan)
    def on_question(self, source: str, message: AskPlan) -> None:
        """Send the plan in force."""
        plan = self._commit.plan
        if plan is not None and plan.digest == message.digest:
            self._out.send(source, TellPlan(plan=plan))

    @handles(TellPlan)
    def on_answer(self, message: TellPlan) -> None:
        """Keep the plan that was asked for."""
        if self._asked:
            self._commit.learn_plan(message.plan)
