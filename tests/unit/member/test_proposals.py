"""Proposals of plans: when the planner is asked, which of its answers count, and what serves meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain import protocol as p
from elastrain.job.pieces import STATE_PER_PARAMETER
from elastrain.job.values import Pipelining, ShardShape
from elastrain.job.world import View
from elastrain.member.pipeline.assignments import Tracing
from elastrain.member.pipeline.proposals import Proposals, parameter_bytes
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan
from elastrain.pipeline.planner.line_ups import re_routed
from elastrain.pipeline.planner.plan_choice import PlanAnswer, choose_plan
from elastrain.pipeline.planner.plan_vote import PlanVote, ToldMemory
from elastrain.pipeline.planner.step_profile import WINDOW, BlockSeconds
from elastrain.pipeline.planning import PlanWish, next_plan
from tests.unit.decisions import test_rerouting
from tests.unit.member.test_runs import VOTE

RUNS = 2
SHAPE = replace(test_rerouting.SHAPE, runs=RUNS, pipelining=Pipelining(stages=2, micro_batches=RUNS, run_length=1))
TRACED = test_rerouting.TRACED
PLAN = test_rerouting.PLAN
OTHER = PipelinePlan(blocks=2, pipelines=(Pipeline(members=("b", "a"), cuts=(1,), share=RUNS, limits=(3, 1)),))
TWO = PipelinePlan(
    blocks=2,
    pipelines=tuple(Pipeline(members=its, cuts=(1,), share=1, limits=(2, 1)) for its in (("a", "b"), ("c", "d"))),
)
MEMORY = ToldMemory(limit_bytes=1000, base_bytes=200, taken_bytes=500)
SECOND = BlockSeconds(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0)


class Made:
    """Proposals of a member, of the view's two members."""

    def __init__(self, me: str = "a", *, has_standing: bool = False) -> None:
        assert SHAPE.pipelining is not None
        shape = replace(SHAPE, pipelining=replace(SHAPE.pipelining, has_standing=has_standing))
        self.out = Commands()
        self.views, self.commit = Views(me, self.out), Commit(me, shape)
        tracing = Tracing(me, shape.pipelining, self.views, self.commit, self.out)
        tracing.traced = TRACED
        self.own = Proposals(me, shape, self.views, self.commit, tracing, self.out)
        self.see(test_rerouting.view("a", "b"))
        self.pass_with(PLAN)

    def see(self, view: View) -> None:
        self.views.on_view(view)
        self.views.switch(0)
        self.views.is_recovering = False
        self.own.forget_view()
        self.out.take()

    def pass_with(self, plan: PipelinePlan) -> None:
        self.commit.advance(self.commit.step + 1, replace(test_rerouting.RECORD, plan=plan))

    def tell(self, member: str, *blocks: int, memory: ToldMemory | None = MEMORY) -> None:
        told = tuple((block, SECOND) for block in blocks)
        self.own.hear(member, replace(VOTE, plan=PlanVote(seconds=told, memory=memory)))

    def questions(self) -> list[p.ChoosePlan]:
        self.own.progress()
        return [each for each in self.out.take() if isinstance(each, p.ChoosePlan)]

    def proposed(self) -> PipelinePlan | None:
        vote = self.own.vote(is_ready=False)
        assert vote is not None
        return vote.proposed


def answer(question: p.ChoosePlan, plan: PipelinePlan | None = OTHER) -> p.Planned:
    found = None if plan is None else PlanAnswer(plan=plan, step_s=1.0, reason="")
    return p.Planned(generation=question.generation, present=question.present, answer=found)


def asked() -> tuple[Made, p.ChoosePlan]:
    made = Made()
    made.tell("a", 0)
    made.tell("b", 1)
    (question,) = made.questions()
    return made, question


def test_the_planner_is_asked_once_every_block_was_measured() -> None:
    made = Made()
    assert made.questions() == []
    made.tell("a", 0)
    made.tell("a", 1)
    assert made.questions() == [], "block 1 is not a's by this plan: its time may be outdated"
    made.tell("b", 1)
    (question,) = made.questions()
    assert question.question.present == PLAN
    assert question.question.members == ("a", "b")
    assert question.told == {"a": MEMORY, "b": MEMORY}
    assert question.question.memory.limits_bytes == {"a": 1000, "b": 1000}
    assert question.question.memory.may_split
    assert question.question.least_members == 2, "only a memory limit says that a member can compute more"
    assert made.questions() == [], "it was asked"


