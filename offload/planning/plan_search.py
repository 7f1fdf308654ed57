"""Makes the plan of a step that was seen: of all orders in which updates may run, the one that is fastest. Pure.

Says whether a step is still the one that its plan was made of: points, sizes, seconds, rates. Pure.

A step that differs is slower and never wrong, so that nothing is urgent: one evaluation between two steps, or a
moment in which the machine is busy, is no reason to plan anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from elastrain.offload.planning.move_plan import better_plan, first_plan, hides_all
from elastrain.offload.planning.orders import Arranged, Arrival, BlockSizes, StepStage, UpdateOrder, arrange
from elastrain.offload.planning.plan_values import Budget, LimitBelowLeastError, Plan, Program, Tier, UnplayableError
from elastrain.offload.planning.profile import size

MARGIN_SHARE = 0.04
"""What is left free below the limit: the kernel counts in its own units, and later than things happen."""
CLOSE = 1.05
"""Whose first plan is so many times slower than the best one is not improved: that gains less than orders differ."""


KEPT_MEMORY_GAINS = 1.1
"""A plan that leaves room for freed memory may be so many times slower: with fewer page faults it computes faster."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a plan is made, and of which orders of updates the fastest is taken; whether blocks may be computed again.

    `improve` tries what takes longer, where the first plan stalls. `keep_freed`: freed memory may stay in the heap.
    """

    make: Callable[[Program, Budget], Plan] = first_plan
    improve: Callable[[Plan, Budget], Plan] = better_plan
    orders: tuple[UpdateOrder, ...] = tuple(UpdateOrder)
    recompute: bool = True
    keep_freed: bool = True


@dataclass(frozen=True, kw_only=True)
class SeenStep:
    """One step as it was seen: what plans are made from. Points name blocks by their places in `blocks`."""

    blocks: tuple[BlockSizes, ...]
    points: tuple[Arrival, ...]

    def __post_init__(self) -> None:
        known = range(len(self.blocks))
        named = [each.block for each in self.points] + [other for each in self.blocks for other in each.touches]
        if not self.points or any(each not in known for each in named):
            raise ValueError("a step has at least one point, and each point is one of its blocks'")


@dataclass(frozen=True, kw_only=True)
class ChosenPlan:
    """A plan, the order that it is made for, and how much memory it may use of the limit; what is held besides."""

    arranged: Arranged
    plan: Plan
    usable_bytes: int
    outside_bytes: int


def choose(step: SeenStep, limit_bytes: int, tiers: tuple[Tier, ...], policy: Policy | None = None) -> ChosenPlan:
    """The fastest plan below a limit. Raises LimitBelowLeastError, UnplayableError."""
    policy = policy or Policy()
    outside_bytes = min(each.extra_bytes for each in step.points)  # held all the time, by nobody in particular
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
    """The plan beside so much freed memory that stays in the heap; None where there is none."""
    try:
        return choose(step, max(0, limit_bytes - spare_bytes), tiers, policy)
    except (LimitBelowLeastError, UnplayableError):
        return None


def holes_at_most(step: SeenStep) -> int:
    """What may be expected to stay in the heap of what forwards save, before anybody has seen it: half of it."""
    return sum(each.saved_bytes for each in step.points) // 2


def gains_by_keeping(kept: ChosenPlan, other: ChosenPlan) -> bool:
    """Whether the plan that has room for freed memory is fast enough to take it instead of the other one."""
    return kept.plan.played.step_s <= KEPT_MEMORY_GAINS * other.plan.played.step_s


def _fastest(found: list[tuple[Arranged, Plan]], budget: Budget, policy: Policy) -> tuple[Arranged, Plan]:
    """The fastest one when they are improved, the best first, and only where something stalls."""
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
    """What of a step is other than planned."""

    POINTS = "points"
    SIZES = "sizes"
    TIMES = "times"


PATIENCE_STEPS = {Changed.POINTS: 2, Changed.SIZES: 2, Changed.TIMES: 4}
"""After so many such steps in a row there is a new plan."""


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """What is other than planned, in words, too."""

    changed: Changed
    reason: str


def difference(
    planned: SeenStep, now: SeenStep, tiers: Sequence[Tier], tiers_now: Sequence[Tier]
) -> StepDifference | None:
    """How a step differs from the one that was planned for; None where it does not."""
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
    """Forwards and backwards in their order, and whose updates there were: when those run is the plan's business."""
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
    """Counts steps that differ in the same way, one after the other. Who renews often for its times waits longer."""

    def __init__(self) -> None:
        self._last: StepDifference | None = None
        self._in_a_row = 0
        self._steps = dict(PATIENCE_STEPS)

    def is_over(self, found: StepDifference | None) -> bool:
        """Whether so many steps in a row have differed that a new plan is worth its time."""
        is_same = found is not None and self._last is not None and found.changed is self._last.changed
        self._in_a_row = self._in_a_row + 1 if is_same else int(found is not None)
        self._last = found
        if found is None or self._in_a_row < self._steps[found.changed]:
            return False
        self._in_a_row, self._last = 0, None
        if found.changed is Changed.TIMES:
            self._steps[found.changed] = min(MOST_PATIENCE_STEPS, 2 * self._steps[found.changed])
        return True
