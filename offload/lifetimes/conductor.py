"""The conductor, which follows a step from point to point, asks the piece store for the plan's moves, and measures.

A point ends when the next one begins. If points come in another order than planned, no moves are made for them, and
pieces are served on demand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from elastrain.offload.errors import LimitTooSmallError
from elastrain.offload.lifetimes.measuring import KnownPoints, PointMeter, StandingWatch
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.pieces import process_heap
from elastrain.offload.lifetimes.pieces.piece_memory import HeldPiece
from elastrain.offload.lifetimes.saved import SavedTensors
from elastrain.offload.planning.orders import Arrival, StepStage
from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.program import FAR, Carried, PieceKey

WATCHED_STEPS, WATCH_EVERY_STEPS = 3, 64
"""Measuring memory takes time. So under a plan, only 3 of every 64 steps measure it at each point."""


class Conductor:
    """The position of training in the step. `pieces` may grow meanwhile; `seen` are the points of this step so far."""

    def __init__(
        self,
        custody: PieceStore,
        pieces: Mapping[PieceKey, HeldPiece],
        saved: SavedTensors,
        meter: PointMeter,
        watch: StandingWatch,
    ) -> None:
        self.carried: Carried | None = None
        self.seen: list[Arrival] = []
        self.steps = 0
        self._custody = custody
        self._pieces = pieces
        self._saved = saved
        self._meter = meter
        self._watch = watch
        self._place = -1
        self._now: tuple[StepStage, int] | None = None
        self._asked: list[PieceKey] = []
        self.known = KnownPoints()
        saved.saved = self._was_saved

    def carry(self, carried: Carried, outside_bytes: int) -> None:
        """Follow this plan from the next point on. `outside_bytes` are always held besides pieces and saved tensors."""
        self._custody.account.outside_bytes = outside_bytes
        self.carried, self.steps, self._asked, self._place = carried, 0, [], -1
        self._saved.told.all_leave = False
        for key, piece in self._pieces.items():
            piece.shares = carried.shares.get(key, ())

    @property
    def runs_ahead(self) -> bool:
        """True if work is queued on a device and done later."""
        return not self._meter.is_cheap

    def is_at(self, stage: StepStage, block: int) -> bool:
        """Return True if the step is at this point already."""
        return self._now == (stage, block)

    def arrive(self, stage: StepStage, block: int, wanted: Sequence[HeldPiece]) -> None:
        """End the previous point and begin this one. When this returns, the `wanted` pieces are in memory."""
        self._saved.settle()
        if self._now is None:
            self._meter.comes()
        self.end_point()
        self._custody.release()
        self._now = (stage, block)
        is_due = self.carried is None or self.steps % WATCH_EVERY_STEPS < WATCHED_STEPS
        if self.carried is None:
            self._custody.acquire(wanted)
            self._custody.clear()
        else:
            self._follow(self.carried, stage, block)
            self._custody.acquire(wanted)
            self._reserve(stage, block)
            self._custody.make_room(0)  # the point itself needs memory, too
            self._bring()
        self._custody.trim(wholly=self.carried is None)
        with_memory = self._meter.is_cheap or is_due or self._now not in self.known
        self._meter.begin(with_memory=with_memory, is_short=stage is StepStage.UPDATE)

    def end_point(self) -> None:
        """End the point: record its measurements, and let pieces leave as planned."""
        if self._now is None:
            return
        (stage, block), figures, account = self._now, self._meter.end(), self._custody.account
        expected_bytes = account.reserved_bytes + account.outside_bytes - self._meter.guard_bytes
        seconds, extra_bytes = self.known.learn(self._now, figures, expected_bytes if self.carried else None)
        self.seen.append(
            Arrival(
                stage=stage,
                block=block,
                seconds=seconds,
                extra_bytes=extra_bytes,
                saved_bytes=figures.saved_bytes,
                needed_bytes=figures.needed_bytes,
                standing=self._watch.take(self._pieces.values(), figures.extra_bytes),
            )
        )
        self._now = None
        account.reserved_bytes = account.coming_bytes = 0
        self._custody.release()
        if self.carried is None:
            self._saved.keep_as(None)  # all saved values have left already
        elif self._place >= 0:
            self._let_go(self.carried, stage)

    def begin_step(self) -> list[Arrival]:
        """Return the points of the step that has ended, and start a new list."""
        seen, self.seen = self.seen, []
        self.steps += 1
        self.known.begin_step()
        return seen

    def next_use(self, piece: HeldPiece) -> int:
        """Return the number of points until a piece's next use, `FAR` if the plan has none, or 0 without a plan."""
        if self.carried is None:
            return 0
        key = next((key for key, each in self._pieces.items() if each is piece), None)
        return FAR if key is None else self.carried.distance(key, self._place)

    # Calls from blocks that may be computed again.

    def is_given_up(self, block: int) -> bool:
        """Return True if the plan has the running forward of this block computed again."""
        return (
            self.carried is not None and self.is_at(StepStage.FORWARD, block) and self._place in self.carried.given_up
        )

    def has_kept(self, needed_bytes: int, given_up_bytes: int) -> None:
        """Note the bytes that a recomputation of an ended forward needs, and the bytes that were dropped."""
        if given_up_bytes:
            self._was_saved(given_up_bytes)
        self._meter.needed_bytes = needed_bytes

    def begins_again(self, wanted: Sequence[HeldPiece], size_bytes: int) -> None:
        """Load the pieces that the recomputation uses, and make room for its values."""
        self._custody.acquire(wanted)
        self._custody.account.came(size_bytes)
        self._custody.make_room(size_bytes)

    def ended_again(self, seconds: float) -> None:
        """Note the seconds of a recomputation that has ended."""
        self._meter.computed_again(seconds)

    @property
    def times_again(self) -> int:
        """The number of forwards that were computed again so far."""
        return self._meter.times_again

    def _reserve(self, stage: StepStage, block: int) -> None:
        """Reserve memory for the point: as planned, or more if the process holds more or the point took more before."""
        account, meter = self._custody.account, self._meter
        unknown_bytes = meter.unknown_bytes()
        if unknown_bytes > account.outside_bytes:  # more unused memory in the heap than the plan leaves room for
            process_heap.trim_what_stays()
            unknown_bytes = meter.unknown_bytes()
        seen_bytes = self.known.extra_bytes((stage, block), unknown_bytes) + meter.guard_bytes
        account.reserved_bytes = max(account.reserved_bytes, seen_bytes - account.outside_bytes)

    def _was_saved(self, size_bytes: int) -> None:
        self._meter.saved_bytes += size_bytes
        if self._meter.needed_bytes is not None:  # the block has ended, so computing it again would not make this
            self._meter.needed_bytes += size_bytes
        account = self._custody.account
        account.came(size_bytes)
        self._custody.trim()  # more may have been saved than was expected
        if account.missing_bytes(0):
            with contextlib.suppress(LimitTooSmallError):  # what was saved just now cannot leave yet
                self._custody.make_room(0)

    def _follow(self, carried: Carried, stage: StepStage, block: int) -> None:
        """Move to the next place of the plan that matches this point. The moves of skipped places are not made."""
        found, account = carried.follow(self._place, stage, block), self._custody.account
        if found is None:
            return
        self._place = found
        account.reserved_bytes = carried.arranged.program.points[found].extra_bytes
        account.coming_bytes = carried.begun_bytes(found)
        self._asked += [key for _, key in carried.reads[found]]

    def _let_go(self, carried: Carried, stage: StepStage) -> None:
        if stage is StepStage.FORWARD:
            self._saved.keep_as(self._place)
        for key in carried.copies[self._place]:
            self._custody.copy_out(self._pieces[key])
        for kind, number in carried.leaves[self._place]:
            if kind is Kind.ACTIVATION:
                self._saved.let_leave(number)
            else:
                self._custody.let_leave(self._pieces[kind, number])

    def _bring(self) -> None:
        """Start reads in the order of need, as far as there is room. The others are tried again at the next point."""
        while self._asked and self._brought(*self._asked[0]):
            self._asked.pop(0)

    def _brought(self, kind: Kind, number: int) -> bool:
        if kind is not Kind.ACTIVATION:
            return self._custody.bring(self._pieces[kind, number])
        if self._custody.account.missing_bytes(self._saved.missing_bytes(number)):
            return False
        self._saved.bring(number)
        return True
