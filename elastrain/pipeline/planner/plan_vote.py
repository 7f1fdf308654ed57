"""The part of a member's vote that is about who computes what in the steps to come."""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.step_profile import NOISE, BlockSeconds


@dataclass(frozen=True, kw_only=True)
class ToldMemory:
    """Memory of one member under the plan in force."""

    limit_bytes: int
    """Most bytes that it may hold: its memory limit. Without one, what it holds and its part of what is available."""
    base_bytes: int
    """Part of what it holds that belongs to no block: interpreter, libraries, data."""
    taken_bytes: int
    """All that it holds. With a memory limit this is the most in a step."""
    has_limit: bool = False
    """True if a memory limit was set. The member ends if a plan does not fit."""
    activations_leave: bool = False
    """True if saved activations may move to disk."""

    def is_news(self, told: ToldMemory | None) -> bool:
        """Return True if this is to be told after `told`: the room for blocks has changed by more than its noise."""
        room_bytes = self.limit_bytes - self.base_bytes
        return told is None or abs(room_bytes - told.limit_bytes + told.base_bytes) > NOISE * room_bytes


@dataclass(frozen=True, kw_only=True)
class PlanVote:
    """A member's say about the plan of pipelines, or about the runs of a job without pipelines."""

    # Only the first member of the view proposes a plan, so that planning need not give the same result on all members.
    proposed: PipelinePlan | None = None
    """Proposed assignment of blocks to members from the next step on."""
    seconds: tuple[tuple[int, BlockSeconds], ...] = ()
    """Blocks of the graph whose seconds on this member have changed by more than their noise."""
    rates: tuple[tuple[str, float], ...] = ()
    """Likewise `action_s` and `step_s`, by name, and the rates of links, by the member that sends."""
    memory: ToldMemory | None = None
    """This member's memory, if it has changed by more than its noise."""
    micro_batch_s: float | None = None
    """Without pipelines: seconds of a micro-batch on this member. None if it did not compute enough of them."""
    is_full: bool = False
    """Without pipelines: True if this member's memory limit has no room for more runs. All shares are equal then."""
    is_ready: bool = False
    """True if this member is a shadow that holds all parameters of the step before the one of the vote."""
    hands: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Shards of this primary -> their holders if the coming plan holds from the next step on, the primary first."""
    lacks_taker: bool = False
    """True if a shard of this primary has to change its primary with the coming plan, and the next one lacks data."""
