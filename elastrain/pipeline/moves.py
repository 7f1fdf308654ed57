"""Moves of blocks while training goes on: which plan follows a plan, and which members are shadows meanwhile.

Pure. A move is *named* by the record that carries the coming pipelines. A member that lacks blocks of the coming plan
is a *shadow* of them: it receives their publishes, and no member waits for it. Of the shards whose primary it will be
it gets a copy of the state, and each gradient, like a new holder. A shadow is *ready* in a step if it holds the
parameters of the step before; of its coming shards also the step's gradient, from which it makes the update itself.
When all are ready the next record makes them replicas and primaries at once, and the givers stop being replicas. So no
block is published to its new primary. After `TRIES` steps the coming plan holds in any case, and all members wait for
its publish. If members are lost the move is dropped, and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from elastrain.job.pieces import STATE_PER_PARAMETER
from elastrain.pipeline.pipeline_plan import PipelinePlan, held

TRIES = 3
"""Steps in which shadows may become ready before the job waits for them."""


def shadows(plan: PipelinePlan) -> dict[str, frozenset[int]]:
    """Return the blocks of the graph that each shadow receives. Empty if no block moves."""
    return _lacking(plan, plan.goal)


def fed(plan: PipelinePlan) -> dict[str, frozenset[int]]:
    """Return the blocks whose publishes each member gets as a shadow: those that come to it, and those it keeps."""
    found, has = shadows(plan), held(plan)
    for member, blocks in plan.standing:
        found[member] = found.get(member, frozenset()) | frozenset(blocks) - has.get(member, frozenset())
    return {member: blocks for member, blocks in found.items() if blocks}


def has_room(plan: PipelinePlan, sizes: Sequence[int], room: Mapping[str, int]) -> bool:
    """Return True if every shadow of the plan has room for its blocks beside those that it computes with.

    Args:
        plan: Plan that names shadows.
        sizes: Bytes of the parameters of each block.
        room: Bytes that each member has left.
    """
    # A shadow may also get the states of the blocks before the record that ends the move.
    needed = {member: STATE_PER_PARAMETER * sum(sizes[b] for b in blocks) for member, blocks in shadows(plan).items()}
    return all(room.get(member, 0) >= size_bytes for member, size_bytes in needed.items())


def _lacking(plan: PipelinePlan, following: PipelinePlan) -> dict[str, frozenset[int]]:
    has = held(plan)
    lacking = {member: blocks - has.get(member, frozenset()) for member, blocks in held(following).items()}
    return {member: blocks for member, blocks in lacking.items() if blocks}


def begun(present: PipelinePlan, wanted: PipelinePlan, members: Collection[str], step: int) -> PipelinePlan:
    """Return the plan to propose for the step after `step`, so that the job gets to the plan `wanted`.

    It names shadows if blocks move and all members of the present plan live. Else it is `wanted` itself: a broken
    pipeline cannot wait.
    """
    still = replace(present, coming=(), named=-1)
    if set(present.members) <= set(members) and _lacking(still, wanted):
        return replace(still, coming=wanted.pipelines, named=step)
    return wanted


def moved_on(plan: PipelinePlan, voters: Mapping[str, bool], step: int, *, are_taken: bool = True) -> PipelinePlan:
    """Return the plan after the record of `step`, if none is proposed.

    voters: member -> is a ready shadow. are_taken: all shards that change their primary can be made by the next one.
    """
    lacks = shadows(plan)
    is_whole = set(plan.goal.members) <= voters.keys()
    # Votes of members that are no shadows say nothing about readiness.
    is_ready = are_taken and all(voters[member] for member in lacks if member in voters)
    return plan.goal if lacks and is_whole and (is_ready or step - plan.named >= TRIES) else plan
