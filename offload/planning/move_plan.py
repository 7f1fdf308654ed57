"""The planner that chooses in which gaps pieces leave memory.

It first takes gaps whose I/O is hidden behind computing, best benefit first, and then those that stall least. Pure.
After G10 (arXiv 2310.09443) and TERAIO (arXiv 2506.06472): the benefit of a gap is bytes × seconds above the limit
while the piece is out; its cost is the I/O seconds that it books. Two things are new here. A copy is written after the
last change, so all gaps until the next change share it. And I/O that cannot be hidden stalls where that costs least, so
the predicted seconds can be compared with measured ones.
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
"""Tighter limits that are also tried if a plan stalls, as fractions of the way from the smallest limit to the true one.

A greedy plan can be worse with more memory: pieces that it keeps at first may be in the way later.
"""
RECOMPUTED = (0.34, 0.67, 1.0)
"""Fractions of all recomputations that are tried in advance.

Recomputed values leave their I/O seconds to other pieces.
"""
FEW_GAPS = 1000
"""Largest number of gaps for which several plans are tried; planning then takes a moment."""
WORTH_TELLING = 0.001
"""Fraction of a step below which stalls are ignored."""


def make_plan(program: Program, budget: Budget) -> Plan:
    """Return the best plan for one order of points.

    Raises LimitBelowLeastError, or UnplayableError if the tiers are full.
    """
    return better_plan(first_plan(program, budget), budget)


def first_plan(program: Program, budget: Budget) -> Plan:
    """Return the first plan without trying alternatives. Raises the same errors as `make_plan`."""
    facts.check_limit(program, budget)
    return _plan_within(program, budget, facts.gaps(program))


def hides_all(plan: Plan) -> bool:
    """Return True if no other plan for these points can be noticeably faster."""
    return plan.played.step_s <= (1 + WORTH_TELLING) * ideal_s(plan.program.points)


def better_plan(plan: Plan, budget: Budget) -> Plan:
    """Return the best of the alternatives to a plan that stalls, or the plan itself if none is better.

    Stops at the first alternative that hides all I/O. Raises UnplayableError if the tiers are full.
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
    """Return the plan for `limit_bytes`, which may be tighter than the budget's limit.

    The replay uses the budget's limit. `in_memory` are pieces that host memory is reserved for.
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
    """Return the pieces to keep host memory for if drives are the bottleneck: those that would be moved most often.

    The planner gives drives the I/O that they can hide first, until they have no free second. Host memory would then be
    left for pieces that are forced out last. It saves most I/O per byte for pieces that are read several times a step.
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
    """Take a fraction of all recomputations, those with the fewest seconds per byte first."""
    offers = [books.recomputed_as(each) for each in books.program.recomputations]
    found = sorted((each for each in offers if each is not None), key=lambda each: each.seconds_per_byte)
    for offer in found[: int(part * len(found))]:
        books.take(offer)


GOOD_ENOUGH = 0.1
"""Fraction of the best bound from which on a gap is taken, so that similar gaps are not scored again and again."""


def hide(books: Books, gaps: tuple[Gap, ...]) -> None:
    """Take gaps whose I/O fits into free seconds, best benefit per I/O second first, until all points fit."""
    siblings = defaultdict(list)
    for number, gap in enumerate(gaps):
        siblings[books.version_of(gap)].append(number)
    bounds = [books.bound(gap, is_alone=len(siblings[books.version_of(gap)]) == 1) for gap in gaps]
    # Scores only fall while seconds are booked and memory is freed, so an old score is an upper bound. The gap with the
    # best old score is scored again, and taken if it is still the best. All gaps of a version share one copy. Once one
    # of them is taken, the others' scores rise, so they are pushed again.
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
    """Remove what costs the fewest seconds per byte from the worst point, until no point is above the limit.

    Every point above the limit holds a piece that it does not use, since `check_limit` has passed. So there is always a
    piece to take, and each round makes one more piece leave that point.
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
"""Number of candidates that are examined closely. Their estimates all count the same free seconds."""


def _over(books: Books, gaps: tuple[Gap, ...], begins: np.ndarray, ends: np.ndarray, place: int) -> Iterator[Offer]:
    """Yield offers for the gaps over a place, with their stalls; the cheapest by an estimate come first."""
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
    return ", ".join(sorted(names)) or "no tier"
