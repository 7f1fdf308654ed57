"""Makes the plan of a step that was seen: of all orders in which updates may run, the one that is fastest. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastrain.offload.lifetimes.orders import Arranged, Arrival, BlockSizes, UpdateOrder, arrange
from elastrain.offload.lifetimes.plan import better_plan, first_plan, hides_all
from elastrain.offload.lifetimes.values import Budget, LimitBelowLeastError, Plan, Program, Tier, UnplayableError

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
