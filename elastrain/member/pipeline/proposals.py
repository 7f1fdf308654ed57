"""Proposals of the next step's plan, which the first member of the view makes in its vote.

All members measure, and tell in their votes what has changed, so that the next first member knows as much.
"""

from __future__ import annotations

from elastrain.job.values import Shape, Vote
from elastrain.member.contract import MemberPart
from elastrain.member.pipeline.assignments import Tracing
from elastrain.member.pipeline.measures import Measures
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.plan_vote import PlanVote
from elastrain.pipeline.planning import PlanWish, first_plan, next_plan


class Proposals(MemberPart):
    """Part that owns what this member measures and has been told, and proposes plans."""

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, tracing: Tracing, out: Commands) -> None:
        self.measures = Measures()
        self._me, self._shape, self._views = me, shape, views
        self._commit, self._tracing, self._out = commit, tracing, out

    def begin(self, step: int) -> None:
        """Begin to measure another step."""
        self.measures.begin()

    def forget_view(self) -> None:
        """Forget what members of the last view have told."""
        self.measures.forget_view()

    def hear(self, member: str, vote: Vote) -> None:
        """Note what a member tells about its blocks, even if its vote comes too late to count."""
        if vote.plan is not None:
            self.measures.hear(member, vote.plan.seconds)

    def vote(self) -> PlanVote | None:
        """Return this member's say about plans. None without pipelines."""
        if self._shape.pipelining is None:
            return None
        told = PlanVote(proposed=self._propose(), seconds=self.measures.news())
        self.measures.hear(self._me, told.seconds)
        return told

    def _propose(self) -> PipelinePlan | None:
        """Return the next step's plan, if this member is the first of the view."""
        pipelining, traced = self._shape.pipelining, self._tracing.traced
        if pipelining is None or traced is None or self._views.view.ids[0] != self._me:
            return None
        # The plan has the members that vote, since these have traced, except for those that a newer view has lost.
        newest = self._views.newest
        members = [m for m in self._views.view.ids if newest is None or m in newest]
        wish, present = PlanWish(stages=pipelining.stages, runs=self._shape.runs), self._commit.plan
        if present is None:
            return first_plan(traced.graph, members, wish)
        return next_plan(traced.graph, present, members, wish)
