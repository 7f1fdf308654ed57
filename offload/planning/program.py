"""Facts about a program, such as its gaps and the smallest limit; and a plan as instructions for each point. Pure."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from elastrain.offload.planning.orders import Arranged, StepStage
from elastrain.offload.planning.plan_values import (
    Budget,
    Gap,
    Kind,
    LimitBelowLeastError,
    MemoryPiece,
    Move,
    Plan,
    Program,
)


def gaps_of(index: int, piece: MemoryPiece, length: int) -> tuple[Gap, ...]:
    """Return the gaps of one piece on a ring of `length` points. During a gap, its content must be kept somewhere."""
    changes = [use.point for use in piece.uses if use.changes or use.begins]
    found = []
    for begin, end, begins_anew in neighbours(piece, length):
        if begins_anew:
            continue  # its content is not needed after the use at `begin`
        before = [place for place in changes if place <= begin]
        changed = max(before) if before else max(changes) - length if changes else None
        found.append(Gap(piece=index, begin=begin, end=end, changed=changed))
    return tuple(gap for gap in found if gap.end - gap.begin > 1)


def neighbours(piece: MemoryPiece, length: int) -> list[tuple[int, int, bool]]:
    """Return (point, next point, whether the next use begins anew) for each use.

    The last use's next is in the next step.
    """
    following = [*piece.uses[1:], piece.uses[0]]
    return [
        (use.point, after.point if after.point > use.point else after.point + length, after.begins)
        for use, after in zip(piece.uses, following, strict=True)
    ]


def gaps(program: Program) -> tuple[Gap, ...]:
    """Return the gaps of all pieces."""
    length = len(program.points)
    return tuple(gap for index, piece in enumerate(program.pieces) for gap in gaps_of(index, piece, length))


def is_alive_across(piece: MemoryPiece) -> bool:
    """Return True if the piece must be kept from the end of a step to its first use in the next one."""
    return not piece.uses[0].begins


def needs(program: Program) -> list[int]:
    """Return the bytes of memory that each point needs if no piece ever leaves."""
    length = len(program.points)
    change = [0] * (2 * length + 1)
    for piece in program.pieces:
        change[0] += piece.size_bytes
        for begin, end, begins_anew in neighbours(piece, length):
            if begins_anew:  # nothing has to be kept in between
                change[begin + 1] -= piece.size_bytes
                change[end] += piece.size_bytes
    # Places from `length` on belong to the first points of the next step.
    kept = list(accumulate(change))
    whole = kept[2 * length]
    return [
        point.extra_bytes + kept[place] + kept[place + length] - whole for place, point in enumerate(program.points)
    ]


def least_bytes(program: Program) -> tuple[int, int]:
    """Return the smallest possible limit, where each piece is in memory only when used, and the point that needs it."""
    used = [point.extra_bytes for point in program.points]
    for piece in program.pieces:
        for use in piece.uses:
            used[use.point] += piece.size_bytes
    most = max(range(len(used)), key=lambda place: used[place])
    return used[most], most


def check_limit(program: Program, budget: Budget) -> None:
    """Raise LimitBelowLeastError if the budget's limit is below the smallest possible one."""
    least, point = least_bytes(program)
    if least > budget.limit_bytes:
        raise LimitBelowLeastError(budget.limit_bytes, least, program.points[point].name)


PieceKey = tuple[Kind, int]
"""Key of a piece: its kind and its block.

For values that a forward saved, the second item is the place of that forward, or `orders.needed_at` of it.
"""
FAR = 1 << 30


class Carried:
    """A plan as instructions for each point: what to copy, what to let go, and what to read.

    `given_up` are the places of forwards whose saved values are computed again.
    """

    def __init__(self, arranged: Arranged, plan: Plan) -> None:
        self.arranged, self.plan = arranged, plan
        self.length = len(arranged.points)
        self.copies: dict[int, list[PieceKey]] = defaultdict(list)
        self.leaves: dict[int, list[PieceKey]] = defaultdict(list)
        self.reads: dict[int, list[tuple[int, PieceKey]]] = defaultdict(list)
        self.shares: dict[PieceKey, tuple[tuple[int, int], ...]] = {}
        for move in plan.moves:
            self._add(move)
        for due in self.reads.values():
            due.sort(key=lambda each: each[0])
        self.given_up = frozenset(each.after for each in plan.recomputed)
        self._begun: dict[int, int] = defaultdict(int)
        for each in plan.recomputed:
            self._begun[each.again] += sum(plan.program.pieces[piece].size_bytes for piece in each.pieces)
        self._uses: dict[PieceKey, list[int]] = {}
        for key, piece in zip(arranged.pieces, arranged.program.pieces, strict=True):
            self._uses[key] = [use.point for use in piece.uses if not use.begins]
            for use in piece.uses:
                self._begun[use.point] += piece.size_bytes * use.begins

    def _add(self, move: Move) -> None:
        key = self.arranged.pieces[move.gap.piece]
        self.shares[key] = tuple((share.tier, share.size_bytes) for share in move.shares)
        if move.write_after is not None and key[0] is not Kind.ACTIVATION:
            self.copies[move.write_after % self.length].append(key)
        self.leaves[move.gap.begin % self.length].append(key)
        self.reads[move.read_at % self.length].append((move.gap.end - move.read_at, key))

    def follow(self, place: int, stage: StepStage, block: int) -> int | None:
        """Return the next place after `place` at which this stage of this block runs, or None if the plan has none."""
        points = self.arranged.points
        ahead = ((place + 1 + n) % self.length for n in range(self.length))
        return next((each for each in ahead if points[each] == (stage, block)), None)

    def begun_bytes(self, place: int) -> int:
        """Return the bytes that a point creates: gradients, values that a forward saves, and recomputed values."""
        return self._begun[place]

    def distance(self, key: PieceKey, place: int) -> int:
        """Return the number of points until the next use of a piece, or `FAR` if the piece has no use."""
        return min(((use - place - 1) % self.length + 1 for use in self._uses.get(key, ())), default=FAR)
