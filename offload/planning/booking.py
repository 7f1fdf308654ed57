"""The state of a plan in the making: the memory needs of points, the booked I/O of tiers, and the taken gaps. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.io_schedule import Booking, PointRing, Shares, Tiers, Ways
from elastrain.offload.planning.plan_values import Budget, Gap, Move, Program, Recomputation, UnplayableError

Version = tuple[int, int | None]
"""A piece and the point of its last change. All gaps of one version can share one copy."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A gap that could be taken, with the piece out from place `out_begin` until before `out_end`; or a recomputation.

    `gain_s` are the seconds above the limit while the piece is out. `write_s` and `read_s` are the I/O seconds to book;
    `write_s` is 0 if a copy exists. `stall_s` is the time by which the step gets longer.
    """

    gap: Gap
    size_bytes: int
    out_begin: int
    out_end: int
    gain_s: float
    shares: Shares = ()
    write_s: float = 0.0
    read_s: float = 0.0
    stall_s: float = 0.0
    recomputation: Recomputation | None = None

    @property
    def score(self) -> float:
        """The benefit divided by the I/O seconds."""
        return self.size_bytes * self.gain_s / (self.write_s + self.read_s)

    @property
    def seconds_per_byte(self) -> float:
        """Seconds of stall for each byte that leaves memory."""
        return self.stall_s / self.size_bytes


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """The copy of one version: its tiers, the points from the change until it is written, and its write's bookings."""

    shares: Shares
    written_after: int
    bookings: tuple[Booking, ...]
    owner: Gap


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A taken gap, with the bookings of its read."""

    offer: Offer
    bookings: tuple[Booking, ...]


class Books:
    """The needs of all points, the bookings of all tiers and the taken gaps, updated gap by gap.

    `in_memory` are pieces that host memory is reserved for.
    """

    def __init__(self, program: Program, budget: Budget, in_memory: frozenset[int] = frozenset()) -> None:
        seconds = [point.seconds for point in program.points]
        self.program = program
        self.length = len(program.points)
        self._limit_bytes = budget.limit_bytes
        self._in_memory = in_memory
        self._seconds = PointRing(seconds)
        self._needs = PointRing([float(need) for need in facts.needs(program)])
        self._above = PointRing(self._seconds.values * (self._needs.values > self._limit_bytes))
        self._tiers = Tiers(budget.tiers, seconds)
        self._copies: dict[Version, _Copy] = {}
        self._taken: dict[Gap, _Taken] = {}

    # Queries.

    def worst(self) -> int | None:
        """Return the point that is most above the limit, or None if no point is above it."""
        place = int(self._needs.values.argmax())
        return place if self._needs.values[place] > self._limit_bytes else None

    def version_of(self, gap: Gap) -> Version:
        """Return the version of the piece that is out during this gap."""
        return gap.piece, None if gap.changed is None else gap.changed % self.length

    def is_out(self, gap: Gap, place: int | None = None) -> bool:
        """Return True if the gap is taken and, if `place` is given, the piece is out at that place."""
        taken = self._taken.get(gap)
        return taken is not None and (place is None or taken.offer.out_begin <= place < taken.offer.out_end)

    def bound(self, gap: Gap, *, is_alone: bool) -> float:
        """Return an upper bound of the gap's score. `is_alone` says that no other gap can share its copy."""
        write, read = self._tiers.least_s(self._size(gap))
        cost_s = read + write * (is_alone and gap.changed is not None)
        return self._size(gap) * self._gain_s(gap.begin + 1, gap.end) / cost_s

    # Offers.

    def hidden(self, gap: Gap) -> Offer | None:
        """Return the best way to take a gap without a stall, by drives, else by host memory; None if there is none."""
        if self._gain_s(gap.begin + 1, gap.end) <= 0:
            return None
        for some in self._destinations(gap):
            offers = [self._offer(gap, shares, through=None) for shares in some]
            good = [offer for offer in offers if offer.gain_s > 0 and not offer.stall_s]
            if good:
                return max(good, key=lambda offer: offer.score)
        return None

    def forced(self, gap: Gap, place: int) -> Offer:
        """Return the cheapest way for a piece to be out at a place, with its stalls.

        Raises UnplayableError if tiers are full.
        """
        undone = self._release(gap, place)
        some = [shares for kind in self._destinations(gap) for shares in kind]
        offers = [self._offer(gap, shares, place) for shares in some]
        self._restore(gap, undone)
        if not offers:
            raise UnplayableError("no tier has room for what must leave memory: give them more, or raise the limit")
        return min(offers, key=lambda each: (each.stall_s, -each.gain_s))

    def estimate(self, gap: Gap, place: int) -> float:
        """Estimate the stall per byte if the gap's piece is out at a place. Free seconds of all tiers are added up."""
        write, read = self._tiers.least_s(self._size(gap))
        missing_s = max(0.0, read - self._tiers.free_s(place + 1, gap.end, writes=False))
        if gap.changed is not None and self.version_of(gap) not in self._copies:
            missing_s += max(0.0, write - self._tiers.free_s(gap.changed + 1, place, writes=True))
        return missing_s / self._size(gap)

    def recomputed_over(self, place: int) -> Iterator[Offer]:
        """Yield recomputations that would free memory at a place, each with only its pieces that do not leave yet."""
        for each in self.program.recomputations:
            if each.after < place < each.again and (offer := self.recomputed_as(each)) is not None:
                yield offer

    def recomputed_as(self, each: Recomputation) -> Offer | None:
        """Return an offer to recompute those pieces that do not leave yet, or None if all of them leave."""
        gaps = self._gaps_of(each)
        if not gaps:
            return None
        return Offer(
            gap=gaps[0],
            size_bytes=sum(map(self._size, gaps)),
            out_begin=each.after + 1,
            out_end=each.again,
            gain_s=self._gain_s(each.after + 1, each.again),
            stall_s=each.seconds,
            recomputation=replace(each, pieces=tuple(gap.piece for gap in gaps)),
        )

    def _gaps_of(self, recomputation: Recomputation) -> list[Gap]:
        """Return the gaps of the recomputation's pieces that are not taken yet."""
        places = (recomputation.after, recomputation.again)
        found = [
            gap
            for piece in recomputation.pieces
            for gap in facts.gaps_of(piece, self.program.pieces[piece], self.length)
            if (gap.begin, gap.end) == places
        ]
        return [gap for gap in found if not self.is_out(gap)]

    def _offer(self, gap: Gap, shares: Shares, through: int | None) -> Offer:
        """Return the offer for a gap with these shares.

        If the piece must be out at `through`, I/O that does not fit stalls.
        """
        out_begin, writes_s, late_s = self._write(gap, shares, gap.end if through is None else through)
        fit = self._tiers.fit_read(shares, out_begin if through is None else through + 1, gap.end)
        return Offer(
            gap=gap,
            size_bytes=self._size(gap),
            out_begin=out_begin,
            out_end=fit.place,
            gain_s=self._gain_s(out_begin, fit.place),
            shares=shares,
            write_s=writes_s,
            read_s=self._tiers.read_s(shares),
            stall_s=late_s + fit.missing_s,
        )

    def _write(self, gap: Gap, shares: Shares, until: int) -> tuple[int, float, float]:
        """Return the first place where the piece is out, its write's seconds, and those lacking before `until`."""
        if gap.changed is None:
            return gap.begin + 1, 0.0, 0.0
        copy = self._copies.get(self.version_of(gap))
        if copy is not None:
            return max(gap.begin, gap.changed + copy.written_after) + 1, 0.0, 0.0
        fit = self._tiers.fit_write(shares, gap.changed + 1, until)
        return max(gap.begin, fit.place) + 1, self._tiers.write_s(shares), fit.missing_s

    # Decisions.

    def take(self, offer: Offer) -> None:
        """Take a gap, or a recomputation, as offered. A gap that is taken already is released first."""
        if offer.recomputation is not None:
            self._need(offer.out_begin, offer.out_end, -offer.size_bytes)
            for gap in self._gaps_of(offer.recomputation):
                self._taken[gap] = _Taken(offer=offer, bookings=())
            return
        gap = offer.gap
        self._release(gap, offer.out_begin)
        if self.version_of(gap) not in self._copies:
            copy = self._copies[self.version_of(gap)] = self._copy(offer)
            self._tiers.hold(copy.shares, self._good(gap), 1)
        bookings = self._tiers.book_read(offer.shares, offer.out_end, gap.end)
        self._need(offer.out_begin, offer.out_end, -offer.size_bytes)
        self._taken[gap] = _Taken(offer=offer, bookings=bookings)

    def _copy(self, offer: Offer) -> _Copy:
        """Book the write of a version's copy. The copy of a piece that nothing changes needs no booking."""
        gap = offer.gap
        if gap.changed is None:
            return _Copy(shares=offer.shares, written_after=0, bookings=(), owner=gap)
        bookings = self._tiers.book_write(offer.shares, gap.changed + 1, offer.out_begin)
        written_after = max(0, offer.out_begin - 1 - gap.changed)
        return _Copy(shares=offer.shares, written_after=written_after, bookings=bookings, owner=gap)

    def _good(self, gap: Gap) -> tuple[int, int]:
        """Return the window of places in which a copy of this version is valid, or (0, 0) if no tier can be full."""
        if not self._tiers.are_bounded:
            return 0, 0
        if gap.changed is None:
            return 0, self.length
        changes = [use.point for use in self.program.pieces[gap.piece].uses if use.changes or use.begins]
        later = [place for place in changes if place > gap.changed % self.length]
        lasts = (min(later) if later else min(changes) + self.length) - gap.changed % self.length
        return gap.changed + 1, gap.changed + lasts

    def _release(self, gap: Gap, until: int) -> tuple[_Taken | None, _Copy | None]:
        """Undo the bookings of a gap, and its version's copy unless that is written before `until`."""
        taken = self._taken.pop(gap, None)
        if taken is not None:
            for booking in taken.bookings:
                booking.lane.give_back(booking)
            self._need(taken.offer.out_begin, taken.offer.out_end, taken.offer.size_bytes)
        copy = self._copies.get(self.version_of(gap))
        if copy is None or gap.changed is None or gap.changed + copy.written_after < until:
            return taken, None
        del self._copies[self.version_of(gap)]
        self._tiers.hold(copy.shares, self._good(gap), -1)
        for booking in copy.bookings:
            booking.lane.give_back(booking)
        return taken, copy

    def _restore(self, gap: Gap, undone: tuple[_Taken | None, _Copy | None]) -> None:
        taken, copy = undone
        if copy is not None:
            self._copies[self.version_of(gap)] = copy
            self._tiers.hold(copy.shares, self._good(gap), 1)
            for booking in copy.bookings:
                booking.lane.take_again(booking)
        if taken is not None:
            self._taken[gap] = taken
            for booking in taken.bookings:
                booking.lane.take_again(booking)
            self._need(taken.offer.out_begin, taken.offer.out_end, -taken.offer.size_bytes)

    # Results.

    def moves(self) -> tuple[Move, ...]:
        """Return the moves of all taken gaps, in the order of their places. Reads begin as early as memory allows."""
        taken = [each.offer for each in self._taken.values() if each.offer.recomputation is None]
        reads_at = self._early(taken)
        found = []
        for offer in sorted(taken, key=lambda each: (each.gap.begin, each.gap.piece)):
            copy = self._copies.get(self.version_of(offer.gap))
            is_written = copy is not None and copy.owner == offer.gap
            found.append(
                Move(
                    gap=offer.gap,
                    write_after=offer.gap.changed if is_written else None,
                    read_at=reads_at[offer.gap],
                    shares=offer.shares,
                )
            )
        return tuple(found)

    def recomputed(self) -> tuple[Recomputation, ...]:
        """Return the recomputations that were taken."""
        found = [each.offer.recomputation for each in self._taken.values()]
        return tuple(dict.fromkeys(each for each in found if each is not None))

    def _early(self, taken: Sequence[Offer]) -> dict[Gap, int]:
        """Return the place at which each read begins: first one place earlier for all, then as early as memory allows.

        A read that begins as late as the plan permits makes computing wait for any jitter of the drive. No offers are
        made after this call.
        """
        found = {offer.gap: offer.out_end for offer in taken}
        in_order = sorted(taken, key=lambda each: each.gap.end)
        for places in (1, self.length):
            for offer in in_order:
                end = found[offer.gap]
                begin = max(offer.out_begin + 1, end - places)
                window = self._needs.window(begin, end) + offer.size_bytes > self._limit_bytes
                above = np.flatnonzero(window)
                early = begin if not len(above) else begin + int(above[-1]) + 1
                self._needs.add(early, end, offer.size_bytes)
                found[offer.gap] = early
        return found

    def _need(self, begin: int, end: int, more_bytes: int) -> None:
        before = self._needs.window(begin, end) > self._limit_bytes
        self._needs.add(begin, end, more_bytes)
        after = self._needs.window(begin, end) > self._limit_bytes
        # Most bookings take no point across the limit. Then the sums of `_above` stay valid.
        if before.tobytes() != after.tobytes():
            self._above.put(begin, self._seconds.window(begin, end) * after)

    def _size(self, gap: Gap) -> int:
        return self.program.pieces[gap.piece].size_bytes

    def _gain_s(self, begin: int, end: int) -> float:
        """Return the seconds of those points of a window that are above the limit."""
        return self._above.total(begin, end)

    def _destinations(self, gap: Gap) -> tuple[Ways, ...]:
        """Return the ways for the piece to go, drives first. A piece with a copy goes to the copy's tiers only."""
        copy = self._copies.get(self.version_of(gap))
        if copy is not None:
            return ((copy.shares,),)
        if not self._tiers.are_bounded:
            return self._tiers.ways(self._size(gap))
        window = self._good(gap)
        ways = self._tiers.ways(self._size(gap))
        drives, memory = ([shares for shares in some if self._tiers.has_room(shares, window)] for some in ways)
        if not self._in_memory:
            return drives, memory
        own = memory if gap.piece in self._in_memory else drives
        return (own,) if own else (drives, memory)
