"""Hands out runs: pure functions of the view and of what is already there.

Every run of a step is handed to exactly one member, whoever is alive, so the global batch never changes. Which member
it is shows in no bit, only in the time that a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastrain.job.world import FULL_QUOTA

_NOBODY_IS_SLOW: Mapping[str, int] = {}
_EFFORT = 12
"""What a run costs a member with a quota of one quarter; with a full one, a quarter of that. Whole for each quota."""


def assign(
    runs: Sequence[int], loads: Mapping[str, int], quotas: Mapping[str, int] = _NOBODY_IS_SLOW
) -> dict[str, tuple[int, ...]]:
    """Hand out `runs` in contiguous slices, so that each member's load and share together are as even as can be.

    loads: member in rank order -> number of runs that it still has to do anyway; these stay where they are.
    quotas: member -> 1 to 4 quarters; who is not named has a full one. With half a quota, a run counts twice.
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
    """Hand out a whole step: near-equal contiguous slices, the longer ones first; smaller ones by quota."""
    return assign(range(runs), dict.fromkeys(members, 0), quotas)


def _efforts(members: Iterable[str], quotas: Mapping[str, int]) -> list[int]:
    """What one run costs each of them, in whole numbers: every member has to come to the same answer."""
    return [_EFFORT // quotas.get(member, FULL_QUOTA) for member in members]


def _even_shares(count: int, loads: list[int], efforts: list[int]) -> list[int]:
    # A view without members has nothing to hand out to, and is a defect of the caller.
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
    """Even out what members have to do, by moving runs from the longest list to the shortest.

    fixed: member -> how many runs at the head of its list stay, because it computes them already or may begin to.
    quotas: as in `assign`.
    """
    lists = {member: list(todo) for member, todo in runs.items()}
    effort = dict(zip(lists, _efforts(lists, quotas), strict=True))
    while True:
        # By what it would have to do with one more.
        shortest = min(lists, key=lambda m: (len(lists[m]) + 1) * effort[m])
        least = (len(lists[shortest]) + 1) * effort[shortest]
        # Moving a run must leave the one who gets it with less than the other had, or it would go around for ever.
        movable = [m for m in lists if len(lists[m]) > fixed[m] and len(lists[m]) * effort[m] > least]
        if not movable:
            return {member: tuple(todo) for member, todo in lists.items()}
        longest = max(movable, key=lambda m: len(lists[m]) * effort[m])
        # From the end: what comes last is least likely to have been begun, and a run in two hands would be lost work.
        lists[shortest].append(lists[longest].pop())
