"""What this member's tracing pass has found, who else has traced, and the plan of the job's first step.

Every later plan comes with a record. The first one is a pure function of the view and of the block graph: it is in
force on a member as soon as that knows that all members of its view have traced the same graph.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastrain import protocol as p
from elastrain.errors import ConfigError
from elastrain.member.commands import Commands
from elastrain.member.commit import Commit
from elastrain.member.views import Views
from elastrain.messages import HasTraced
from elastrain.pipeline.graph import BlockGraph, check_stages
from elastrain.pipeline.plan import PipelinePlan
from elastrain.pipeline.planning import PlanWish, first_plan
from elastrain.values import Pipelining, Report, TracedGraph
from elastrain.voting import different_graphs


class Tracing:
    """Owns this member's graph, the graphs that others have told in this view, and the first step's plan."""

    def __init__(self, me: str, pipelining: Pipelining | None, views: Views, commit: Commit, out: Commands) -> None:
        self.pipelining = pipelining
        self.traced: TracedGraph | None = None
        """What this member's tracing pass has found; None before, and without pipelines."""
        self.plan: PipelinePlan | None = None
        """Of the job's first step, once it is in force; None in every other step: the record has theirs."""
        self._me = me
        self._views = views
        self._commit = commit
        self._out = out
        self._told: dict[str, BlockGraph] = {}
        """Member of the view -> the graph that it has traced."""

    @property
    def awaits_plan(self) -> bool:
        """The job's first step is open, and this member does not know yet who computes what of it."""
        return self.pipelining is not None and self._commit.is_initial and self.plan is None

    def on_traced(self, event: p.Traced) -> None:
        assert self.pipelining is not None
        self.traced = event.model
        try:
            check_stages(event.model.graph, self.pipelining.stages)
        except ConfigError as error:
            self._out.fail("ConfigError", str(error))
            return
        # Every later plan comes with a record: nobody asks for the graph of a member that comes then.
        if self._commit.is_initial:
            self._told[self._me] = event.model.graph
            self._out.send_all(self._views.others, HasTraced(graph=self._told[self._me]))

    def on_told(self, source: str, message: HasTraced) -> None:
        self._told[source] = message.graph

    def resume(self, reports: Mapping[str, Report], plan: PipelinePlan | None) -> None:
        """A recovery has been decided. `plan`: that of the open step, if any member of the view knows it."""
        told = {member: report.work.traced for member, report in reports.items()}
        # It may have traced after its own report; the others get its word in this view then.
        told[self._me] = self.traced
        self._told = {member: traced.graph for member, traced in told.items() if traced is not None}
        self.plan = plan if self._commit.is_initial else None

    def agree(self, runs: int) -> PipelinePlan | None:
        """The first step's plan, once all members of the view have traced. Where their graphs differ, the job ends."""
        members = self._views.view.ids
        # Not before all have: who has not traced cannot name a block, and who differs would compute by another plan.
        if self.traced is None or self.pipelining is None or not self._told.keys() >= set(members):
            return None
        for member in members:
            if (where := self._told[members[0]].difference(self._told[member])) is not None:
                told = {each: self._told[each].digest() for each in (members[0], member)}
                self._out.fail("DivergedError", different_graphs(self._commit.step + 1, told, where))
                return None
        wish = PlanWish(stages=self.pipelining.stages, runs=runs)
        self.plan = first_plan(self.traced.graph, members, wish)
        return self.plan
