"""The return of optimizer states to memory within a view, once the view's change of holders is over. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastrain.job.placement import Placement
from elastrain.memory.memory_budget import Fit, Measured, mib

CLEAN_STEPS = 3
"""Steps after which a peak is that of the view alone.

In the first one states are handed over, and the second one begins with gradients' memory that is freed at its start.
"""
SPARE_SHARE = 0.02
"""Share of the limit that stays free when states come back, because peaks of equal steps differ a little."""


def are_in_place(now: Placement, goal: Placement) -> bool:
    """Return True if all shards have the holders that they should have, so that no copy is due."""
    # The order of backups says who takes over first. It moves no state.
    pairs = zip(now, goal, strict=True)
    return all(a.primary == b.primary and set(a.backups) == set(b.backups) for a, b in pairs)


@dataclass(frozen=True, kw_only=True)
class ReturnProgress:
    """The progress of a view towards the one return of states that it allows."""

    is_in_place: bool = False
    """True once a commit has given all shards the holders of the view."""
    clean_steps: int = 0
    """Number of steps measured since then."""
    is_over: bool = False
    """True once states have come back in this view. None come back again, so that they do not go to and fro."""

    def measured(self, *, is_in_place: bool) -> ReturnProgress:
        """Return the progress after one more step, whose commit leaves the holders in place or not."""
        # Holders may be changed again within a view, and then the count begins anew.
        clean_steps = self.clean_steps + 1 if self.is_in_place and is_in_place else 0
        return replace(self, is_in_place=is_in_place, clean_steps=clean_steps)

    def is_due(self) -> bool:
        """Return True if states may come back now."""
        return self.clean_steps >= CLEAN_STEPS and not self.is_over


def coming_back(limit_bytes: int, measured: Measured) -> Fit | None:
    """Return the limits under which as many states are in memory as the last peak leaves room for.

    Returns None if there is no room for any.
    """
    # An estimate does not count: it may have missed what a peak shows, and a limit must not be passed for a try.
    away_bytes = measured.kept_to.shards_on_disk_bytes
    room_bytes = limit_bytes - round(SPARE_SHARE * limit_bytes) - measured.peak_bytes
    back_bytes = min(away_bytes, room_bytes)
    if room_bytes <= 0:
        return None
    return Fit(
        activations_bytes=measured.activations_bytes + limit_bytes - measured.peak_bytes - back_bytes,
        shards_on_disk_bytes=away_bytes - back_bytes,
        reason=f"{mib(measured.peak_bytes)} of {mib(limit_bytes)} were held in the last step: {mib(back_bytes)} of "
        "optimizer shards come back",
    )


def staying_away(decided: Fit, last: Fit) -> Fit:
    """Return an estimated decision with no fewer states outside than before it, as no return is due."""
    # More activations may have room all the same.
    more_bytes = last.shards_on_disk_bytes - decided.shards_on_disk_bytes
    return decided if more_bytes <= 0 else replace(decided, shards_on_disk_bytes=last.shards_on_disk_bytes)
