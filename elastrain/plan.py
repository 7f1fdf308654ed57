"""Hands out runs: pure functions of the view and of what is already there.

Every run of a step is handed to exactly one member, whoever is alive, so the global batch never changes. Which member
it is shows in no bit, only in the time that a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def assign(runs: Sequence[int], loads: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Hand out `runs` in contiguous slices, so that each member's load and share together are as even as can be.

    loads: member in rank order -> number of runs that it still has to do anyway; these stay where they are.
    """
    # Contiguous slices lie under few nodes of the fold: a member can add most of its runs before it sends anything.
    shares = _even_shares(len(runs), list(loads.values()))
    handed: dict[str, tuple[int, ...]] = {}
    start = 0
    for member, share in zip(loads, shares, strict=True):
        handed[member] = tuple(runs[start : start + share])
        start += share
    return handed


def plan(members: Iterable[str], runs: int) -> dict[str, tuple[int, ...]]:
    """Hand out a whole step: near-equal contiguous slices, the longer ones first."""
    return assign(range(runs), dict.fromkeys(members, 0))


def _even_shares(count: int, loads: list[int]) -> list[int]:
    # A view without members has nothing to hand out to, and is a defect of the caller.
    if not loads:
        raise ValueError("a plan needs at least one member")
    shares = [0] * len(loads)
    for _ in range(count):
        # min() takes the first of equals, so that every member comes to the same answer: earlier ranks get the rest.
        lightest = min(range(len(loads)), key=lambda i: loads[i] + shares[i])
        shares[lightest] += 1
    return shares


def level(runs: Mapping[str, tuple[int, ...]], fixed: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Even out what members have to do, by moving runs from the longest list to the shortest.

    fixed: member -> how many runs at the head of its list stay, because it computes them already or may begin to.
    """
    lists = {member: list(todo) for member, todo in runs.items()}
    while True:
        shortest = min(lists, key=lambda m: len(lists[m]))
        # A difference of one cannot be evened out: moving a run would only turn it around, for ever.
        movable = [m for m in lists if len(lists[m]) > fixed[m] and len(lists[m]) - len(lists[shortest]) >= 2]
        if not movable:
            return {member: tuple(todo) for member, todo in lists.items()}
        longest = max(movable, key=lambda m: len(lists[m]))
        # From the end: what comes last is least likely to have been begun, and a run in two hands would be lost work.
        lists[shortest].append(lists[longest].pop())
