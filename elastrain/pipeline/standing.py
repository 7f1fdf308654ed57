"""Standing shadows: members that keep the parameters of blocks which only one member computes. Pure.

A standing shadow gets each publish of its blocks behind all members that are waited for. If the only replica is lost,
recovery lets the shadow adopt the blocks. Nothing has to be published to it then, if it has read the whole publish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.pipeline_plan import PipelinePlan, held, replicas

SPARE = 2
"""A member becomes a standing shadow if it has room for this many times the bytes. So room that changes a little does
not change the plan."""

Standing = tuple[tuple[str, tuple[int, ...]], ...]
"""Member and blocks, in the order of members."""


def with_standing(
    plan: PipelinePlan, present: Standing, graph: BlockGraph, sizes: Sequence[int], room: Mapping[str, int]
) -> PipelinePlan:
    """Return the plan with a standing shadow for each block of one replica, as far as members have room.

    Args:
        plan: Plan without blocks that move.
        present: Standing shadows until now. They stay where they can, because another one would have to get the blocks.
        graph: Block graph of the model.
        sizes: Bytes of the parameters of each block.
        room: Bytes that each member has left, the present shadows counted as taken.
    """
    has = held(plan)
    sole = {block for block, of in enumerate(replicas(plan)) if len(of) == 1}
    # A member without room gives up all of its shadows: it may need the memory for its tasks.
    before = {member: set(blocks) for member, blocks in present if room.get(member, -1) >= 0}
    left, load = dict(room), {member: graph_cost(graph, blocks) for member, blocks in has.items()}
    found: dict[str, list[int]] = {}
    for begin, end in graph.units:
        unit = range(begin, end)
        if not sole.issuperset(unit):
            continue
        able = [member for member in plan.members if member in left and not has[member].issuperset(unit)]
        size = sum(sizes[block] for block in unit)
        stays = [member for member in able if before.get(member, set()).issuperset(unit)]
        roomy = [member for member in able if left[member] >= SPARE * size]
        # The least loaded one, because it will compute them after the loss.
        if not (stays or roomy):
            continue
        member = min(stays or roomy, key=lambda each: load[each])
        found[member] = [*found.get(member, ()), *unit]
        load[member] += graph.cost(begin, end)
        left[member] -= 0 if stays else size
    return replace(plan, standing=tuple((member, tuple(found[member])) for member in plan.members if member in found))


def graph_cost(graph: BlockGraph, blocks: frozenset[int]) -> int:
    """Return the FLOPs of these blocks."""
    return sum(graph.flops[block] for block in blocks)
