"""Free seconds of tiers, point by point: writes are booked forwards from a place, reads backwards. Pure.

A window is a range of places on the ring, at most once around. Bookings only ever take: a tier's free seconds fall.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
