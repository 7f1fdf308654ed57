"""The search for the cuts of a pipeline and the order of its members. Pure.

It minimizes first the load of the costliest member, then the number of blocks that move. Members that were in the
pipeline keep their order. Joining members are placed where the fewest blocks move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from elastrain.pipeline.graph import BlockGraph

Had = frozenset[int]
"""The blocks of which a member is a replica before the cut."""
_Price = tuple[int, int]
"""(blocks that move, sum of the squared costs), compared in this order."""


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """Members in order and the cuts between them."""

    members: tuple[str, ...]
    cuts: tuple[int, ...]
    heaviest: int
    """FLOPs of the costliest member, for one micro-batch."""
    moved: int
    """Number of blocks that members get and did not have before."""


@dataclass(frozen=True)
class _Best:
    price: _Price
    members: tuple[str, ...]
    ends: tuple[int, ...]


def least_heaviest(graph: BlockGraph, members: int) -> int:
    """Return the FLOPs of the costliest member when the model is cut as evenly as possible over `members` members.

    Raises ValueError if there are not enough legal cuts.
    """
    points = graph.points
    if not 1 <= members < len(points):
        raise ValueError(f"{members} members need {members - 1} legal cuts; there are {len(points) - 2}")
    # By point: the smallest possible maximum over the members so far, if the last of them ends at this point.
    least = [graph.cost(0, point) for point in points]
    for count in range(1, members):
        # Every member has blocks, so the first `count` members end at the count-th point or later.
        least = [
            min((max(least[k], graph.cost(points[k], point)) for k in range(count, j)), default=least[j])
            for j, point in enumerate(points)
        ]
    return least[-1]


def line_up(graph: BlockGraph, staying: Sequence[tuple[str, Had]], coming: Sequence[tuple[str, Had]] = ()) -> LineUp:
    """Cut the model over all members. `staying` keep their order; `coming` may stand anywhere between them.

    Raises ValueError if there are not enough legal cuts.
    """
    # The maximum load comes before the moves: a slow member costs time in every step, a move only in one commit.
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
        """Return the cheapest cut of the blocks after point `at` over the members that have no place yet."""
        nobody_left = stood == len(staying) and not left
        if at == last or nobody_left:
            return _Best((0, 0), (), ()) if at == last and nobody_left else None
        found: _Best | None = None
        for (member, had), stood_then, left_then in _nexts(staying, stood, left):
            for to in range(at + 1, last + 1):
                cost = graph.cost(points[at], points[to])
                if cost > heaviest:
                    # Costs only grow with `to`.
                    break
                rest = best_from(to, stood_then, left_then)
                if rest is None:
                    continue
                # The squares even out the other members where the maximum load leaves a choice.
                moved = sum(block not in had for block in range(points[at], points[to]))
                price = (rest.price[0] + moved, rest.price[1] + cost * cost)
                # The first of equal solutions is kept, so every member finds the same cuts.
                if found is None or price < found.price:
                    found = _Best(price, (member, *rest.members), (points[to], *rest.ends))
        return found

    return best_from(0, 0, coming)


def _nexts(
    staying: tuple[tuple[str, Had], ...], stood: int, left: tuple[tuple[str, Had], ...]
) -> list[tuple[tuple[str, Had], int, tuple[tuple[str, Had], ...]]]:
    """Return the candidates for the next place: the next of the staying members, or any of those that come."""
    # The staying member comes first: of two equally cheap orders, the one closest to the old order wins.
    found = [(staying[stood], stood + 1, left)] if stood < len(staying) else []
    tried: set[Had] = set()
    for index, each in enumerate(left):
        # Members with the same blocks are interchangeable. Without this, many newcomers would make the search explode.
        if each[1] not in tried:
            tried.add(each[1])
            found.append((each, stood, (*left[:index], *left[index + 1 :])))
    return found
