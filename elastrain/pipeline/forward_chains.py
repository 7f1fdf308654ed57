"""Chains of members through which the batches of an evaluation go, with forwards only. Pure.

The plan of pipelines is for the runs of a step. An evaluation goes by what members hold now, also after a loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class ChainStage(NamedTuple):
    """Consecutive blocks `[begin, end)` of a chain, and the member that computes them."""

    member: str
    begin: int
    end: int


Chain = tuple[ChainStage, ...]


def forward_chains(units: Sequence[tuple[int, int]], holders: Mapping[str, Collection[int]]) -> dict[str, Chain]:
    """Return one chain from the batch to the result for each member that holds the first blocks, by that member.

    Empty if some block has no holder.

    Args:
        units: Blocks `[begin, end)` between neighbouring legal cuts, ascending.
        holders: Member -> blocks that it can compute, in rank order.
    """
    # The least loaded member comes first, and of equals the one that reaches furthest. Loads are blocks and not FLOPs,
    # since all chains get batches at the pace at which they finish them.
    loads, found = dict.fromkeys(holders, 0), dict[str, Chain]()
    for head in holders:
        stages, at = list[ChainStage](), units[0][0]
        while at < units[-1][1]:
            reach = {member: _reach(units, blocks, at) for member, blocks in holders.items()}
            able = [member for member in holders if reach[member] > at]
            if not stages:
                able = [member for member in able if member == head]
            if not able:
                break
            # The chains of several pipelines shall not meet on one member; and each cut costs a transfer.
            member = min(able, key=lambda m: (loads[m], -reach[m]))
            loads[member] += reach[member] - at
            stages.append(ChainStage(member, at, reach[member]))
            at = reach[member]
        else:
            found[head] = tuple(stages)
    return found


def _reach(units: Sequence[tuple[int, int]], blocks: Collection[int], at: int) -> int:
    """Return the last legal cut up to which these blocks reach from the cut `at`."""
    for begin, end in units:
        if begin == at and all(block in blocks for block in range(begin, end)):
            at = end
    return at
