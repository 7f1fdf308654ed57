"""All tiers of a plan in the making: where a piece of some size can go, what that books, and what is full. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastrain.offload.lifetimes.timeline import BookedLane, Booking, BookingFit, PointRing
from elastrain.offload.lifetimes.values import Share, Tier

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
