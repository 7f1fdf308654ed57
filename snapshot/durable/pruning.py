"""What may be removed: old checkpoints by count and age, and what interrupted writes left. Decided over values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import MANIFEST, VERIFIED, place_in_time
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.reading import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A checkpoint's folder as pruning sees it."""

    name: str
    is_visible: bool
    """It has a manifest."""
    is_verified: bool
    """It was read back whole."""
    time_s: float
    """Unix time of its commit; infinite where nobody knows: it is never too old."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A folder that goes, and why."""

    name: str
    reason: str


def prune(entries: Sequence[Kept], *, keep: int, now_s: float, age_s: float | None = None) -> tuple[Removal, ...]:
    """What goes, the oldest first: beyond the newest `keep`, or older than `age_s`; and what nobody writes any more.

    Nothing goes unless a newer one has been verified; the newest verified one and all that is newer stay. `keep` >= 1.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint is kept; got {keep}")
    ordered = sorted((entry for entry in entries if _when(entry)), key=_when)
    verified = [_when(entry) for entry in ordered if entry.is_visible and entry.is_verified]
    if not verified:
        return ()
    seen = [entry for entry in ordered if entry.is_visible]
    gone = []
    # Checkpoints become visible in rising order, so a folder without a manifest that is older than a verified one stays
    # invisible for ever: what lies in it is certainly nobody's.
    for entry in ordered:
        if _when(entry) >= verified[-1]:
            break
        newer = sum(_when(other) > _when(entry) for other in seen)
        if not entry.is_visible:
            gone.append(Removal(name=entry.name, reason="its writing was interrupted, and a newer one is complete"))
        elif newer >= keep:
            gone.append(Removal(name=entry.name, reason=f"{newer} newer ones are there, and {keep} are kept"))
        elif age_s is not None and now_s - entry.time_s > age_s:
            gone.append(Removal(name=entry.name, reason=f"it is older than {age_s:.0f} s"))
    return tuple(gone)


def _when(entry: Kept) -> tuple[int, int]:
    return place_in_time(entry.name) or (-1, -2)


def removals(place: CheckpointPlace, *, keep: int, age_s: float | None, now_s: float) -> tuple[Removal, ...]:
    """What may go from this place. Ages are asked for only where they count. Raises CheckpointError."""
    return prune(kept(place, with_times=age_s is not None), keep=keep, now_s=now_s, age_s=age_s)


def kept(place: CheckpointPlace, *, with_times: bool = False) -> list[Kept]:
    """The folders of a place. A manifest that cannot be read says nothing of its time. Raises CheckpointError."""
    entries = []
    for name in place.names():
        if place_in_time(name) is None:
            continue
        files = place.names(name)
        entries.append(
            Kept(
                name=name,
                is_visible=MANIFEST in files,
                is_verified=VERIFIED in files,
                time_s=_time_s(place, name) if with_times and MANIFEST in files else math.inf,
            )
        )
    return entries


def _time_s(place: CheckpointPlace, name: str) -> float:
    try:
        return Checkpoint.open([place], name).manifest.time_s
    except CheckpointError:
        return math.inf


def remove(place: CheckpointPlace, name: str) -> None:
    """Remove a checkpoint's folder: the manifest first, so that no half of it can ever be seen. Raises CheckpointError.

    Files that this package does not write are left, and the folder with them.
    """
    place.remove(f"{name}/{MANIFEST}")
    for file in place.names(name):
        if file == VERIFIED or file.startswith(("part-", ".writing-")):
            place.remove(f"{name}/{file}")
    if not place.names(name):
        place.remove(name)
