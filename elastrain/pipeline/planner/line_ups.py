"""Candidates for the next plan: which members stand in which pipeline, in which order, and who re-routes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan

LineUpOf = tuple[tuple[str, ...], ...]
"""Members of each pipeline, in order."""
FEW = 5
"""Up to so many members, all ways to divide their row are candidates."""
AROUND = 3
"""With more members: so many pipelines more or less than there are now."""


def survivors(plan: PipelinePlan, members: Sequence[str]) -> LineUpOf:
    """Return the pipelines without lost members. A joined member goes to the end of the shortest."""
    alive, placed, chains = set(members), set[str](), list[list[str]]()
    for pipeline in plan.pipelines:
        chain = [m for m in pipeline.members if m in alive and m not in placed]
        placed.update(chain)
        if chain:
            chains.append(chain)
    for member in (m for m in members if m not in placed):
        min(chains, key=len).append(member) if chains else chains.append([member])
    return tuple(map(tuple, chains))


def levelled(chains: LineUpOf) -> LineUpOf:
    """Move members from the longest pipeline to the shortest until they differ by one member at most."""
    found = [list(chain) for chain in chains]
    while True:
        long, short = max(found, key=len), min(found, key=len)
        if len(long) - len(short) < 2:
            return tuple(map(tuple, found))
        short.append(long.pop())


def divided(members: Sequence[str], count: int) -> LineUpOf:
    """Divide the row of members into `count` pipelines, as even as possible, the longer ones first."""
    length, longer = divmod(len(members), count)
    ends = [(index + 1) * length + min(index + 1, longer) for index in range(count)]
    return tuple(tuple(members[a:b]) for a, b in pairwise((0, *ends)))


def line_ups(present: PipelinePlan | None, members: Sequence[str], units: int) -> list[LineUpOf]:
    """Return the candidates, those that move least first. Each pipeline has at most `units` members."""
    found: list[LineUpOf] = []
    row = tuple(members)
    # Two counts with the same longest pipeline are bound by the same member, so one of them is enough.
    counts = {-(-len(row) // length) for length in range(1, units + 1)}
    if present is not None:
        # Members keep their order, so most of them keep most of their blocks.
        own = survivors(present, members)
        row = tuple(member for chain in own for member in chain)
        found += [own, levelled(own)]
        if len(row) > 2 * FEW:
            counts &= set(range(len(own) - AROUND, len(own) + AROUND + 1))
    if len(row) <= FEW:
        cuts = [each for count in range(len(row)) for each in combinations(range(1, len(row)), count)]
        found += [tuple(row[a:b] for a, b in pairwise((0, *each, len(row)))) for each in cuts]
    found += [divided(row, count) for count in sorted(counts)]
    return [chains for chains in dict.fromkeys(found) if max(map(len, chains)) <= units]


def re_routed(plan: PipelinePlan, members: Sequence[str]) -> PipelinePlan | None:
    """Let members with the same blocks take the places of lost ones, so that no block moves.

    The runs of a broken pipeline are dealt to all of them in turn. Returns None if some place has no such member.
    """
    alive = set(members)
    peers: dict[tuple[int, int], list[str]] = {}
    for pipeline in plan.pipelines:
        for member, stretch in pipeline.stretches(plan.blocks).items():
            if member in alive and member not in peers.setdefault(stretch, []):
                peers[stretch].append(member)
    found, turns = list[Pipeline](), dict[tuple[int, int], int]()
    for pipeline in plan.pipelines:
        if alive.issuperset(pipeline.members):
            continue
        stretches = pipeline.stretches(plan.blocks)
        lost = [stretches[member] for member in pipeline.members if member not in alive]
        if not all(peers.get(stretch) for stretch in lost):
            return None
        # As many pipelines as there are peers, so that each peer takes a part of the runs.
        parts = min(max(len(peers[stretch]) for stretch in lost), max(1, pipeline.share))
        for part in range(parts):
            chain = list(pipeline.members)
            for place, member in enumerate(chain):
                if member not in alive:
                    stretch = stretches[member]
                    # In turn over all broken pipelines, so that no peer takes more than its part.
                    turns[stretch] = turns.get(stretch, -1) + 1
                    chain[place] = peers[stretch][turns[stretch] % len(peers[stretch])]
            # The first parts take what does not divide evenly.
            share = pipeline.share // parts + (part < pipeline.share % parts)
            found.append(replace(pipeline, members=tuple(chain), share=share))
    # Lower runs go first. Those of broken pipelines fill bubbles then, and do not wait until their peers have ended.
    whole = [pipeline for pipeline in plan.pipelines if alive.issuperset(pipeline.members)]
    return replace(plan, pipelines=(*found, *whole))
