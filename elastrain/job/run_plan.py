"""Distribution of runs to members: pure functions of the view and of what is already there.

Every run of a step goes to exactly one member, whichever members are alive, so the global batch never changes. Which
member it is changes no bit, only the time that a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastrain.job.world import FULL_QUOTA

_NOBODY_IS_SLOW: Mapping[str, int] = {}
_EFFORT = 12
"""Cost of a run for a member with a quota of one quarter. A full quota costs a quarter of it. Whole for each quota."""


def assign(
    runs: Sequence[int], loads: Mapping[str, int], quotas: Mapping[str, int] = _NOBODY_IS_SLOW
) -> dict[str, tuple[int, ...]]:
    """Distribute `runs` in contiguous slices, so that loads plus shares are as even as possible.

    loads: member in rank order -> number of runs that it has to do anyway; these stay where they are.
    quotas: member -> 1 to 4 quarters, 4 if not named. With half a quota, a run counts twice.
    """
    # Contiguous slices lie under few nodes of the fold: a member can add most of its runs before it sends anything.
    shares = _even_shares(len(runs), list(loads.values()), _efforts(loads, quotas))
    handed: dict[str, tuple[int, ...]] = {}
    start = 0
    for member, share in zip(loads, shares, strict=True):
        handed[member] = tuple(runs[start : start + share])
        start += share
    return handed


def plan(members: Iterable[str], runs: int, quotas: Mapping[str, int] = _NOBODY_IS_SLOW) -> dict[str, tuple[int, ...]]:
    """Distribute a whole step: near-equal contiguous slices by quota, the longer ones first."""
    return assign(range(runs), dict.fromkeys(members, 0), quotas)


def _efforts(members: Iterable[str], quotas: Mapping[str, int]) -> list[int]:
    """Return the cost of one run for each member, in whole numbers, so that every member gets the same answer."""
    return [_EFFORT // quotas.get(member, FULL_QUOTA) for member in members]


def _even_shares(count: int, loads: list[int], efforts: list[int]) -> list[int]:
    # A view without members is a defect of the caller.
    if not loads:
        raise ValueError("a plan needs at least one member")
    shares = [0] * len(loads)
    for _ in range(count):
        # min() takes the first of equals, so that every member comes to the same answer: earlier ranks get the rest.
        lightest = min(range(len(loads)), key=lambda i: (loads[i] + shares[i] + 1) * efforts[i])
        shares[lightest] += 1
    return shares


def level(
    runs: Mapping[str, tuple[int, ...]], fixed: Mapping[str, int], quotas: Mapping[str, int] = _NOBODY_IS_SLOW
) -> dict[str, tuple[int, ...]]:
    """Move runs from the longest list to the shortest until the lists are even.

    fixed: member -> number of runs at the head of its list that stay, because they are or may be under way.
    quotas: as in `assign`.
    """
    lists = {member: list(todo) for member, todo in runs.items()}
    effort = dict(zip(lists, _efforts(lists, quotas), strict=True))
    while True:
        # The cost of each member's list with one more run.
        shortest = min(lists, key=lambda m: (len(lists[m]) + 1) * effort[m])
        least = (len(lists[shortest]) + 1) * effort[shortest]
        # The receiver must end with less than the giver had, or a run would move back and forth for ever.
        movable = [m for m in lists if len(lists[m]) > fixed[m] and len(lists[m]) * effort[m] > least]
        if not movable:
            return {member: tuple(todo) for member, todo in lists.items()}
        longest = max(movable, key=lambda m: len(lists[m]) * effort[m])
        # From the end: the last run is least likely to have begun, and a run computed by two members is lost work.
        lists[shortest].append(lists[longest].pop())
