"""Proposals of the next step's plan, which the first member of the view makes in its vote.

All members measure, and tell in their votes what has changed, so that the next first member knows as much. The first
member asks the planner when something has changed that the answer depends on, also after losses. Until an answer comes,
and where members have joined, the rule of `pipeline.planning` serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastrain import protocol as p
from elastrain.job.values import Shape, TracedGraph, Vote
from elastrain.member.contract import MemberPart, handles
from elastrain.member.pipeline.assignments import Tracing
from elastrain.member.pipeline.measures import Measures
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.memory.memory_budget import ASSUMED_MOMENTS
from elastrain.pipeline.moves import begun, has_room
from elastrain.pipeline.pipeline_plan import PipelinePlan, held
from elastrain.pipeline.planner.plan_choice import PlanQuestion
from elastrain.pipeline.planner.plan_room import PlanMemory, PlanRoom, memory_of
from elastrain.pipeline.planner.plan_vote import PlanVote, ToldMemory
from elastrain.pipeline.planner.step_profile import JobProfile, Measured, StepRates, fitted, profile_of, with_rates
from elastrain.pipeline.planning import first_plan, next_plan, pipelines_wanted
from elastrain.pipeline.standing import with_standing

FLOPS_PER_S = 1e12
"""Speed with which a profile begins. Every block is measured before the planner is asked."""
STARTING_RATES = StepRates(action_s=0.006, split_price=0.03)
"""Rates with which a profile begins."""


class Proposals(MemberPart):
    """Part that owns what this member measures and has been told, and proposes plans."""

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, tracing: Tracing, out: Commands) -> None:
        self.measures = Measures()
        self._me, self._shape, self._views = me, shape, views
        self._commit, self._tracing, self._out = commit, tracing, out
        self._profile: JobProfile | None = None
        self._has_news = False
        """True if votes have told times since the planner was last asked."""
        self._asked: tuple[tuple[int, str], int] | None = None
        """(generation and plan in force, open step) of the last question."""
        self._answer: p.Planned | None = None

    def begin(self, step: int) -> None:
        """Begin to measure another step."""
        self.measures.begin()

    def forget_view(self) -> None:
        """Forget what lost members have told of themselves, and the answer about the last view."""
        newest = self._views.newest
        self.measures.forget_view(() if newest is None else newest.ids)
        self._asked = self._answer = None

    def hear(self, member: str, vote: Vote) -> None:
        """Note what a member tells about its blocks, even if its vote comes too late to count."""
        if vote.plan is not None:
            self._has_news |= self.measures.hear(member, vote.plan)

    def vote(self, *, is_ready: bool) -> PlanVote | None:
        """Return this member's say about plans, or without pipelines how fast it is. None if it has nothing to say.

        `is_ready`: it is a ready shadow.
        """
        if self._shape.pipelining is None:
            return self.measures.of_whole_runs()
        proposed = self._propose()
        if proposed is not None and self._shape.pipelining.has_standing and not proposed.coming:
            proposed = self._with_standing(proposed)
        # A plan that stays is not proposed again, so that it does not travel in every step.
        told = replace(self.measures.news(None if proposed == self._commit.plan else proposed), is_ready=is_ready)
        self._has_news |= self.measures.hear(self._me, told)
        return told

    @handles(p.LinksTimed)
    def on_links(self, event: p.LinksTimed) -> None:
        """Note the rates of links in the last step."""
        self.measures.note_links(event.bytes_per_s)

    @handles(p.MemorySeen)
    def on_memory_seen(self, event: p.MemorySeen) -> None:
        """Note this member's memory. It is told in the next vote."""
        self.measures.note_memory(event.memory)

    @handles(p.StepTimed)
    def on_step_timed(self, event: p.StepTimed) -> None:
        """Note how long micro-batches took on this member. It counts by this member's votes only."""
        self.measures.note_step(event.micro_batch_s, has_room=event.has_room)

    @handles(p.Planned)
    def on_planned(self, event: p.Planned) -> None:
        """Note the planner's answer, if it is about this view and the plan in force."""
        # A plan of another view may have lost members. The cost of its moves counts from another plan.
        if self._is_about_now(event):
            self._answer = event

    def _is_about_now(self, event: p.Planned) -> bool:
        return (event.generation, event.present) == self._now()

    def _now(self) -> tuple[int, str] | None:
        """Return the generation and the digest of the plan in force. None if members have joined since that plan."""
        view, plan = self._views.current, self._commit.plan
        # While blocks move no other plan is sought.
        if view is None or plan is None or plan.coming or self._views.is_recovering or view != self._views.newest:
            return None
        # After losses the planner may let peers take the runs of lost members. A newcomer has told nothing yet.
        return (view.generation, plan.digest) if set(plan.members) >= set(view.ids) else None

    def progress(self) -> bool:
        """Ask the planner if something has changed that its answer depends on. Returns True if it did."""
        traced, plan = self._tracing.traced, self._commit.plan
        if traced is None or plan is None or self._views.current is None or self._views.view.ids[0] != self._me:
            return False
        now, answer = self._now(), None if self._answer is None else self._answer.answer
        # One question at a time: an answer that never comes is waited for until the plan or the view changes.
        is_open = self._answer is None or (answer is not None and answer.plan != replace(plan, standing=()))
        # Members tell their news one after the other, at a step's end: a question for each would come too early.
        asked_of, asked_in = self._asked or (None, -1)
        is_open |= asked_in > self._commit.step
        if now is None or (asked_of == now and (is_open or not self._has_news)):
            return False
        measured = self.measures.of(held(plan))
        # A plan for members of unknown memory may end them.
        if not self.measures.memory.keys() >= set(self._views.view.ids):
            return False
        if len({block for blocks in measured.values() for block in blocks}) < plan.blocks:
            return False
        self._asked, self._answer, self._has_news = (now, self._commit.step + 1), None, False
        told = {member: self.measures.memory[member] for member in self._views.view.ids}
        question = self._question(traced, plan, measured, told)
        self._out.do(p.ChoosePlan(generation=now[0], present=now[1], question=question, told=told))
        return True

    def _question(
        self, traced: TracedGraph, plan: PipelinePlan, measured: Measured, told: Mapping[str, ToldMemory]
    ) -> PlanQuestion:
        members, pipelining = self._views.view.ids, self._shape.pipelining
        assert pipelining is not None
        if self._profile is None:
            self._profile = profile_of(traced.graph, parameter_bytes(self._shape, traced), FLOPS_PER_S)
            self._profile = replace(self._profile, rates=STARTING_RATES)
        profile = replace(fitted(self._profile, measured), nodes=self._views.view.nodes)
        sizes, stretches = profile.parameter_bytes, held(plan).values()
        moved_bytes = max(sum(sizes[block] for block in its) for its in stretches) * min(2, len(plan.pipelines))
        self._profile = with_rates(profile, self.measures.told_rates, moved_bytes)
        gradient_bytes, saved_bytes = self._tracing.sizes
        # Primaries and backups of a block share its states.
        live = self._commit.roles.live
        # The backups that there are: after losses, members may have no room for more.
        backups = sum(len(holders.backups) for holders in live) / max(1, len(live))
        states = (ASSUMED_MOMENTS + 2 * backups * (1 + ASSUMED_MOMENTS)) / len(plan.pipelines)
        memory = PlanMemory(gradient_bytes=gradient_bytes, saved_bytes=saved_bytes, state_per_parameter=states)
        room = PlanRoom(profile=self._profile, memory=memory, run_length=pipelining.run_length)
        # Without memory limits the wished stages are all that is said about what a member can compute. What is free
        # says how many micro-batches may be in flight, but not what longer stretches take besides.
        wish = self._tracing.wish(self._shape.runs, plan)
        least = wish.stages if wish.is_least else len(members) // pipelines_wanted(traced.graph, len(members), wish)
        return PlanQuestion(
            members=members,
            graph=traced.graph,
            profile=self._profile,
            runs=self._shape.runs,
            present=replace(plan, standing=()),
            run_length=pipelining.run_length,
            memory=memory_of(room, told, plan),
            least_members=1 if all(its.has_limit for its in told.values()) else least,
        )

    def _propose(self) -> PipelinePlan | None:
        """Return the next step's plan, if this member is the first of the view."""
        pipelining, traced = self._shape.pipelining, self._tracing.traced
        if pipelining is None or traced is None or self._views.view.ids[0] != self._me:
            return None
        # The plan has the members that vote, since these have traced, except for those that a newer view has lost.
        newest = self._views.newest
        members = [m for m in self._views.view.ids if newest is None or m in newest]
        present = self._commit.plan
        wish = self._tracing.wish(self._shape.runs, present)
        if present is None:
            return first_plan(traced.graph, members, wish)
        if self._answer is not None and self._answer.answer is not None and self._is_about_now(self._answer):
            wanted = self._answer.answer.plan
        elif set(present.goal.members) == set(members):
            # A plan of the planner stays in force while its members do. The rule would undo it.
            return present
        else:
            wanted = next_plan(traced.graph, present, members, wish)
        named = begun(present, wanted, members, self._commit.step + 1)
        # A shadow needs memory for the blocks before its other blocks go, for which a memory limit may leave no room.
        own = self.measures.own_memory
        is_limited = own is not None and own.has_limit
        if is_limited and not has_room(named, parameter_bytes(self._shape, traced), self._room()):
            return wanted
        return named

    def _room(self) -> dict[str, int]:
        """Return the bytes that each member of the view has left, as far as it has told them."""
        told = {member: self.measures.memory.get(member) for member in self._views.view.ids}
        return {m: memory.limit_bytes - memory.taken_bytes for m, memory in told.items() if memory is not None}

    def _with_standing(self, plan: PipelinePlan) -> PipelinePlan:
        traced, present = self._tracing.traced, self._commit.plan
        assert traced is not None  # as there is a plan
        before = () if present is None else present.standing
        return with_standing(plan, before, traced.graph, parameter_bytes(self._shape, traced), self._room())


def parameter_bytes(shape: Shape, traced: TracedGraph) -> list[int]:
    """Return the bytes of parameters of each block of the graph. A weight that blocks share counts in each of them."""
    found = [0] * len(traced.graph.blocks)
    for shard in shape.shards:
        for place in {traced.places[block] for block in shard.lanes}:
            found[place] += shard.size_bytes
    return found
