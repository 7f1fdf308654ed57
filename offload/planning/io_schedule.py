"""The I/O schedule of a plan in the making: free seconds of each tier and point, and the tiers that a piece can go to.

Writes are booked forwards from a place, reads backwards. A window is a range of places on the ring, at most one round.
Pure.
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
    """An array over the points of a step, read and written in windows that may cross the end of the step.

    Sums over windows come from a running sum. The part of it behind a change is computed again when it is needed.
    """

    def __init__(self, values: Sequence[float] | Seconds) -> None:
        self.values: Seconds = np.array(values, dtype=np.float64)
        self._length = len(self.values)
        self._running = [0.0] * (self._length + 1)  # a list of floats, since it is read far more often than computed
        self._summed = 0  # the number of values whose running sums are valid

    def window(self, begin: int, end: int) -> Seconds:
        """Return the values at places `begin` to before `end`, as a copy or a view that callers must not change."""
        length = self._length
        first, size = begin % length, max(0, end - begin)
        if first + size <= length:
            return self.values[first : first + size]
        return np.concatenate((self.values[first:], self.values[: first + size - length]))

    def put(self, begin: int, values: Seconds) -> None:
        """Set the values from place `begin` on."""
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
        """Add `more` to each value of a window."""
        if end > begin:
            self.put(begin, self.window(begin, end) + more)

    def total(self, begin: int, end: int) -> float:
        """Return the sum over a window."""
        return self._before(end) - self._before(begin) if end > begin else 0.0

    def first_with(self, begin: int, wanted: float) -> int:
        """Return the first place at which the sum from `begin` on reaches `wanted`. The ring must not be all zero."""
        sums = self._sums()
        rounds, rest = divmod(self._before(begin) + wanted, sums[-1])
        return int(rounds) * self._length + bisect_left(sums, rest) - 1

    def last_with(self, end: int, wanted: float) -> int:
        """Return the last place from which the sum up to `end` reaches `wanted`. The ring must not be all zero."""
        sums = self._sums()
        rounds, rest = divmod(self._before(end) - wanted, sums[-1])
        return int(rounds) * self._length + bisect_right(sums, rest) - 1

    def _sums(self) -> list[float]:
        """Return the sum before each place, and then the sum of all."""
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
    """The place where a booking would end (writes) or begin (reads), and the seconds that do not fit."""

    place: int
    missing_s: float


class BookedLane:
    """One direction of a tier, or both directions of a tier that does one thing at a time."""

    def __init__(self, free: PointRing) -> None:
        self.free = free

    def forwards(self, begin: int, end: int, wanted_s: float) -> BookingFit:
        """Return the last place that a booking of `wanted_s` from `begin` on takes.

        It is `begin - 1` if `wanted_s` is 0. What does not fit before `end` is in `missing_s`.
        """
        if wanted_s <= 0:
            return BookingFit(place=begin - 1, missing_s=0.0)
        had_s = self.free.total(begin, end)
        if had_s < wanted_s:
            return BookingFit(place=end - 1, missing_s=wanted_s - had_s)
        return BookingFit(place=min(end - 1, self.free.first_with(begin, wanted_s - EPSILON_S)), missing_s=0.0)

    def backwards(self, begin: int, end: int, wanted_s: float) -> BookingFit:
        """Return the first place that a booking of `wanted_s` back from `end` takes. It is `end` if `wanted_s` is 0.

        What does not fit after `begin` is in `missing_s`.
        """
        if wanted_s <= 0:
            return BookingFit(place=end, missing_s=0.0)
        had_s = self.free.total(begin, end)
        if had_s < wanted_s:
            return BookingFit(place=begin, missing_s=wanted_s - had_s)
        return BookingFit(place=max(begin, self.free.last_with(end, wanted_s - EPSILON_S)), missing_s=0.0)

    def take_forwards(self, begin: int, end: int, wanted_s: float) -> Booking:
        """Book seconds from `begin` on. Seconds that do not fit into the window are not booked."""
        return self._take(begin, _first(self.free.window(begin, end), wanted_s))

    def take_backwards(self, begin: int, end: int, wanted_s: float) -> Booking:
        """Book seconds back from `end`. Seconds that do not fit into the window are not booked."""
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
    """Seconds that were taken from one direction of a tier, from place `begin` on."""

    lane: BookedLane
    begin: int
    seconds: Seconds


def _first(free: Seconds, wanted_s: float) -> Seconds:
    """Return the seconds taken from each place if the first places are used up first."""
    taken: Seconds = np.minimum(free, np.maximum(0.0, wanted_s - (np.cumsum(free) - free)))
    return taken


STRIPE_S = 0.005
"""A piece that takes one drive longer than this is striped over all drives.

