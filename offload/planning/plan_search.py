"""Search for the fastest plan of a measured step, and comparison of later steps with the planned one. Pure.

The search tries several orders of updates. The comparison covers points, sizes, seconds and rates. A step that differs
from its plan is slower but still correct. So one evaluation between two steps, or a busy machine, causes no new plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastrain.offload.planning.move_plan import better_plan, first_plan, hides_all
from elastrain.offload.planning.orders import Arranged, SeenStep, StepStage, UpdateOrder, arrange
from elastrain.offload.planning.plan_values import Budget, LimitBelowLeastError, Plan, Program, Tier, UnplayableError
from elastrain.offload.planning.profile import size

MARGIN_SHARE = 0.04
"""Share of the limit that plans leave free, because the kernel counts memory in its own units and with a delay."""
CLOSE = 1.05
"""An order of updates is not improved if its first plan is slower than the best plan by more than this factor.

Improving a plan gains less than that.
"""


KEPT_MEMORY_GAINS = 1.1
"""A plan that leaves room for freed memory may be slower by this factor. Fewer page faults make computing faster."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Settings of the search: how plans are made, which update orders are tried, and whether blocks are recomputed."""

    make: Callable[[Program, Budget], Plan] = first_plan
    improve: Callable[[Plan, Budget], Plan] = better_plan
    orders: tuple[UpdateOrder, ...] = tuple(UpdateOrder)
    recompute: bool = True
    keep_freed: bool = True


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan, the update order that it is made for, the bytes that it may use, and the bytes that are held besides."""

    arranged: Arranged
    plan: Plan
    usable_bytes: int
    outside_bytes: int


def choose(step: SeenStep, limit_bytes: int, tiers: tuple[Tier, ...], policy: Policy | None = None) -> ChosenPlan:
    """Return the fastest plan below a limit. Raises LimitBelowLeastError or UnplayableError."""
    policy = policy or Policy()
    outside_bytes = min(each.extra_bytes for each in step.points)  # held at all points
    seen = [replace(each, extra_bytes=each.extra_bytes - outside_bytes) for each in step.points]
    usable_bytes = int((1 - MARGIN_SHARE) * limit_bytes) - outside_bytes
    budget, found = Budget(limit_bytes=usable_bytes, tiers=tiers), list[tuple[Arranged, Plan]]()
    refused = list[LimitBelowLeastError]()
    for order in policy.orders:
        arranged = arrange(step.blocks, seen, order)
        try:
            found.append((arranged, policy.make(arranged.program, budget)))
        except LimitBelowLeastError as error:
            refused.append(error)
            continue
        if hides_all(found[-1][1]):
            break
    if not found:
        least = min(refused, key=lambda each: each.least_bytes)
        smallest_bytes = int((least.least_bytes + outside_bytes) / (1 - MARGIN_SHARE)) + 1
        raise LimitBelowLeastError(limit_bytes, smallest_bytes, least.point) from least
    arranged, plan = _fastest(found, budget, policy)
    return ChosenPlan(arranged=arranged, plan=plan, usable_bytes=usable_bytes, outside_bytes=outside_bytes)


def with_room_for_freed(
    step: SeenStep, limit_bytes: int, tiers: tuple[Tier, ...], policy: Policy, spare_bytes: int
) -> ChosenPlan | None:
    """Return the fastest plan that leaves `spare_bytes` for freed memory in the heap, or None if no plan fits."""
    try:
        return choose(step, max(0, limit_bytes - spare_bytes), tiers, policy)
    except (LimitBelowLeastError, UnplayableError):
        return None


def holes_at_most(step: SeenStep) -> int:
    """Return the estimate of freed memory that stays in the heap before it was measured: half of what forwards save."""
    return sum(each.saved_bytes for each in step.points) // 2


def gains_by_keeping(kept: ChosenPlan, other: ChosenPlan) -> bool:
    """Return True if `kept`, which has room for memory that the C library keeps, is fast enough beside `other`."""
    return kept.plan.played.step_s <= KEPT_MEMORY_GAINS * other.plan.played.step_s


def _fastest(found: list[tuple[Arranged, Plan]], budget: Budget, policy: Policy) -> tuple[Arranged, Plan]:
    """Return the fastest plan after improvement. Starts with the best first plan, and stops once nothing stalls."""
    found = sorted(found, key=lambda each: each[1].played.step_s)
    best = found[0]
    for arranged, plan in found:
        if hides_all(best[1]) or plan.played.step_s > CLOSE * best[1].played.step_s:
            break
        better = policy.improve(plan, budget)
        if better.played.step_s < best[1].played.step_s:
            best = arranged, better
    return best


SIZES_SHARE = 0.1
SECONDS_SHARE = 0.25
RATES_FACTOR = 1.5
MOST_PATIENCE_STEPS = 64


class Changed(Enum):
    """The kind of difference between a step and its plan."""

    POINTS = "points"
    SIZES = "sizes"
    TIMES = "times"


PATIENCE_STEPS = {Changed.POINTS: 2, Changed.SIZES: 2, Changed.TIMES: 4}
"""Number of consecutive steps with the same kind of difference after which a new plan is made."""


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """A difference between a step and its plan, with the reason in words."""

    changed: Changed
    reason: str


def difference(
    planned: SeenStep, now: SeenStep, tiers: Sequence[Tier], tiers_now: Sequence[Tier]
) -> StepDifference | None:
    """Return how a step differs from the planned one, or None if it does not."""
    if _points(planned) != _points(now):
        return StepDifference(
            changed=Changed.POINTS, reason="blocks run in another order, or as often as before no more"
        )
    if _can_be_again(planned) != _can_be_again(now):
        return StepDifference(changed=Changed.POINTS, reason="other blocks than before can be computed again")
    if planned.blocks != now.blocks:
        return StepDifference(
            changed=Changed.SIZES, reason="blocks hold parameters, gradients or states of other sizes"
        )
    before_bytes, now_bytes = _saved_bytes(planned), _saved_bytes(now)
    if abs(now_bytes - before_bytes) > SIZES_SHARE * before_bytes:
        reason = f"forwards save {size(now_bytes)}, no more {size(before_bytes)}"
        return StepDifference(changed=Changed.SIZES, reason=reason)
    before_s, now_s = _seconds(planned), _seconds(now)
    if abs(now_s - before_s) > SECONDS_SHARE * before_s:
        return StepDifference(changed=Changed.TIMES, reason=f"computing takes {now_s:.3g} s, no more {before_s:.3g} s")
    for tier, tier_now in zip(tiers, tiers_now, strict=True):
        if _is_other_rate(tier, tier_now):
            return StepDifference(changed=Changed.TIMES, reason=f"{tier.name} has become faster or slower")
    return None


def _points(step: SeenStep) -> tuple[list[tuple[StepStage, int]], list[int]]:
    """Return forwards and backwards in their order, and the sorted blocks of the updates.

    The plan sets the updates' order.
    """
    points = [(each.stage, each.block) for each in step.points]
    updated = sorted(block for stage, block in points if stage is StepStage.UPDATE)
    return [each for each in points if each[0] is not StepStage.UPDATE], updated


def _can_be_again(step: SeenStep) -> list[bool]:
    return [each.needed_bytes is not None for each in step.points if each.stage is StepStage.FORWARD]


def _saved_bytes(step: SeenStep) -> int:
    return sum(each.saved_bytes for each in step.points)


def _seconds(step: SeenStep) -> float:
    return sum(each.seconds for each in step.points)


def _is_other_rate(before: Tier, now: Tier) -> bool:
    ratios = (now.read_bytes_per_s / before.read_bytes_per_s, now.write_bytes_per_s / before.write_bytes_per_s)
    return any(not 1 / RATES_FACTOR <= each <= RATES_FACTOR for each in ratios)


class Patience:
    """A counter of consecutive steps that differ in the same way.

    New plans because of times double the wait for the next.
    """

    def __init__(self) -> None:
        self._last: StepDifference | None = None
        self._in_a_row = 0
        self._steps = dict(PATIENCE_STEPS)

    def is_over(self, found: StepDifference | None) -> bool:
        """Return True if enough consecutive steps have differed that a new plan is worth its time."""
        is_same = found is not None and self._last is not None and found.changed is self._last.changed
        self._in_a_row = self._in_a_row + 1 if is_same else int(found is not None)
        self._last = found
        if found is None or self._in_a_row < self._steps[found.changed]:
            return False
        self._in_a_row, self._last = 0, None
        if found.changed is Changed.TIMES:
            self._steps[found.changed] = min(MOST_PATIENCE_STEPS, 2 * self._steps[found.changed])
        return True
