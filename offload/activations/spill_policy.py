"""Pure functions that decide how much to spill, what to read ahead and what to evict; `Planner` applies them per pass.

The amount follows SSDTrain (arXiv 2408.10013, section "adaptive offloading"). Storages are spilled from the start of
the forward, as long as the device can write and read them while the step computes anyway. The tail, which backward
needs first, stays. Under a memory limit, as little as possible is spilled. No clock, no I/O, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastrain.offload.planning.profile import PassProfile, Path, size

CHANGE_WORTH_A_NEW_PLAN = 0.10
# A step is forward plus backward, and backward takes about twice as long as the forward (the 3 of SSDTrain).
FORWARDS_PER_STEP = 3
# Room for storages that are being moved, in units of the largest storage.
IN_FLIGHT_STORAGES = 4
# The same for a device that is much faster than needed: one storage that moves, and one that is computed.
IN_FLIGHT_AT_LEAST = 2
MUCH_FASTER = 3
# Room for gradients in backward, in units of the largest storage.
GRADIENT_STORAGES = 3


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One storage that a forward saved: its size, and the time of saving in seconds since the forward began."""

    size_bytes: int
    saved_s: float


@dataclass(frozen=True, kw_only=True)
class Amount:
    """A decision to spill the first `count` storages of a forward and keep the rest. `reason` explains it to users."""

    count: int
    spilled_bytes: int
    kept_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Basis:
    """The measurements that an amount was computed from. `changed` decides if the amount is still valid."""

    forward_s: float
    total_bytes: int
    count: int
    device_bytes_per_s: float


def choose_amount(
    saved: Sequence[Saved], *, forward_s: float, device_bytes_per_s: float, limit_bytes: int | None
) -> Amount:
    """Choose how many storages to spill, from the first one on, and give the reason."""
    # Without a limit, as many as the bandwidth hides. With one, as few as possible: every written byte wears the drive.
    if limit_bytes is None:
        return _hidden(saved, forward_s=forward_s, device_bytes_per_s=device_bytes_per_s)
    needed_bytes_per_s = sum(storage.size_bytes for storage in saved) / max(forward_s, 1e-9)
    is_fast = device_bytes_per_s > MUCH_FASTER * needed_bytes_per_s
    return _fitting(saved, limit_bytes=limit_bytes, in_flight=IN_FLIGHT_AT_LEAST if is_fast else IN_FLIGHT_STORAGES)


def _hidden(saved: Sequence[Saved], *, forward_s: float, device_bytes_per_s: float) -> Amount:
    before_bytes = 0
    for index, storage in enumerate(saved):
        time_left_s = FORWARDS_PER_STEP * forward_s - 2 * storage.saved_s
        needed_bytes_per_s = (before_bytes + 2 * storage.size_bytes) / max(time_left_s, 1e-9)
        if needed_bytes_per_s > device_bytes_per_s:
            return _amount(
                saved,
                index,
                f"from storage {index} on, spilling would need {needed_bytes_per_s / 1e9:.2f} GB/s and the devices "
                f"move {device_bytes_per_s / 1e9:.2f} GB/s",
            )
        before_bytes += storage.size_bytes
    return _amount(saved, len(saved), "the devices keep up with everything that is saved")


def _fitting(saved: Sequence[Saved], *, limit_bytes: int, in_flight: int) -> Amount:
    total_bytes = sum(storage.size_bytes for storage in saved)
    if total_bytes <= limit_bytes:
        return _amount(saved, 0, f"all {size(total_bytes)} fit into the limit of {size(limit_bytes)}")
    largest_bytes = max(storage.size_bytes for storage in saved)
    room_bytes = max(0, limit_bytes - in_flight * largest_bytes)
    kept_bytes = total_bytes
    count = 0
    while kept_bytes > room_bytes and count < len(saved):
        kept_bytes -= saved[count].size_bytes
        count += 1
    reason = f"{size(total_bytes)} are saved, {size(limit_bytes)} are allowed: the last {size(kept_bytes)} stay"
    return _amount(saved, count, reason)


def _amount(saved: Sequence[Saved], count: int, reason: str) -> Amount:
    spilled_bytes = sum(storage.size_bytes for storage in saved[:count])
    kept_bytes = sum(storage.size_bytes for storage in saved[count:])
    return Amount(count=count, spilled_bytes=spilled_bytes, kept_bytes=kept_bytes, reason=reason)


def changed(old: Basis, new: Basis) -> str | None:
    """Return why an amount computed from `old` is not valid for `new`, or None if it still is."""
    if new.count != old.count:
        return f"{new.count} storages were saved, {old.count} before"
    values = (
        ("what is saved", old.total_bytes / (1 << 20), new.total_bytes / (1 << 20), "MiB"),
        ("the time of a forward", old.forward_s, new.forward_s, "s"),
        ("what the devices move", old.device_bytes_per_s / 1e9, new.device_bytes_per_s / 1e9, "GB/s"),
    )
    for what, before, after, unit in values:
        if abs(after - before) > CHANGE_WORTH_A_NEW_PLAN * max(before, 1e-9):
            return f"{what} went from {before:.3g} to {after:.3g} {unit}"
    return None


def reading_ahead_bytes(*, limit_bytes: int | None, peak_bytes: int, largest_bytes: int) -> int:
    """Return how many bytes may be in memory while reading ahead. A storage that is needed now may exceed this."""
    # Backward also needs memory for gradients. With a limit, that room lies below the forward's peak, so that the
    # process is no larger in backward than in forward. Without one, the forward's peak is allowed.
    if limit_bytes is not None:
        below_peak_bytes = min(limit_bytes, peak_bytes) - GRADIENT_STORAGES * largest_bytes
        return min(limit_bytes, max(below_peak_bytes, IN_FLIGHT_AT_LEAST * largest_bytes))
    return max(peak_bytes, IN_FLIGHT_STORAGES * largest_bytes)


