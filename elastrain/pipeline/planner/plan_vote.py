"""The part of a member's vote that is about pipelines."""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.step_profile import BlockSeconds


@dataclass(frozen=True, kw_only=True)
class PlanVote:
    """A member's say about the plan of pipelines."""

    # Only the first member of the view proposes a plan, so that planning need not give the same result on all members.
    proposed: PipelinePlan | None = None
    """Proposed assignment of blocks to members from the next step on."""
    seconds: tuple[tuple[int, BlockSeconds], ...] = ()
    """Blocks of the graph whose seconds on this member have changed by more than their noise."""
    rates: tuple[tuple[str, float], ...] = ()
    """Likewise `action_s` and `step_s`, by name, and the rates of links, by the member that sends."""
