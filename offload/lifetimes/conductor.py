"""Follows a step from point to point, asks custody for what the plan says, and measures points.

A point ends where the next one begins. What comes in another order than planned has no moves, and is served on demand.
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
"""Where to look closely takes time, so many steps of each so many under a plan are watched at each point."""


class Conductor:
    """Where the step is. `pieces` may grow while it runs; `seen` are the points of this step so far."""

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
        """From the next point on, follow this plan; so much is always held besides, by nobody in particular."""
        self._custody.account.outside_bytes = outside_bytes
        self.carried, self.steps, self._asked, self._place = carried, 0, [], -1
        self._saved.told.all_leave = False
        for key, piece in self._pieces.items():
            piece.shares = carried.shares.get(key, ())

    @property
    def runs_ahead(self) -> bool:
        """Whether what is asked for is done later, on a device."""
        return not self._meter.is_cheap

    def is_at(self, stage: StepStage, block: int) -> bool:
        """Whether the step is at this point already."""
        return self._now == (stage, block)

    def arrive(self, stage: StepStage, block: int, wanted: Sequence[HeldPiece]) -> None:
        """A point begins, and the one before ends: what it wants is in memory when this returns."""
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
            self._custody.make_room(0)  # what the point itself takes needs room, too
            self._bring()
        self._custody.trim(wholly=self.carried is None)
        with_memory = self._meter.is_cheap or is_due or self._now not in self.known
        self._meter.begin(with_memory=with_memory, is_short=stage is StepStage.UPDATE)

    def end_point(self) -> None:
        """The point is over: note what was seen, and let go of what the plan says."""
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
            self._saved.keep_as(None)  # all of it has left by itself
        elif self._place >= 0:
            self._let_go(self.carried, stage)

    def begin_step(self) -> list[Arrival]:
        """What was seen of the step that has ended, and look anew."""
        seen, self.seen = self.seen, []
        self.steps += 1
        self.known.begin_step()
        return seen

    def next_use(self, piece: HeldPiece) -> int:
        """How far away a piece's next use is, as far as the plan knows."""
        if self.carried is None:
            return 0
        key = next((key for key, each in self._pieces.items() if each is piece), None)
        return FAR if key is None else self.carried.distance(key, self._place)

    # What blocks ask that may be computed again.

    def is_given_up(self, block: int) -> bool:
        """Whether the plan has the forward under way computed again."""
        return (
            self.carried is not None and self.is_at(StepStage.FORWARD, block) and self._place in self.carried.given_up
        )

    def has_kept(self, needed_bytes: int, given_up_bytes: int) -> None:
        """A forward that can be computed again has ended: what that needs, and what was given up."""
        if given_up_bytes:
            self._was_saved(given_up_bytes)
        self._meter.needed_bytes = needed_bytes

    def begins_again(self, wanted: Sequence[HeldPiece], size_bytes: int) -> None:
        """Have what computes it, and room for it: it was expected, as far as the plan knows of it."""
        self._custody.acquire(wanted)
        self._custody.account.came(size_bytes)
        self._custody.make_room(size_bytes)

    def ended_again(self, seconds: float) -> None:
        """It is computed."""
        self._meter.computed_again(seconds)

    @property
    def times_again(self) -> int:
        """How many forwards were computed again so far."""
        return self._meter.times_again

    def _reserve(self, stage: StepStage, block: int) -> None:
        """Have room for what the point takes besides: as planned, or more where the process holds or has taken more."""
        account, meter = self._custody.account, self._meter
        unknown_bytes = meter.unknown_bytes()
        if unknown_bytes > account.outside_bytes:  # more holes than the plan leaves room for
            process_heap.trim_what_stays()
            unknown_bytes = meter.unknown_bytes()
        seen_bytes = self.known.extra_bytes((stage, block), unknown_bytes) + meter.guard_bytes
        account.reserved_bytes = max(account.reserved_bytes, seen_bytes - account.outside_bytes)

    def _was_saved(self, size_bytes: int) -> None:
        self._meter.saved_bytes += size_bytes
        if self._meter.needed_bytes is not None:  # the block has ended: to compute it again would not make this
            self._meter.needed_bytes += size_bytes
        account = self._custody.account
        account.came(size_bytes)
        self._custody.trim()  # more was saved, it may be, than there was to come
        if account.missing_bytes(0):
            with contextlib.suppress(LimitTooSmallError):  # what was saved just now cannot leave yet
                self._custody.make_room(0)

    def _follow(self, carried: Carried, stage: StepStage, block: int) -> None:
        """Go on to the next place of the plan at which this happens; none of the moves in between is made."""
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
        """Read ahead in the order of need, as far as there is room; what is left is asked for at the next point."""
        while self._asked and self._brought(*self._asked[0]):
            self._asked.pop(0)

    def _brought(self, kind: Kind, number: int) -> bool:
        if kind is not Kind.ACTIVATION:
            return self._custody.bring(self._pieces[kind, number])
        if self._custody.account.missing_bytes(self._saved.missing_bytes(number)):
            return False
        self._saved.bring(number)
        return True
