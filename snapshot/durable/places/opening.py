"""From what a user names to a place: `--checkpoint-dir`."""

from __future__ import annotations

from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import place_in_time
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.places.remote import RemotePlace


def place_at(location: str) -> CheckpointPlace:
    """The place that a path or URL names; nothing is looked at or made. Raises CheckpointError for a URL of nowhere."""
    # As a path it would be the working directory, which nobody means who has forgotten to set a variable.
    if not location:
        raise CheckpointError("a checkpoint's place is empty: name a folder or a URL")
    return RemotePlace(location) if "://" in location else LocalPlace(location)


def checkpoint_at(location: str) -> tuple[CheckpointPlace, str | None]:
    """The place, and the checkpoint's name where the path is that of its folder. Raises CheckpointError."""
    parent, _, name = location.rstrip("/").rpartition("/")
    if place_in_time(name) is None:
        return place_at(location), None
    return place_at(parent or "."), name