def test_the_planner_is_not_asked_before_every_member_has_told_its_memory() -> None:
    made = Made()
    made.tell("a", 0)
    made.tell("b", 1, memory=None)
    assert made.questions() == []
    made.tell("a", memory=replace(MEMORY, has_limit=True))
    made.tell("b", memory=replace(MEMORY, has_limit=True))
    (question,) = made.questions()
    assert question.question.least_members == 1
    assert not question.question.memory.may_split, "under a memory limit backwards are whole"


def test_own_memory_counts_only_once_it_was_told_in_a_vote() -> None:
    made = Made()
    made.tell("a", 0, memory=None)
    made.tell("b", 1)
    made.own.on_memory_seen(p.MemorySeen(memory=MEMORY))
    assert made.questions() == []
    made.own.vote(is_ready=False)
    assert len(made.questions()) == 1


def test_only_the_first_member_asks_and_proposes() -> None:
    made = Made("b")
    made.tell("a", 0)
    made.tell("b", 1)
    assert made.questions() == []
    assert made.proposed() is None


def test_the_answer_is_proposed_and_nothing_else_changes() -> None:
    made, question = asked()
    assert made.proposed() is None
    made.own.on_planned(answer(question))
    assert made.commit.plan == PLAN, "a plan takes effect through a record only"
    assert made.proposed() == replace(PLAN, coming=OTHER.pipelines, named=made.commit.step + 1)


@pytest.mark.parametrize("room_bytes", [STATE_PER_PARAMETER * 8, STATE_PER_PARAMETER * 8 - 1])
def test_with_a_memory_limit_the_answer_holds_at_once_where_a_shadow_has_no_room(room_bytes: int) -> None:
    made, question = asked()
    memory = replace(MEMORY, has_limit=True, taken_bytes=MEMORY.limit_bytes - room_bytes)
    made.own.on_memory_seen(p.MemorySeen(memory=memory))
    for member in "ab":
        made.tell(member, memory=memory)
    made.own.on_planned(answer(question))
    named = replace(PLAN, coming=OTHER.pipelines, named=made.commit.step + 1)
    assert made.proposed() == (named if room_bytes >= STATE_PER_PARAMETER * 8 else OTHER)


def test_standing_shadows_are_proposed_once_and_the_planner_does_not_see_them() -> None:
    made = Made(has_standing=True)
    assert made.proposed() is None, "nobody has told its memory"
    made.tell("a", 0)
    made.tell("b", 1)
    standing = replace(PLAN, standing=(("a", (1,)), ("b", (0,))))
    assert made.proposed() == standing
    made.pass_with(standing)
    assert made.proposed() is None
    (question,) = made.questions()
    assert question.question.present == PLAN
    made.own.on_planned(answer(question, PLAN))
    assert made.proposed() is None, "the planner wants the plan that is in force"
    assert made.questions() == []


def test_a_member_without_room_gives_its_standing_shadows_up() -> None:
    made = Made(has_standing=True)
    made.tell("a", 0)
    made.tell("b", 1, memory=replace(MEMORY, taken_bytes=MEMORY.limit_bytes + 1))
    made.pass_with(replace(PLAN, standing=(("a", (1,)), ("b", (0,)))))
    assert made.proposed() == replace(PLAN, standing=(("a", (1,)),))


def test_while_blocks_move_no_other_plan_is_sought() -> None:
    made, _ = asked()
    made.pass_with(replace(PLAN, coming=OTHER.pipelines, named=0))
    made.tell("a", 0)
    assert made.questions() == []
    assert made.proposed() is None


@pytest.mark.parametrize("twice", [False, True])
def test_an_answer_about_another_plan_is_dropped(twice: bool) -> None:
    made, question = asked()
    if twice:
        made.own.on_planned(answer(question))
    made.pass_with(OTHER)
    made.own.on_planned(answer(question, PLAN))
    assert made.proposed() is None


