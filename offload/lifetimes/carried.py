"""A plan as instructions: what to write, to let go and to read at each point, and what the point takes. Pure."""

from __future__ import annotations

from collections import defaultdict

from elastrain.offload.lifetimes.orders import Arranged, StepStage
from elastrain.offload.lifetimes.values import Kind, Move, Plan

PieceKey = tuple[Kind, int]
"""A kind and a block; for what a forward saved, the place of that forward, or `orders.needed_at` of it."""
FAR = 1 << 30


class Carried:
    """`given_up` are the places of forwards whose values are computed again."""

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
        """The next place after this one at which that happens; None where the plan has none."""
        points = self.arranged.points
        ahead = ((place + 1 + n) % self.length for n in range(self.length))
        return next((each for each in ahead if points[each] == (stage, block)), None)

    def begun_bytes(self, place: int) -> int:
        """What is made at a point and kept: gradients, what a forward saves, and what is computed again."""
        return self._begun[place]

    def distance(self, key: PieceKey, place: int) -> int:
        """How many points away the next use of a piece is."""
        return min(((use - place - 1) % self.length + 1 for use in self._uses.get(key, ())), default=FAR)
