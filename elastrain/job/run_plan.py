"""Distribution of runs to members: pure functions of speeds and of what is already there.

Every run of a step goes to exactly one member, whichever members are alive, so the global batch never changes. Which
member it is changes no bit, only the time that a step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heapreplace

Speeds = Mapping[str, int]
"""Member -> speed in hundredths of the median member's, for members that are not about as fast as that one."""
MEDIAN_SPEED = 100
_ALL_ALIKE: Speeds = {}


def assign(runs: Sequence[int], loads: Mapping[str, int], speeds: Speeds = _ALL_ALIKE) -> dict[str, tuple[int, ...]]:
    """Distribute `runs` in contiguous slices, so that the last member is done as early as possible.

    loads: member in rank order -> number of runs that it has to do anyway; these stay where they are.
    """
    # Contiguous slices lie under few nodes of the fold: a member can add most of its runs before it sends anything.
    shares = shares_by_speed(len(runs), [speeds.get(m, MEDIAN_SPEED) for m in loads], list(loads.values()))
    handed: dict[str, tuple[int, ...]] = {}
    start = 0
    for member, share in zip(loads, shares, strict=True):
        handed[member] = tuple(runs[start : start + share])
        start += share
    return handed


def plan(members: Iterable[str], runs: int, speeds: Speeds = _ALL_ALIKE) -> dict[str, tuple[int, ...]]:
    """Distribute a whole step: contiguous slices by speed. Of equally fast members the earlier ones get the rest."""
    return assign(range(runs), dict.fromkeys(members, 0), speeds)


def shares_by_speed(count: int, speeds: Sequence[int], loads: Sequence[int] = ()) -> list[int]:
    """Divide `count` runs among members, or chains of members, so that the last one is done as early as possible.

    `loads`: runs that each has to do anyway.
    """
    # A view without members is a defect of the caller.
    if not speeds:
        raise ValueError("a plan needs at least one member")
    found = loads or [0] * len(speeds)

    # A quotient of two integers has the same bits on every machine, so every member comes to the same answer.
    def done(place: int, share: int) -> float:
        return (found[place] + share) / speeds[place]

    return dealt(count, [(place,) for place in range(len(speeds))], done, [0] * len(speeds))


def dealt(
    count: int, classes: Iterable[Sequence[int]], done: Callable[[int, int], float], least: Sequence[int]
) -> list[int]:
    """Divide `count` runs so that each goes where it is done first, which is best for equal runs.

    Args:
        count: The number of runs.
        classes: Places that are equal, in order. All of a class take a run at once.
        done: Returns, for a place and the runs that it takes, when they are done.
        least: The runs that each place takes in any case.
    """
    shares = list(least)
    left = count - sum(shares)
    # Of equals the first one takes the run.
    heap = [(done(its[0], shares[its[0]] + 1), its[0], its) for its in classes]
    heapify(heap)
    while left > 0:
        _, first, its = heap[0]
        # That keeps the loop short with thousands of equal members.
        takers = its[:left]
        for place in takers:
            shares[place] += 1
        left -= len(takers)
        heapreplace(heap, (done(first, shares[first] + 1), first, its))
    return shares


def level(
    runs: Mapping[str, tuple[int, ...]], fixed: Mapping[str, int], speeds: Speeds = _ALL_ALIKE
) -> dict[str, tuple[int, ...]]:
    """Move runs from the member that is done last to the one that would be done first, until this gains nothing.

    fixed: member -> number of runs at the head of its list that stay, because they are or may be under way.
    """
    lists = {member: list(todo) for member, todo in runs.items()}

    def takes(member: str, more: int = 0) -> float:
        return (len(lists[member]) + more) / speeds.get(member, MEDIAN_SPEED)

    while True:
        shortest = min(lists, key=lambda m: takes(m, 1))
        # The receiver must end with less than the giver had, or a run would move back and forth for ever.
        movable = [m for m in lists if len(lists[m]) > fixed[m] and takes(m) > takes(shortest, 1)]
        if not movable:
            return {member: tuple(todo) for member, todo in lists.items()}
        # From the end: the last run is least likely to have begun, and a run computed by two members is lost work.
        lists[shortest].append(lists[max(movable, key=takes)].pop())
