"""Plans which pieces leave memory in which gaps: first what drives hide, best benefit first, then what costs least.

Pure. After G10 (arXiv 2310.09443) and TERAIO (arXiv 2506.06472): benefit is bytes × seconds above the limit while a
piece is out, cost is the I/O seconds that it books. Two things are ours: a copy is written from the last change on, so
that all gaps until the next change share it; and what cannot be hidden stalls where that is least, so that the
predicted seconds stay a number that can be checked.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.booking import Books, Offer
from elastrain.offload.planning.plan_values import Budget, Gap, Move, Plan, Played, Program, Recomputation, ideal_s
from elastrain.offload.planning.profile import size
from elastrain.offload.planning.replay import replay

TIGHTER = (0.6, 0.0)
"""Limits that are tried, too, where something stalls: parts of what lies between the least limit and the true one.

A greedy plan can be worse with more memory, as schedules can: what it keeps at first may be in the way later.
"""
RECOMPUTED = (0.34, 0.67, 1.0)
"""Parts of all recomputations that are tried beforehand: what is computed again leaves its I/O seconds to others."""
FEW_GAPS = 1000
"""Of so many gaps, plans are made in a moment: more than one can be tried."""
WORTH_TELLING = 0.001
"""Of a step: stalls below it are none."""


def make_plan(program: Program, budget: Budget) -> Plan:
    """The plan for one order of points. Raises LimitBelowLeastError, and UnplayableError where tiers are full."""
    return better_plan(first_plan(program, budget), budget)


def first_plan(program: Program, budget: Budget) -> Plan:
    """One plan, and nothing else is tried. Raises as `make_plan`."""
    facts.check_limit(program, budget)
    return _plan_within(program, budget, facts.gaps(program))


def hides_all(plan: Plan) -> bool:
    """Whether no other plan for these points can be faster, but for what is not worth telling."""
    return plan.played.step_s <= (1 + WORTH_TELLING) * ideal_s(plan.program.points)


def better_plan(plan: Plan, budget: Budget) -> Plan:
    """The best of what else can be tried where a plan stalls, until one hides all; the same one where none is better.

    Raises UnplayableError where tiers are full.
    """
    best, gaps = plan, facts.gaps(plan.program)
    if len(gaps) <= FEW_GAPS:
        others = _others(plan.program, budget, gaps)
        while not hides_all(best) and (other := next(others, None)) is not None:
            best = min(best, other, key=lambda each: each.played.step_s)
    return best


def _others(program: Program, budget: Budget, gaps: tuple[Gap, ...]) -> Iterator[Plan]:
    least, _ = facts.least_bytes(program)
    parts = [least + int(part * (budget.limit_bytes - least)) for part in TIGHTER]
    for limit_bytes in parts:
        yield _plan_within(program, budget, gaps, limit_bytes=limit_bytes)
    if inside := _most_moved(program, gaps, budget):
        for limit_bytes in (budget.limit_bytes, *parts):
            yield _plan_within(program, budget, gaps, limit_bytes=limit_bytes, in_memory=inside)
    if program.recomputations:
        for part in RECOMPUTED:
            yield _plan_within(program, budget, gaps, recomputed=part)


def _plan_within(
    program: Program,
    budget: Budget,
    gaps: tuple[Gap, ...],
    *,
    limit_bytes: int | None = None,
    recomputed: float = 0.0,
    in_memory: frozenset[int] = frozenset(),
) -> Plan:
    """The plan for a limit that may be tighter than the budget's, which it is played under.

    `in_memory` are pieces that host memory is kept for.
    """
    books = Books(program, budget if limit_bytes is None else replace(budget, limit_bytes=limit_bytes), in_memory)
    _recompute(books, recomputed)
    hide(books, gaps)
    if books.worst() is not None:
        force(books, gaps)
    moves, again = books.moves(), books.recomputed()
    played = replay(program, moves, budget, again)
    reason = _reason(program, budget, moves, again, played)
    return Plan(program=program, moves=moves, recomputed=again, played=played, reason=reason)


def _most_moved(program: Program, gaps: tuple[Gap, ...], budget: Budget) -> frozenset[int]:
    """The pieces that host memory is best used for where drives are what is short: who would be moved most often.

    What drives can hide goes to them first, one gap after the other, until they have no free second; then host memory
    is left for what is forced out last. A byte of it saves most I/O where it holds what is read several times a step.
    """
    free_bytes = sum(tier.capacity_bytes or 0 for tier in budget.tiers if tier.is_memory)
    moves: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for gap in gaps:
        moves[gap.piece].add(("read", gap.end))
        if gap.changed is not None:
            moves[gap.piece].add(("written", gap.changed))
    found = set()
    for piece in sorted(moves, key=lambda each: (-len(moves[each]), program.pieces[each].size_bytes)):
        if program.pieces[piece].size_bytes <= free_bytes:
            free_bytes -= program.pieces[piece].size_bytes
            found.add(piece)
    return frozenset(found)


def _recompute(books: Books, part: float) -> None:
    """Take a part of all recomputations, first those that free most for their seconds."""
    offers = [books.recomputed_as(each) for each in books.program.recomputations]
    found = sorted((each for each in offers if each is not None), key=lambda each: each.seconds_per_byte)
    for offer in found[: int(part * len(found))]:
        books.take(offer)


GOOD_ENOUGH = 0.1
"""Of the best bound: of thousands of gaps that are nearly alike, none has to be scored again and again.

