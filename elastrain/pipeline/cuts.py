"""Where a pipeline is cut: the costliest member has least to do; of equally good cuts, those that move fewest blocks.

The order of the members is found with the cuts: members that were in the pipeline stay in their order, and those that
come in are put where fewest blocks move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from elastrain.pipeline.graph import BlockGraph

Had = frozenset[int]
"""The blocks of which a member is a replica before the cut."""
_Price = tuple[int, int]
"""Blocks that move, then the sum of the squared costs: what comes first counts first."""


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """Members in order and the cuts between them."""

    members: tuple[str, ...]
    cuts: tuple[int, ...]
    heaviest: int
    """FLOPs of the costliest member, for one micro-batch."""
    moved: int
    """How many blocks members get that they did not have."""


@dataclass(frozen=True)
class _Best:
    price: _Price
    members: tuple[str, ...]
    ends: tuple[int, ...]


def least_heaviest(graph: BlockGraph, members: int) -> int:
    """The FLOPs of the costliest member where a chain of so many is cut as evenly as can be.

    Raises ValueError where there are not enough legal cuts.
    """
    points = graph.points
    if not 1 <= members < len(points):
        raise ValueError(f"{members} members need {members - 1} legal cuts; there are {len(points) - 2}")
    # By point: the least that the costliest of the members so far can have, if the last of them ends there.
    least = [graph.cost(0, point) for point in points]
    for count in range(1, members):
        # Each member has blocks, so the first `count` of them end at the count-th point or later.
        least = [
            min((max(least[k], graph.cost(points[k], point)) for k in range(count, j)), default=least[j])
            for j, point in enumerate(points)
        ]
    return least[-1]


def line_up(graph: BlockGraph, staying: Sequence[tuple[str, Had]], coming: Sequence[tuple[str, Had]] = ()) -> LineUp:
    """Cut the model over all of them. `staying` keep their order; `coming` may stand anywhere between them.

    Raises ValueError where there are not enough legal cuts.
    """
    # First how heavy the costliest is, then what moves: a slow member costs in every step, a move in one commit.
    heaviest = least_heaviest(graph, len(staying) + len(coming))
    best = _search(graph, tuple(staying), tuple(coming), heaviest)
    assert best is not None, "some cut reaches the least"
    return LineUp(members=best.members, cuts=best.ends[:-1], heaviest=heaviest, moved=best.price[0])


def _search(
    graph: BlockGraph, staying: tuple[tuple[str, Had], ...], coming: tuple[tuple[str, Had], ...], heaviest: int
) -> _Best | None:
    points = graph.points
    last = len(points) - 1

    @cache
    def best_from(at: int, stood: int, left: tuple[tuple[str, Had], ...]) -> _Best | None:
        """The cheapest way to cut what lies behind point `at`, with those who have no place yet."""
        nobody_left = stood == len(staying) and not left
        if at == last or nobody_left:
            return _Best((0, 0), (), ()) if at == last and nobody_left else None
        found: _Best | None = None
        for (member, had), stood_then, left_then in _nexts(staying, stood, left):
            for to in range(at + 1, last + 1):
                cost = graph.cost(points[at], points[to])
                if cost > heaviest:
                    # Costs only grow from here on.
                    break
                rest = best_from(to, stood_then, left_then)
                if rest is None:
                    continue
                # The squares even out the others, where the costliest leaves a choice.
                moved = sum(block not in had for block in range(points[at], points[to]))
                price = (rest.price[0] + moved, rest.price[1] + cost * cost)
                # The first of equals stays: every member comes to the same cuts.
                if found is None or price < found.price:
                    found = _Best(price, (member, *rest.members), (points[to], *rest.ends))
        return found

    return best_from(0, 0, coming)


def _nexts(
    staying: tuple[tuple[str, Had], ...], stood: int, left: tuple[tuple[str, Had], ...]
) -> list[tuple[tuple[str, Had], int, tuple[tuple[str, Had], ...]]]:
    """Who may stand next: the next of those that stay, or one of those that come."""
    # Who stays comes first, so that of two equally cheap orders the one that is closest to the old one is taken.
    found = [(staying[stood], stood + 1, left)] if stood < len(staying) else []
    tried: set[Had] = set()
    for index, each in enumerate(left):
        # Of members that have the same blocks, one is as good as the other: else many newcomers would take for ever.
        if each[1] not in tried:
            tried.add(each[1])
            found.append((each, stood, (*left[:index], *left[index + 1 :])))
    return found
