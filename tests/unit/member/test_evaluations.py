"""A member's part in evaluations, where the simulator hardly gets: answers to members that others have left behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastrain import protocol as p
from elastrain.member.evaluations import Evaluations
from elastrain.member.state.ballot import Commands
from elastrain.protocol.evaluation_messages import EvaluationName, EvaluationResult, InEvaluation, OutsideEvaluation

BEHIND = EvaluationName(after=1, step=1, number=0)
"""Behind the micro-batches of step 1."""
BEFORE = EvaluationName(after=1, step=2, number=0)
"""Before those of step 2."""


def asked(name: EvaluationName, *, first: int, result: EvaluationResult | None = None) -> list[Any]:
    """What a member whose loop began with step `first`, and has reached the micro-batches of step 2, answers to m0."""
    views: Any = SimpleNamespace(me="m1", is_recovering=False, others=["m0"], voters=lambda: ("m0", "m1"))
    loop, out = SimpleNamespace(step=-1), Commands()
    commit: Any = SimpleNamespace(step=1)
    replicas: Any = SimpleNamespace(are_all=True)
    part = Evaluations(views, commit, loop, replicas, out)  # type: ignore[arg-type]
    for loop.step in range(first, 3):
        part.progress()
    if result is not None:
        part.on_result(result)
    part.on_in_evaluation("m0", InEvaluation(name=name, plan="", batches=3, done=()))
    return [each.message for each in out.take() if isinstance(each, p.SendMessage)]


def test_a_member_whose_loop_began_behind_an_evaluation_is_not_waited_for() -> None:
    assert asked(BEHIND, first=2) == [OutsideEvaluation(name=BEHIND)]


@pytest.mark.parametrize(("name", "first"), [(BEHIND, 1), (BEFORE, 2)])
def test_a_member_that_has_gone_on_without_an_evaluation_says_so(name: EvaluationName, first: int) -> None:
    (answer,) = asked(name, first=first)
    assert answer.name == name
    assert answer.problem == (
        "job.evaluate(…) was called on m0 after step 1, and m1 has gone on to step 2 without it: call it on all "
        "members alike"
    )


def test_a_member_that_has_the_result_answers_with_it() -> None:
    result = EvaluationResult(name=BEFORE, figures="{}", problem="")
    assert asked(BEFORE, first=1, result=result) == [result]