Bounds are far too high where much is booked: plans for 0.5 and 0.1 are equally fast, and 0.1 takes half the time.
"""


def hide(books: Books, gaps: tuple[Gap, ...]) -> None:
    """Take gaps whose I/O fits into free seconds, the best benefit per second of I/O first, until all is below."""
    siblings = defaultdict(list)
    for number, gap in enumerate(gaps):
        siblings[books.version_of(gap)].append(number)
    bounds = [books.bound(gap, is_alone=len(siblings[books.version_of(gap)]) == 1) for gap in gaps]
    # A score only falls while seconds are booked and memory is freed, so an old one is a bound: who is best by his old
    # score is scored again, and taken if he still is. One copy serves all gaps of a version: where one of them is
    # taken, the others' scores rise, and they come in anew.
    heap = [(-bound, number) for number, bound in enumerate(bounds) if bound > 0]
    heapq.heapify(heap)
    while heap and books.worst() is not None:
        _, number = heapq.heappop(heap)
        gap = gaps[number]
        offer = None if books.is_out(gap) else books.hidden(gap)
        if offer is None:
            continue
        if heap and offer.score < -heap[0][0] * GOOD_ENOUGH:
            heapq.heappush(heap, (-offer.score, number))
            continue
        books.take(offer)
        if offer.write_s:
            for other in siblings[books.version_of(gap)]:
                if not books.is_out(gaps[other]) and (better := books.hidden(gaps[other])) is not None:
                    heapq.heappush(heap, (-better.score, other))


def force(books: Books, gaps: tuple[Gap, ...]) -> None:
    """At the worst point, give up what costs the fewest seconds per byte, until no point is above the limit.

    A point that is above the limit holds something that it does not use, or the limit is below the least one: so there
    is always something to take, and each round makes one piece more leave that point.
    """
    begins = np.array([gap.begin for gap in gaps])
    ends = np.array([gap.end for gap in gaps])
    while (place := books.worst()) is not None:
        choices = [*_over(books, gaps, begins, ends, place), *books.recomputed_over(place)]
        if not choices:
            name = books.program.points[place].name
            raise AssertionError(f"nothing can leave {name}, although the limit is not below the least")
        books.take(min(choices, key=lambda offer: (offer.seconds_per_byte, -offer.gain_s)))


CHOICES = 8
"""How many candidates are looked at closely: the estimate that orders them counts the same free seconds."""


def _over(books: Books, gaps: tuple[Gap, ...], begins: np.ndarray, ends: np.ndarray, place: int) -> Iterator[Offer]:
    """The gaps over a place, as they would be with stalls, the cheapest by an estimate."""
    length = books.length
    inside = np.flatnonzero(((begins < place) & (ends > place)) | (ends > place + length))
    at = {int(number): place if gaps[number].begin < place else place + length for number in inside}
    open_ones = [number for number in at if not books.is_out(gaps[number], at[number])]
    for number in heapq.nsmallest(CHOICES, open_ones, key=lambda each: books.estimate(gaps[each], at[each])):
        yield books.forced(gaps[number], at[number])


def _reason(
    program: Program, budget: Budget, moves: tuple[Move, ...], recomputed: tuple[Recomputation, ...], played: Played
) -> str:
    most_bytes, best_s = max(facts.needs(program), default=0), ideal_s(program.points)
    limit = size(budget.limit_bytes)
    if not moves and not recomputed:
        return f"the step needs {size(most_bytes)} at most, {limit} are allowed: nothing leaves"
    names = {budget.tiers[share.tier].name for move in moves for share in move.shares}
    parts = [f"the step needs {size(most_bytes)}, {limit} are allowed: {len(moves)} gaps are used"]
    parts.append(f"{size(played.written_bytes)} are written and {size(played.read_bytes)} read, by {_and(names)}")
    if recomputed:
        parts.append(f"{_and({each.name for each in recomputed})} are computed again")
    stalled_s = sum(played.stalls_s)
    if stalled_s > WORTH_TELLING * best_s:
        worst = max(range(len(played.stalls_s)), key=lambda place: played.stalls_s[place])
        parts.append(f"{stalled_s:.3g} s cannot be hidden, most of it before {program.points[worst].name}")
    else:
        parts.append("all of it is hidden")
    parts.append(f"the step takes {played.step_s:.3g} s where {best_s:.3g} s are ideal")
    return "; ".join(parts)


def _and(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nobody"
