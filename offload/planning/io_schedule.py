"""Free seconds of tiers, point by point: writes are booked forwards from a place, reads backwards. Pure.

A window is a range of places on the ring, at most once around. Bookings only ever take: a tier's free seconds fall.

All tiers of a plan in the making: where a piece of some size can go, what that books, and what is full. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastrain.offload.planning.plan_values import Share, Tier

Seconds = NDArray[np.float64]
# Sums of floating-point seconds differ in their last digits.
EPSILON_S = 1e-12


class PointRing:
    """An array over the points, read and written in windows that may go over the end of the step.

    Sums over windows come from one running sum; of what was changed, the part behind is made anew when somebody asks.
    """

    def __init__(self, values: Sequence[float] | Seconds) -> None:
        self.values: Seconds = np.array(values, dtype=np.float64)
        self._length = len(self.values)
        self._running = [0.0] * (self._length + 1)  # plain numbers: looked up far more often than made anew
        self._summed = 0  # of so many values the sums are right

    def window(self, begin: int, end: int) -> Seconds:
        """The values at places `begin` to `end` (without it), as a copy or a view: not to be changed."""
        length = self._length
        first, size = begin % length, max(0, end - begin)
        if first + size <= length:
            return self.values[first : first + size]
        return np.concatenate((self.values[first:], self.values[: first + size - length]))

    def put(self, begin: int, values: Seconds) -> None:
        """Set the values from `begin` on."""
        first, size = begin % self._length, len(values)
        if first + size <= self._length:
            self.values[first : first + size] = values
            self._summed = min(self._summed, first)
            return
        head = self._length - first
        self.values[first:] = values[:head]
        self.values[: size - head] = values[head:]
        self._summed = 0

    def add(self, begin: int, end: int, more: float) -> None:
        """Add the same to each place of a window."""
        if end > begin:
            self.put(begin, self.window(begin, end) + more)

    def total(self, begin: int, end: int) -> float:
        """The sum over a window."""
        return self._before(end) - self._before(begin) if end > begin else 0.0

    def first_with(self, begin: int, wanted: float) -> int:
        """The first place up to which, from `begin` on and with it, there is so much. The ring must not be all zero."""
        sums = self._sums()
        rounds, rest = divmod(self._before(begin) + wanted, sums[-1])
        return int(rounds) * self._length + bisect_left(sums, rest) - 1

    def last_with(self, end: int, wanted: float) -> int:
        """The last place from which on, before `end`, there is so much."""
        sums = self._sums()
        rounds, rest = divmod(self._before(end) - wanted, sums[-1])
        return int(rounds) * self._length + bisect_right(sums, rest) - 1

    def _sums(self) -> list[float]:
        """The sums before each place, and of all."""
        begin = self._summed
        if begin < self._length:
            rest = np.concatenate((self._running[begin : begin + 1], self.values[begin:]))
            self._running[begin:] = rest.cumsum().tolist()
            self._summed = self._length
        return self._running

    def _before(self, place: int) -> float:
        if 0 <= place <= self._summed:
            return self._running[place]
        sums = self._sums()
        rounds, rest = divmod(place, self._length)
        return rounds * sums[-1] + sums[rest]


@dataclass(frozen=True, kw_only=True)
class BookingFit:
    """Where a booking would end (writes: the last place that it takes) or begin (reads: the first); and what lacks."""

    place: int
    missing_s: float


class BookedLane:
    """One direction of one tier, or both where it does one thing at a time."""

    def __init__(self, free: PointRing) -> None:
        self.free = free

    def forwards(self, begin: int, end: int, wanted_s: float) -> BookingFit:
        """How far `wanted_s` reach from `begin` on, before `end`. `place` is `begin - 1` where nothing is wanted."""
        if wanted_s <= 0:
            return BookingFit(place=begin - 1, missing_s=0.0)
        had_s = self.free.total(begin, end)
        if had_s < wanted_s:
            return BookingFit(place=end - 1, missing_s=wanted_s - had_s)
        return BookingFit(place=min(end - 1, self.free.first_with(begin, wanted_s - EPSILON_S)), missing_s=0.0)

    def backwards(self, begin: int, end: int, wanted_s: float) -> BookingFit:
        """How far `wanted_s` reach back from `end`, not before `begin`. `place` is `end` where nothing is wanted."""
        if wanted_s <= 0:
            return BookingFit(place=end, missing_s=0.0)
        had_s = self.free.total(begin, end)
        if had_s < wanted_s:
            return BookingFit(place=begin, missing_s=wanted_s - had_s)
        return BookingFit(place=max(begin, self.free.last_with(end, wanted_s - EPSILON_S)), missing_s=0.0)

    def take_forwards(self, begin: int, end: int, wanted_s: float) -> Booking:
        """Book seconds from `begin` on; what the window does not have is not booked."""
        return self._take(begin, _first(self.free.window(begin, end), wanted_s))

    def take_backwards(self, begin: int, end: int, wanted_s: float) -> Booking:
        """Book seconds back from `end`."""
        return self._take(begin, _first(self.free.window(begin, end)[::-1], wanted_s)[::-1])

    def give_back(self, booking: Booking) -> None:
        """Undo a booking."""
        window = self.free.window(booking.begin, booking.begin + len(booking.seconds))
        self.free.put(booking.begin, window + booking.seconds)

    def take_again(self, booking: Booking) -> None:
        """Undo `give_back`."""
        window = self.free.window(booking.begin, booking.begin + len(booking.seconds))
        self.free.put(booking.begin, window - booking.seconds)

    def _take(self, begin: int, taken: Seconds) -> Booking:
        self.free.put(begin, self.free.window(begin, begin + len(taken)) - taken)
        return Booking(lane=self, begin=begin, seconds=taken)


@dataclass(frozen=True, kw_only=True)
class Booking:
    """Seconds that were taken from one lane, from place `begin` on."""

    lane: BookedLane
    begin: int
    seconds: Seconds


def _first(free: Seconds, wanted_s: float) -> Seconds:
    """What is taken of each place where the first ones are taken first."""
    taken: Seconds = np.minimum(free, np.maximum(0.0, wanted_s - (np.cumsum(free) - free)))
    return taken


STRIPE_S = 0.005
"""What one drive needs so long for is cut over all drives: below it, latency costs more than a second drive gains."""
Shares = tuple[Share, ...]
Ways = Sequence[Shares]


class TierTimeline:
    """One tier: its lanes, and how many of its bytes are taken at each place."""

    def __init__(self, tier: Tier, seconds: Sequence[float]) -> None:
        self.tier = tier
        both = PointRing(seconds)
        self.writes = BookedLane(both)
        self.reads = BookedLane(PointRing(seconds)) if tier.duplex else self.writes
        self.held = PointRing([0.0] * len(seconds))

    def has_room(self, begin: int, end: int, size_bytes: int) -> bool:
        """Whether it can keep so many bytes more over a window."""
        capacity_bytes = self.tier.capacity_bytes
        if capacity_bytes is None:
            return True
        return float(self.held.window(begin, end).max(initial=0.0)) + size_bytes <= capacity_bytes


class Tiers:
    """The tiers of a budget, with their bookings."""

    def __init__(self, tiers: Sequence[Tier], seconds: Sequence[float]) -> None:
        self._tiers = tiers
        self._lines = [TierTimeline(tier, seconds) for tier in tiers]
        self._ways: dict[int, tuple[Ways, Ways]] = {}
        self._least_s: dict[int, tuple[float, float]] = {}

    def ways(self, size_bytes: int) -> tuple[Ways, Ways]:
        """How so many bytes can lie on drives, and how in host memory. Large ones lie on all drives at once."""
        if size_bytes not in self._ways:
            self._ways[size_bytes] = _ways(self._tiers, size_bytes)
        return self._ways[size_bytes]

    def least_s(self, size_bytes: int) -> tuple[float, float]:
        """What a write and a read take where they take least."""
        if size_bytes not in self._least_s:
            all_ways = [shares for some in self.ways(size_bytes) for shares in some]
            found = min(map(self.write_s, all_ways)), min(map(self.read_s, all_ways))
            self._least_s[size_bytes] = found
        return self._least_s[size_bytes]

    def write_s(self, shares: Shares) -> float:
        """How long a piece takes to write where nothing else is moved."""
        return max(self._tiers[share.tier].write_s(share.size_bytes) for share in shares)

    def read_s(self, shares: Shares) -> float:
        """How long it takes to read it back."""
        return max(self._tiers[share.tier].read_s(share.size_bytes) for share in shares)

    def free_s(self, begin: int, end: int, *, writes: bool) -> float:
        """Free seconds in a window, those of all tiers counted together."""
        return sum((line.writes if writes else line.reads).free.total(begin, end) for line in self._lines)

    def fit_write(self, shares: Shares, begin: int, end: int) -> BookingFit:
        """Where a write would end that is booked from `begin` on, before `end`."""
        fits = [
            self._lines[share.tier].writes.forwards(begin, end, self._tiers[share.tier].write_s(share.size_bytes))
            for share in shares
        ]
        return BookingFit(place=max(fit.place for fit in fits), missing_s=max(fit.missing_s for fit in fits))

    def fit_read(self, shares: Shares, begin: int, end: int) -> BookingFit:
        """Where a read would begin that is booked back from `end`, not before `begin`."""
        fits = [
            self._lines[share.tier].reads.backwards(begin, end, self._tiers[share.tier].read_s(share.size_bytes))
            for share in shares
        ]
        return BookingFit(place=min(fit.place for fit in fits), missing_s=max(fit.missing_s for fit in fits))

    def book_write(self, shares: Shares, begin: int, end: int) -> tuple[Booking, ...]:
        """Book what `fit_write` found; what the window does not have is not booked."""
        return tuple(
            self._lines[share.tier].writes.take_forwards(begin, end, self._tiers[share.tier].write_s(share.size_bytes))
            for share in shares
        )

    def book_read(self, shares: Shares, begin: int, end: int) -> tuple[Booking, ...]:
        """Book what `fit_read` found."""
        return tuple(
            self._lines[share.tier].reads.take_backwards(begin, end, self._tiers[share.tier].read_s(share.size_bytes))
            for share in shares
        )

    @property
    def are_bounded(self) -> bool:
        """Whether any of them can be full."""
        return any(tier.capacity_bytes is not None for tier in self._tiers)

    def has_room(self, shares: Shares, window: tuple[int, int]) -> bool:
        """Whether each tier can keep its share over a window of places."""
        return all(self._lines[share.tier].has_room(*window, share.size_bytes) for share in shares)

    def hold(self, shares: Shares, window: tuple[int, int], sign: int) -> None:
        """Count the shares as kept over a window; with sign -1, no more."""
        for share in shares:
            self._lines[share.tier].held.add(*window, sign * share.size_bytes)


def _ways(tiers: Sequence[Tier], size_bytes: int) -> tuple[Ways, Ways]:
    drives = [(Share(tier=n, size_bytes=size_bytes),) for n, tier in enumerate(tiers) if not tier.is_memory]
    memory = [(Share(tier=n, size_bytes=size_bytes),) for n, tier in enumerate(tiers) if tier.is_memory]
    least_s = min((size_bytes / tiers[way[0].tier].read_bytes_per_s for way in drives), default=0.0)
    if len(drives) > 1 and least_s >= STRIPE_S:
        return [_stripes(tiers, size_bytes)], memory
    return drives, memory


def _stripes(tiers: Sequence[Tier], size_bytes: int) -> Shares:
    """A piece over all drives at once, so that all of them are done at about the same time."""
    drives = [index for index, tier in enumerate(tiers) if not tier.is_memory]
    # Everything that is written is read again: a drive counts by how fast it does both.
    speed = {index: 1 / (1 / tiers[index].read_bytes_per_s + 1 / tiers[index].write_bytes_per_s) for index in drives}
    total, left, found = sum(speed.values()), size_bytes, []
    for index in drives[:-1]:
        part = int(size_bytes * speed[index] / total)
        found.append(Share(tier=index, size_bytes=part))
        left -= part
    return (*found, Share(tier=drives[-1], size_bytes=left))
