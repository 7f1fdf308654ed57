"""The plan of the job's first step: in force once all members of the view have traced the same graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain import protocol as p
from elastrain.job.values import OpenWork, Pipelining
from elastrain.member.member_machine import MemberMachine
from elastrain.member.pipeline.assignments import Tracing
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.pipeline.planning import PlanWish, first_plan
from elastrain.protocol.messages import HasTraced
from tests.unit.decisions import test_recovery, test_rerouting

TRACED = test_rerouting.TRACED
RUNS = 2
VIEW = test_rerouting.view("a", "b", "c")


def tracing() -> tuple[Tracing, Commands, Commit]:
    """Of the first of the view's three members."""
    out = Commands()
    views, commit = Views("a", out), Commit("a", test_rerouting.SHAPE)
    views.on_view(VIEW)
    views.switch(0)
    out.take()
    return Tracing("a", Pipelining(stages=2, micro_batches=2, run_length=1), views, commit, out), out, commit


def told_by(*members: str) -> Tracing:
    made, _, _ = tracing()
    made.on_traced(p.Traced(model=TRACED))
    for member in members:
        made.on_told(member, HasTraced(graph=TRACED.graph))
    return made


def test_the_first_plan_waits_for_all_members_and_is_that_of_the_pure_function() -> None:
    others = [member for member in VIEW.ids if member != "a"]
    waiting = told_by(*others[:-1])
    assert waiting.agree(RUNS) is None
    assert waiting.awaits_plan
    made = told_by(*others)
    wish = PlanWish(stages=2, runs=RUNS)
    assert made.agree(RUNS) == first_plan(TRACED.graph, VIEW.ids, wish) == made.plan
    assert not made.awaits_plan


def test_whoever_has_traced_tells_the_others() -> None:
    made, out, _ = tracing()
    made.on_traced(p.Traced(model=TRACED))
    assert {c.to for c in out.take() if isinstance(c, p.SendMessage)} == set(VIEW.ids) - {"a"}


def test_members_with_another_graph_end_with_one_sentence() -> None:
    made, out, _ = tracing()
    made.on_traced(p.Traced(model=TRACED))
    first, *more = TRACED.graph.blocks
    other = replace(TRACED.graph, blocks=("another", *more))
    for member in VIEW.ids[1:]:
        made.on_told(member, HasTraced(graph=other))
    assert made.agree(RUNS) is None
    failed = [c for c in out.take() if isinstance(c, p.Fail)]
    assert [each.kind for each in failed] == ["DivergedError"]
    assert f"b: {other.digest()[:8]}" in failed[0].reason
    assert f"one forward enters block {first!r} where the other enters 'another'" in failed[0].reason


def test_a_recovery_brings_what_reports_tell_and_a_plan_that_is_in_force() -> None:
    made, _, commit = tracing()
    report = test_recovery.report(work=OpenWork(traced=TRACED))
    made.on_traced(p.Traced(model=TRACED))
    made.take_up(dict.fromkeys(VIEW.ids, report), None)
    assert made.agree(RUNS) is not None
    plan = made.plan
    made.take_up(dict.fromkeys(VIEW.ids, test_recovery.report()), None)
    assert made.agree(RUNS) is None, "of the others nothing is known in this view"
    made.take_up({}, plan)
    assert made.plan == plan
    commit.advance(0, replace(test_rerouting.RECORD, step=0))
    made.take_up({}, plan)
    assert made.plan is None, "the record has the plan of every later step"


def test_nothing_counts_as_computed_before_the_first_plan_is_known() -> None:
    core = MemberMachine(me="a", shape=test_rerouting.SHAPE)
    assert not core.machine.step.are_computed()
    core.machine.step.tracing.plan = test_rerouting.PLAN
    assert core.machine.step.are_computed(), "no task is this member's"


def auto() -> tuple[Tracing, Commands]:
    _, out, commit = tracing()
    views = Views("a", out)
    views.on_view(VIEW)
    views.switch(0)
    out.take()
    return Tracing("a", Pipelining(stages=0, micro_batches=2, run_length=1), views, commit, out), out


@pytest.mark.parametrize("told", [(1, 1, 2), (1, 2, 1), (2, 1, 1)])
def test_with_auto_stages_the_member_with_least_room_decides(told: tuple[int, ...]) -> None:
    made, out = auto()
    made.on_traced(p.Traced(model=replace(TRACED, fewest=told[0])))
    sent = [c.message for c in out.take() if isinstance(c, p.SendMessage)]
    assert sent == [HasTraced(graph=TRACED.graph, fewest=told[0])] * 2
    for member, fewest in zip(VIEW.ids[1:], told[1:], strict=True):
        made.on_told(member, HasTraced(graph=TRACED.graph, fewest=fewest))
    wish = PlanWish(stages=2, runs=RUNS, is_least=True)
    assert made.agree(RUNS) == first_plan(TRACED.graph, VIEW.ids, wish)
    assert made.wish(RUNS) == wish


def test_with_auto_stages_a_newcomer_takes_what_its_peers_have_room_for() -> None:
    made, _ = auto()
    made.traced = TRACED
    present = first_plan(TRACED.graph, ("b", "c", "d", "e"), PlanWish(stages=2, runs=RUNS))
    assert made.wish(RUNS, present).stages == 2
    alone = first_plan(TRACED.graph, ("b", "c"), PlanWish(stages=1, runs=RUNS))
    assert made.wish(RUNS, alone).stages == 1
