"""From what a user names to a place: `--checkpoint-dir`."""

from __future__ import annotations

from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.port import CheckpointPlace


def place_at(location: str) -> CheckpointPlace:
    """The place that a path names; nothing is looked at or made."""
    return LocalPlace(location)
