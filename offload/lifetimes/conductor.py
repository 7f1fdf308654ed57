"""Follows a step from point to point, asks custody for what the plan says, and measures points.

A point ends where the next one begins. What comes in another order than planned has no moves, and is served on demand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from elastrain.offload.lifetimes.custody import HeldPiece, PieceCustody
from elastrain.offload.lifetimes.measuring import PointMeter
from elastrain.offload.lifetimes.orders import Arranged, Arrival, StepStage
from elastrain.offload.lifetimes.states import PieceKey
from elastrain.offload.lifetimes.values import Kind, Move, Plan

FAR = 1 << 30
UNKNOWN_SHARE = 4
"""The part of the limit that is left to what computes, while nobody knows how much that is."""


class Carried:
    """A plan as instructions: what to write, to let go and to read at each of its points."""

    def __init__(self, arranged: Arranged, plan: Plan) -> None:
        self.arranged, self.plan = arranged, plan
        length = len(arranged.points)
        self.copies: dict[int, list[PieceKey]] = defaultdict(list)
        self.leaves: dict[int, list[PieceKey]] = defaultdict(list)
        self.reads: dict[int, list[tuple[int, PieceKey]]] = defaultdict(list)
        for move in plan.moves:
            self._add(move, length)
        for due in self.reads.values():
            due.sort(key=lambda each: each[0])
        self.extra: dict[tuple[StepStage, int], int] = {
            at: point.extra_bytes for at, point in zip(arranged.points, arranged.program.points, strict=True)
        }
        self.uses: dict[PieceKey, list[int]] = {
            key: [use.point for use in piece.uses if not use.begins]
            for key, piece in zip(arranged.pieces, arranged.program.pieces, strict=True)
            if key[0] is not Kind.ACTIVATION
        }

    def _add(self, move: Move, length: int) -> None:
        key = self.arranged.pieces[move.gap.piece]
        if key[0] is Kind.ACTIVATION:
            return  # these leave by saved-tensor hooks
        if move.write_after is not None:
            self.copies[move.write_after % length].append(key)
        self.leaves[move.gap.begin % length].append(key)
        self.reads[move.read_at % length].append((move.gap.end - move.read_at, key))

    def distance(self, key: PieceKey, place: int) -> int:
        """How many points away the next use of a piece is."""
        length = len(self.arranged.points)
        return min(((use - place - 1) % length + 1 for use in self.uses.get(key, ())), default=FAR)


class Conductor:
    """Where the step is. `pieces` and `extra_bytes` may grow while it runs."""

    def __init__(self, custody: PieceCustody, pieces: Mapping[PieceKey, HeldPiece], meter: PointMeter) -> None:
        self.carried: Carried | None = None
        self.seen: list[Arrival] = []
        self._custody = custody
        self._pieces = pieces
        self._meter = meter
        self._place = -1
        self._now: tuple[StepStage, int] | None = None
        self._asked: list[PieceKey] = []

    def is_at(self, stage: StepStage, block: int) -> bool:
        """Whether the step is at this point already."""
        return self._now == (stage, block)

    def arrive(self, stage: StepStage, block: int, wanted: Sequence[HeldPiece]) -> None:
        """A point begins, and the one before ends: what it wants is in memory when this returns."""
        self.end_point()
        self._custody.release()
        self._now = (stage, block)
        if self.carried is not None:
            self._follow(self.carried, stage, block)
        self._custody.account.reserved_bytes = self.reserve(stage, block)
        self._custody.acquire(wanted)
        self._custody.shrink()  # what the point itself takes needs room, too
        self._bring()
        self._custody.trim()
        self._meter.begin(with_memory=self.carried is None)

    def saved(self, size_bytes: int) -> None:
        """The point saved so much for its backward."""
        self._meter.saved_bytes += size_bytes

    def end_point(self) -> None:
        """The point is over: note what was seen, and let go of what the plan says."""
        if self._now is None:
            return
        stage, block = self._now
        self.seen.append(
            Arrival(
                stage=stage,
                block=block,
                seconds=self._meter.seconds(),
                extra_bytes=self._meter.extra_bytes(),
                saved_bytes=self._meter.saved_bytes,
            )
        )
        self._now = None
        self._custody.release()
        if self.carried is not None and self._place >= 0:
            for key in self.carried.copies[self._place]:
                self._custody.copy_out(self._pieces[key])
            for key in self.carried.leaves[self._place]:
                self._custody.let_leave(self._pieces[key])

    def reserve(self, stage: StepStage, block: int) -> int:
        """What a point takes besides pieces: by the plan, or an estimate."""
        if self.carried is None:
            return self._custody.account.limit_bytes // UNKNOWN_SHARE
        return self.carried.extra.get((stage, block), 0)

    def next_use(self, piece: HeldPiece) -> int:
        """How far away a piece's next use is, as far as the plan knows."""
        if self.carried is None:
            return 0
        key = next((key for key, each in self._pieces.items() if each is piece), None)
        return FAR if key is None else self.carried.distance(key, self._place)

    def _follow(self, carried: Carried, stage: StepStage, block: int) -> None:
        """Go on to the next place of the plan at which this happens; None of its moves in between is made."""
        points = carried.arranged.points
        ahead = [(self._place + 1 + n) % len(points) for n in range(len(points))]
        found = next((place for place in ahead if points[place] == (stage, block)), None)
        if found is None:
            return
        self._place = found
        self._asked += [key for _, key in carried.reads[found]]

    def _bring(self) -> None:
        """Read ahead in the order of need, as far as there is room; what is left is asked for at the next point."""
        while self._asked and self._custody.bring(self._pieces[self._asked[0]]):
            self._asked.pop(0)
