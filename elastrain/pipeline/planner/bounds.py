"""The bounds of a chain in closed form: a member ends where cumulated cost equals the members' cumulated speed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from elastrain.pipeline.pipeline_plan import Bound, Cuts

ROUNDS = 32
"""Halvings in the search for the least load: they find it to nine digits."""


@dataclass(frozen=True, kw_only=True)
class Divisible:
    """The legal points of a model, `0..n`, and the cumulated seconds of the blocks before each."""

    points: tuple[int, ...]
    seconds: tuple[float, ...]

    def goals(self, speeds: Sequence[float]) -> list[float]:
        """Return where each member but the last should end, in cumulated seconds."""
        reached = list(accumulate(speeds))
        return [self.seconds[-1] * each / reached[-1] for each in reached[:-1]]


def fractional_cuts(divisible: Divisible, speeds: Sequence[float], groups: int, size: int) -> Cuts | None:
    """Return bounds that lie as near to their places as `groups` groups of runs allow, or None if they do not ascend.

    size: runs per group.
    """
    cuts: list[int | Bound] = []
    points, seconds = divisible.points, divisible.seconds
    for goal in divisible.goals(speeds):
        at = min(bisect_right(seconds, goal), len(points) - 1) - 1
        length_s = seconds[at + 1] - seconds[at]
        # Rounded to whole groups: a bound that rounds to one of its ends is a plain cut, and no block is held twice.
        deep = round(groups * (goal - seconds[at]) / length_s) if length_s > 0 else 0
        if 0 < deep < groups:
            cuts.append(Bound(points[at], points[at + 1], deep, groups, size))
        else:
            cuts.append(points[at + (deep > 0)])
    ends = [(0, 0), *((c, c) if isinstance(c, int) else c[:2] for c in cuts), (points[-1], points[-1])]
    return tuple(cuts) if all(a < d for (a, _), (_, d) in pairwise(ends)) else None


Fits = Callable[[int, int, int], bool]
"""(place in the chain, begin, end) -> True if that stretch has room on that member."""


def whole_cuts(divisible: Divisible, speeds: Sequence[float], fits: Fits) -> tuple[int, ...] | None:
    """Return the cuts with the least load of the costliest member, near to their places. None if nothing fits."""
    if not 1 <= len(speeds) < len(divisible.points):
        return None
    low_s = divisible.seconds[-1] / sum(speeds)
    high_s = divisible.seconds[-1] / min(speeds)
    if _ends(divisible, speeds, fits, high_s) is None:
        return None
    # Halving needs a bound from above that is feasible, which was checked before the loop.
    for _ in range(ROUNDS):
        middle_s = (low_s + high_s) / 2
        if _ends(divisible, speeds, fits, middle_s) is None:
            low_s = middle_s
        else:
            high_s = middle_s
    return _ends(divisible, speeds, fits, high_s)


def _ends(divisible: Divisible, speeds: Sequence[float], fits: Fits, load_s: float) -> tuple[int, ...] | None:
    """Return the cuts if each member computes at most `load_s` times its speed, as near to their places as that allows.

    Returns None if there are none.
    """
    points, seconds = divisible.points, divisible.seconds
    last, members = len(points) - 1, len(speeds)
    # From the end: the first point at which the rest of the members can begin.
    earliest = [last] * members
    for place in range(members - 1, 0, -1):
        end = earliest[place]
        begin = max(bisect_left(seconds, seconds[end] - load_s * speeds[place] * (1 + 1e-12)), place)
        while begin < end and not fits(place, points[begin], points[end]):
            begin += 1
        if begin >= end:
            return None
        earliest[place - 1] = begin
    at, found = 0, list[int]()
    for place, goal in enumerate([*divisible.goals(speeds), seconds[-1]]):
        most = bisect_right(seconds, seconds[at] + load_s * speeds[place] * (1 + 1e-12)) - 1
        # Each member behind this one needs at least one unit.
        most = min(most, last - (members - 1 - place))
        least = max(earliest[place], at + 1)
        while most > least and not fits(place, points[at], points[most]):
            most -= 1
        if most < least or not fits(place, points[at], points[most]):
            return None
        # Of all cuts with the least load, the one nearest to its place leaves the other members most even.
        near = bisect_left(seconds, goal)
        near -= near > 0 and goal - seconds[near - 1] <= seconds[near] - goal
        at = min(max(near, least), most)
        found.append(points[at])
    return tuple(found[:-1])