def test_an_answer_for_another_view_is_dropped() -> None:
    made, question = asked()
    made.see(replace(test_rerouting.view("a", "b"), generation=3))
    made.own.on_planned(answer(question))
    assert made.proposed() is None
    assert [each.generation for each in made.questions()] == [3], "what living members have told still holds"


WISH = PlanWish(stages=2, runs=RUNS)


def two_pipelines() -> Made:
    """Proposals of four members that have told everything; one of them is lost."""
    made = Made()
    made.see(replace(test_rerouting.view(*"abcd"), generation=3))
    made.pass_with(TWO)
    for member, block in zip("abcd", (0, 1, 0, 1), strict=True):
        made.tell(member, block)
    (question,) = made.questions()
    made.own.on_planned(answer(question))
    made.see(replace(test_rerouting.view("a", "c", "d"), generation=4))
    return made


def test_after_a_loss_the_rule_serves_until_the_planner_has_answered_about_those_that_are_left() -> None:
    made = two_pipelines()
    left = ("a", "c", "d")
    ruled, routed = next_plan(TRACED.graph, TWO, left, WISH), re_routed(TWO, left)
    assert made.proposed() == ruled != routed, "the answer about the view before has a lost member"
    (question,) = made.questions()
    assert (question.question.members, question.question.present) == (left, TWO)
    assert set(question.told) == set(left)
    chosen = choose_plan(question.question)
    assert set(chosen.plan.members) == set(left)
    made.own.on_planned(answer(question, routed))
    assert made.proposed() == routed, "no block moves, and nobody waits for a shadow"


def test_an_answer_after_the_rule_has_served_is_dropped_and_the_planner_is_asked_again() -> None:
    made = two_pipelines()
    left = ("a", "c", "d")
    (question,) = made.questions()
    ruled = made.proposed()
    assert ruled is not None
    made.pass_with(ruled)
    made.own.on_planned(answer(question, re_routed(TWO, left)))
    assert made.proposed() is None
    assert [each.present for each in made.questions()] == [ruled.digest]


def test_a_newcomer_beside_the_loss_has_told_nothing_so_the_rule_serves() -> None:
    made = two_pipelines()
    made.see(replace(test_rerouting.view("a", "c", "d", "e"), generation=5))
    assert made.questions() == []
    assert made.proposed() == next_plan(TRACED.graph, TWO, ["a", "c", "d", "e"], WISH)


def test_one_question_at_a_time_and_another_when_there_is_news() -> None:
    made, question = asked()
    made.tell("b", 1)
    assert made.questions() == [], "the first was not answered, and may never be"
    made.own.on_planned(answer(question))
    assert made.questions() == [], "the answer is to be proposed first"
    made.own.on_planned(answer(question, PLAN))
    assert made.questions() == [], "other members may have news, too, in this step"
    made.pass_with(PLAN)
    assert len(made.questions()) == 1
    made.own.on_planned(answer(question, None))
    assert made.questions() == [], "nothing has changed"
    assert made.proposed() is None


def test_a_weight_that_blocks_share_counts_in_each_of_them() -> None:
    shape = replace(
        SHAPE, blocks=3, shards=(ShardShape(size_bytes=8, lanes=(0, 1)), ShardShape(size_bytes=3, lanes=(2,)))
    )
    assert parameter_bytes(shape, replace(TRACED, places=(0, 0, 1))) == [8, 3]
    assert parameter_bytes(shape, replace(TRACED, places=(0, 1, 1))) == [8, 11]


def test_the_question_has_the_fixed_times_and_links_that_members_have_told() -> None:
    made = Made()
    made.tell("a", 0)
    made.tell("b")
    made.own.hear("b", replace(VOTE, plan=PlanVote(seconds=((1, SECOND),), rates=(("action_s", 0.5), ("a", 2e6)))))
    for _ in range(WINDOW):
        made.own.on_links(p.LinksTimed(bytes_per_s={"b": 1e6}))
    vote = made.own.vote(is_ready=False)
    assert vote is not None
    assert vote.rates == (("b", 1e6),)
    (question,) = made.questions()
    rates = question.question.profile.rates
    assert (rates.action_s, rates.links) == (0.5, (("a", "b", 1e6),))