Below it, latency costs more than that gains.
"""
Shares = tuple[Share, ...]
Ways = Sequence[Shares]


class TierTimeline:
    """One tier: the schedules of its writes and reads, and the bytes that it holds at each place."""

    def __init__(self, tier: Tier, seconds: Sequence[float]) -> None:
        self.tier = tier
        both = PointRing(seconds)
        self.writes = BookedLane(both)
        self.reads = BookedLane(PointRing(seconds)) if tier.duplex else self.writes
        self.held = PointRing([0.0] * len(seconds))

    def has_room(self, begin: int, end: int, size_bytes: int) -> bool:
        """Return True if the tier has room for `size_bytes` more over a window."""
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
        """Return the ways to put `size_bytes` on drives, and those to put it into host memory.

        Large pieces use all drives.
        """
        if size_bytes not in self._ways:
            self._ways[size_bytes] = _ways(self._tiers, size_bytes)
        return self._ways[size_bytes]

    def least_s(self, size_bytes: int) -> tuple[float, float]:
        """Return the seconds of the fastest write and of the fastest read of `size_bytes`."""
        if size_bytes not in self._least_s:
            all_ways = [shares for some in self.ways(size_bytes) for shares in some]
            found = min(map(self.write_s, all_ways)), min(map(self.read_s, all_ways))
            self._least_s[size_bytes] = found
        return self._least_s[size_bytes]

    def write_s(self, shares: Shares) -> float:
        """Return the seconds to write these shares if nothing else is moved."""
        return max(self._tiers[share.tier].write_s(share.size_bytes) for share in shares)

    def read_s(self, shares: Shares) -> float:
        """Return the seconds to read these shares if nothing else is moved."""
        return max(self._tiers[share.tier].read_s(share.size_bytes) for share in shares)

    def free_s(self, begin: int, end: int, *, writes: bool) -> float:
        """Return the free seconds of all tiers in a window, added up."""
        return sum((line.writes if writes else line.reads).free.total(begin, end) for line in self._lines)

    def fit_write(self, shares: Shares, begin: int, end: int) -> BookingFit:
        """Return where a write booked from `begin` on would end, and the seconds that do not fit before `end`."""
        fits = [
            self._lines[share.tier].writes.forwards(begin, end, self._tiers[share.tier].write_s(share.size_bytes))
            for share in shares
        ]
        return BookingFit(place=max(fit.place for fit in fits), missing_s=max(fit.missing_s for fit in fits))

    def fit_read(self, shares: Shares, begin: int, end: int) -> BookingFit:
        """Return where a read booked back from `end` would begin, and the seconds that do not fit after `begin`."""
        fits = [
            self._lines[share.tier].reads.backwards(begin, end, self._tiers[share.tier].read_s(share.size_bytes))
            for share in shares
        ]
        return BookingFit(place=min(fit.place for fit in fits), missing_s=max(fit.missing_s for fit in fits))

    def book_write(self, shares: Shares, begin: int, end: int) -> tuple[Booking, ...]:
        """Book what `fit_write` found. Seconds that do not fit into the window are not booked."""
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
        """True if any tier has a capacity, so that it can be full."""
        return any(tier.capacity_bytes is not None for tier in self._tiers)

    def has_room(self, shares: Shares, window: tuple[int, int]) -> bool:
        """Return True if each tier has room for its share over a window of places."""
        return all(self._lines[share.tier].has_room(*window, share.size_bytes) for share in shares)

    def hold(self, shares: Shares, window: tuple[int, int], sign: int) -> None:
        """Add the shares to the bytes that tiers hold over a window, or subtract them if `sign` is -1."""
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
    """Return shares of a piece for all drives, sized so that all drives finish at about the same time."""
    drives = [index for index, tier in enumerate(tiers) if not tier.is_memory]
    # Every written piece is read again, so a drive's speed counts both directions.
    speed = {index: 1 / (1 / tiers[index].read_bytes_per_s + 1 / tiers[index].write_bytes_per_s) for index in drives}
    total, left, found = sum(speed.values()), size_bytes, []
    for index in drives[:-1]:
        part = int(size_bytes * speed[index] / total)
        found.append(Share(tier=index, size_bytes=part))
        left -= part
    return (*found, Share(tier=drives[-1], size_bytes=left))
