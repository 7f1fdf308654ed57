"""Old checkpoints go when enough newer ones are there, and the newest has been read back whole."""

from __future__ import annotations

import time

from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.pruning import removals, remove
from elastrain.snapshot.durable.publishing import mark_verified, visible
from elastrain.snapshot.durable.reading import Checkpoint


def tidy(place: CheckpointPlace, *, keep: int, age_s: float | None = None) -> list[str]:
    """Verify the newest one and remove what it makes needless; what was done, as sentences."""
    try:
        there = visible(place)
        if len(there) <= (keep if age_s is None else 1):  # nothing could go, so nothing is read
            return []
        problems = Checkpoint.open([place], there[-1]).verify(digests=False)
        if problems:
            return [f"{there[-1]} is damaged, and nothing is removed: {problems[0]}"]
        mark_verified(place, there[-1])
        gone = removals(place, keep=keep, age_s=age_s, now_s=time.time())
        for removal in gone:
            remove(place, removal.name)
    except CheckpointError as error:
        return [str(error)]
    return [f"{removal.name} is removed: {removal.reason}" for removal in gone]