def turns(needed_s: Sequence[float | None]) -> tuple[int, ...]:
    """Return the indices of a pass's storages ordered by turn. Backward needs the last index first.

    `needed_s` are the times at which each storage was first needed; a storage that was never needed (None) comes first.
    """
    # This is not simply the order of saving. A storage that several modules share (an encoder's output, say) is saved
    # at its first use, and backward needs it first for its last use.
    at_s = [math.inf if each is None else each for each in needed_s]
    return tuple(sorted(range(len(at_s)), key=lambda index: (-at_s[index], index)))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A storage of the forward that backward is working on. Backward needs the highest `turn` first."""

    turn: int
    size_bytes: int


def choose_prefetch(spilled: Iterable[Candidate], *, room_bytes: int) -> tuple[Candidate, ...]:
    """Choose what to read ahead. `spilled` is in the order in which backward will need it."""
    # Stop at the first that does not fit. A smaller one further back would take the room of one that is needed earlier.
    chosen = []
    for candidate in spilled:
        if candidate.size_bytes > room_bytes:
            break
        room_bytes -= candidate.size_bytes
        chosen.append(candidate)
    return tuple(chosen)


def choose_evictions(reloaded: Sequence[Candidate], *, cursor: int, wanted_bytes: int) -> tuple[Candidate, ...]:
    """Choose what to evict for a storage needed now: storages behind `cursor`, then those that are needed last."""
    passed = sorted((c for c in reloaded if c.turn > cursor), key=lambda c: -c.turn)
    ahead = sorted((c for c in reloaded if c.turn <= cursor), key=lambda c: c.turn)
    chosen = []
    for candidate in (*passed, *ahead):
        if wanted_bytes <= 0:
            break
        wanted_bytes -= candidate.size_bytes
        chosen.append(candidate)
    return tuple(chosen)


# A plan that spills nothing measures no drive. One storage is spilled in every so many passes, so that a drive that has
# become faster is used again.
PROBE_EVERY_PASSES = 8


class SpillPlan(Protocol):
    """The plan that a manager asks what leaves when it is saved, and in which order backward will need it.

    With `reads_ahead` False, a spilled storage is read when it is needed, or when the plan's owner fetches it.
    """

    reason: str
    last: PassProfile | None
    reads_ahead: bool

    def spills(self, index: int) -> bool:
        """Return True if the storage that a pass saves as number `index` leaves at once."""
        ...

    def turns(self, count: int) -> Sequence[int]:
        """Return the indices of `count` storages of a pass. Backward is expected to need the last one first."""
        ...

    def pass_ended(self, profile: PassProfile, device_bytes_per_s: float) -> None:
        """Learn from a finished pass."""
        ...

    def set_limit(self, limit_bytes: int) -> None:
        """Set another memory limit."""
        ...


class Planner:
    """The plan that spills the first storages of each pass. Until a whole pass was measured, it spills everything."""

    reads_ahead = True

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._amount: Amount | None = None
        self._basis: Basis | None = None
        self.reason = "no pass was measured yet: everything is spilled"
        self.last: PassProfile | None = None
        self._passes = 0
        self._turns: tuple[int, ...] = ()

    def spills(self, index: int) -> bool:
        """Return True if the storage that a pass saves as number `index` leaves at once."""
        return self._amount is None or index < self._amount.count or (index == 0 and self._probes())

    def _probes(self) -> bool:
        """Return True if this pass spills one storage only to measure the drive."""
        # Not needed under a limit: if nothing is spilled, everything fits.
        return self._limit_bytes is None and self._passes % PROBE_EVERY_PASSES == PROBE_EVERY_PASSES - 1

    def turns(self, count: int) -> Sequence[int]:
        """Return the order of the last pass, or the order of saving if that pass saved another number of storages."""
        return self._turns if len(self._turns) == count else range(count)

    def pass_ended(self, profile: PassProfile, device_bytes_per_s: float) -> None:
        """Choose the amount again if the pass differs from the one that it was computed from."""
        # An evaluation has no backward, so that its times say nothing about a step.
        if all(each.path is Path.UNUSED for each in profile.lifetimes):
            return
        self.last = profile
        self._passes += 1
        self._turns = turns([each.needed_s for each in profile.lifetimes])
        basis = Basis(
            forward_s=profile.forward_s,
            total_bytes=profile.saved_bytes,
            count=len(profile.lifetimes),
            device_bytes_per_s=device_bytes_per_s,
        )
        why = "the first pass was measured" if self._basis is None else changed(self._basis, basis)
        if why is None:
            return
        self._basis = basis
        self._choose(why)

    def set_limit(self, limit_bytes: int) -> None:
        """Set another limit, and choose the amount again from the last pass."""
        if limit_bytes == self._limit_bytes:
            return
        self._limit_bytes = limit_bytes
        if self._basis is not None:
            self._choose("the limit was changed")

    def _choose(self, why: str) -> None:
        assert self.last is not None and self._basis is not None
        self._amount = choose_amount(
            [Saved(size_bytes=each.size_bytes, saved_s=each.saved_s) for each in self.last.lifetimes],
            forward_s=self._basis.forward_s,
            device_bytes_per_s=self._basis.device_bytes_per_s,
            limit_bytes=self._limit_bytes,
        )
        self.reason = f"{why}: {self._amount.reason}"
