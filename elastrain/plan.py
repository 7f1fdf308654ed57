"""Who computes which runs: pure functions of the view and of what is already there.

The global batch never changes here: every run of the step is handed to exactly one member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def assign(runs: Sequence[int], loads: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Hand out `runs` so that `load + share` is as even as it can be, in contiguous slices by the members' order.

    `loads` maps every member, in rank order, to the number of runs it still has to do anyway. A member's own runs are
    not touched. Contiguous slices keep a member's runs under few nodes of the fold.
    """
    shares = _even_shares(len(runs), list(loads.values()))
    handed: dict[str, tuple[int, ...]] = {}
    start = 0
    for member, share in zip(loads, shares, strict=True):
        handed[member] = tuple(runs[start : start + share])
        start += share
    return handed


def plan(members: Iterable[str], runs: int) -> dict[str, tuple[int, ...]]:
    """The hand-out of a fresh step: near-equal contiguous slices, the longer ones first."""
    return assign(range(runs), dict.fromkeys(members, 0))


def _even_shares(count: int, loads: list[int]) -> list[int]:
    if not loads:
        raise ValueError("a plan needs at least one member")
    shares = [0] * len(loads)
    for _ in range(count):
        # min() takes the first of equals, so earlier ranks get the remainder: the same answer on every member.
        lightest = min(range(len(loads)), key=lambda i: loads[i] + shares[i])
        shares[lightest] += 1
    return shares


def level(runs: Mapping[str, tuple[int, ...]], fixed: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Even out what members have to do by moving runs that are not under way from the longest to the shortest list.

    `fixed` says how many runs at the head of each list stay where they are.
    """
    lists = {member: list(todo) for member, todo in runs.items()}
    while True:
        shortest = min(lists, key=lambda m: len(lists[m]))
        movable = [m for m in lists if len(lists[m]) > fixed[m] and len(lists[m]) - len(lists[shortest]) >= 2]
        if not movable:
            return {member: tuple(todo) for member, todo in lists.items()}
        longest = max(movable, key=lambda m: len(lists[m]))
        lists[shortest].append(lists[longest].pop())
