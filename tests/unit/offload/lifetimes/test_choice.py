"""Which plan is chosen of those for all orders of updates, and what is tried for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastrain.offload.planning import move_plan as plans
from elastrain.offload.planning.move_plan import better_plan, first_plan, hides_all
from elastrain.offload.planning.orders import Arrival, BlockSizes, SeenStep, StepStage, UpdateOrder
from elastrain.offload.planning.plan_search import CLOSE, Policy, choose
from elastrain.offload.planning.plan_values import Budget, LimitBelowLeastError, Plan, Played, Program, Tier
from tests.support.programs import blocks

STEP = SeenStep(
    blocks=(BlockSizes(name="b", parameter_bytes=10, gradient_bytes=10, state_bytes=20, touches=(0,)),),
    points=tuple(Arrival(stage=stage, block=0, seconds=1.0) for stage in StepStage),
)
DRIVE = Tier(name="drive", read_bytes_per_s=1e9, write_bytes_per_s=1e9)
AFTER, BEFORE = UpdateOrder.AFTER_BACKWARD, UpdateOrder.BEFORE_FORWARD
IDEAL_S = 3.0


def played(program: Program, step_s: float) -> Plan:
    figures = Played(step_s=step_s, stalls_s=(), peak_bytes=0, written_bytes=0, read_bytes=0)
    return Plan(program=program, moves=(), recomputed=(), played=figures, reason="")


def order_of(program: Program) -> UpdateOrder:
    return AFTER if program.points[-1].name == "the update of b" else BEFORE


def policy(first_s: dict[UpdateOrder, float], better_s: dict[UpdateOrder, float], asked: list[str]) -> Policy:
    def make(program: Program, _: Budget) -> Plan:
        asked.append(f"make {order_of(program).name}")
        return played(program, first_s[order_of(program)])

    def improve(plan: Plan, _: Budget) -> Plan:
        asked.append(f"improve {order_of(plan.program).name}")
        return played(plan.program, better_s[order_of(plan.program)])

    return Policy(make=make, improve=improve)


def chosen(
    first_s: dict[UpdateOrder, float], better_s: dict[UpdateOrder, float]
) -> tuple[UpdateOrder, float, list[str]]:
    asked: list[str] = []
    found = choose(STEP, 1000, (DRIVE,), policy(first_s, better_s, asked))
    return found.arranged.order, found.plan.played.step_s, asked


def test_where_the_first_order_hides_all_nothing_else_is_tried() -> None:
    assert chosen({AFTER: IDEAL_S}, {}) == (AFTER, IDEAL_S, ["make AFTER_BACKWARD"])


def test_where_the_second_order_hides_all_nothing_is_improved() -> None:
    order, _, asked = chosen({AFTER: 3.1, BEFORE: IDEAL_S}, {})
    assert (order, asked) == (BEFORE, ["make AFTER_BACKWARD", "make BEFORE_FORWARD"])


def test_an_order_that_is_far_behind_is_not_improved() -> None:
    order, step_s, asked = chosen({AFTER: 4.0 * CLOSE + 0.1, BEFORE: 4.0}, {AFTER: IDEAL_S, BEFORE: 4.0})
    assert (order, step_s, asked[2:]) == (BEFORE, 4.0, ["improve BEFORE_FORWARD"])


def test_an_order_that_is_close_is_improved_too_and_may_win() -> None:
    order, step_s, asked = chosen({AFTER: 4.01, BEFORE: 4.0}, {AFTER: 3.5, BEFORE: 3.9})
    assert (order, step_s, asked[2:]) == (AFTER, 3.5, ["improve BEFORE_FORWARD", "improve AFTER_BACKWARD"])


def test_what_improving_makes_worse_stays_as_it_was() -> None:
    assert chosen({AFTER: 4.0, BEFORE: 5.0}, {AFTER: 4.5})[:2] == (AFTER, 4.0)


@pytest.mark.parametrize("slow", [False, True])
def test_no_plan_is_tried_beyond_the_one_that_hides_all(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program, rate = blocks(4), 1e7 if slow else 1e12
    budget = Budget(limit_bytes=120 << 20, tiers=(Tier(name="drive", read_bytes_per_s=rate, write_bytes_per_s=rate),))
    first, tried = first_plan(program, budget), list[int]()
    within: Callable[..., Plan] = plans._plan_within

    def counted(*given: object, **more: object) -> Plan:
        tried.append(1)
        return within(*given, **more)

    monkeypatch.setattr(plans, "_plan_within", counted)
    found = better_plan(first, budget)
    assert hides_all(first) is not slow and bool(tried) is slow
    assert found.played.step_s <= first.played.step_s


def test_an_order_that_does_not_fit_is_left_out_and_the_other_one_taken() -> None:
    """Whether the second order is tried depends on seconds: a limit that held for the first one holds."""

    def make(program: Program, budget: Budget) -> Plan:
        if order_of(program) is BEFORE:
            raise LimitBelowLeastError(budget.limit_bytes, 2000, "the update of b")
        return played(program, 4.0)

    assert choose(STEP, 1000, (DRIVE,), Policy(make=make, improve=lambda plan, _: plan)).arranged.order is AFTER


def test_where_no_order_fits_the_smallest_limit_of_all_is_told() -> None:
    def make(program: Program, budget: Budget) -> Plan:
        raise LimitBelowLeastError(budget.limit_bytes, 2000 if order_of(program) is BEFORE else 3000, "a point")

    with pytest.raises(LimitBelowLeastError, match="a limit of 1000 bytes is too small: a point alone needs 2084"):
        choose(STEP, 1000, (DRIVE,), Policy(make=make))
