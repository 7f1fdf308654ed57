"""A member that knows only the digest of the plan in force asks a member that has it."""

from __future__ import annotations

from dataclasses import replace

from elastrain import protocol as p
from elastrain.member.pipeline.plan_fetch import PlanFetch
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import AskPlan, TellPlan
from tests.unit.decisions import test_recovery, test_rerouting

PLAN, RECORD = test_rerouting.PLAN, test_rerouting.RECORD
STAYS = replace(RECORD, step=2, plan=PLAN.digest)


class Made:
    def __init__(self, me: str) -> None:
        self.out, self.views = Commands(), Views(me, Commands())
        self.commit = Commit(me, test_rerouting.SHAPE)
        self.own = PlanFetch(self.views, self.commit, self.out)
        self.views.on_view(test_rerouting.view("a", "b"))
        self.views.switch(3)
        self.views.on_report("a", test_recovery.report(committed=2, record=STAYS))
        self.views.on_report("b", test_recovery.report(committed=-1, record=None))

    def sent(self) -> list[p.SendMessage]:
        return [each for each in self.out.take() if isinstance(each, p.SendMessage)]


def test_a_newcomer_asks_once_in_each_view_and_waits() -> None:
    made = Made("b")
    assert not made.own.has_plan()
    assert made.sent() == [p.SendMessage(to="a", message=AskPlan(digest=PLAN.digest))]
    assert not made.own.has_plan()
    assert made.sent() == []
    made.own.forget_view()
    assert not made.own.has_plan()
    assert len(made.sent()) == 1
    made.own.on_answer(TellPlan(plan=PLAN))
    assert made.own.has_plan()
    assert made.commit.plan is None, "it is not in that step yet"
    made.commit.advance(2, STAYS)
    assert made.commit.plan == PLAN


def test_a_member_that_has_the_plan_keeps_it_while_records_name_it() -> None:
    made = Made("a")
    made.commit.advance(1, RECORD)
    made.commit.advance(2, STAYS)
    assert made.commit.plan == PLAN
    assert made.own.has_plan()
    made.own.on_question("b", AskPlan(digest=PLAN.digest))
    made.own.on_question("b", AskPlan(digest="of another plan"))
    assert made.sent() == [p.SendMessage(to="b", message=TellPlan(plan=PLAN))]


def test_a_plan_that_was_not_asked_for_is_dropped() -> None:
    made = Made("b")
    made.own.on_answer(TellPlan(plan=PLAN))
    assert not made.own.has_plan()
