"""Says whether a step is still the one that its plan was made of: points, sizes, seconds, rates. Pure.

A step that differs is slower and never wrong, so that nothing is urgent: one evaluation between two steps, or a
moment in which the machine is busy, is no reason to plan anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from elastrain.offload.lifetimes.choice import SeenStep
from elastrain.offload.lifetimes.orders import StepStage
from elastrain.offload.lifetimes.values import Tier
from elastrain.offload.stats import size

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
