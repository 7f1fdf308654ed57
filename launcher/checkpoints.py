"""What the launcher asks of a job's durable checkpoints: which step the newest complete one is of."""

from __future__ import annotations

from pathlib import Path


def newest_step(folder: Path | None) -> int | None:
    """None where no checkpoint was asked for, or none is complete. Looks at sizes and marks, reads no shard."""
    if folder is None:
        return None
    from elastrain.snapshot.durable.choosing import choose, quick
    from elastrain.snapshot.durable.errors import CheckpointError
    from elastrain.snapshot.durable.places.opening import place_at

    try:
        found = choose([place_at(str(folder))], quick).checkpoint
    except CheckpointError:
        return None
    return None if found is None else found.manifest.step
