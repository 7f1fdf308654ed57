"""The last step of writing a checkpoint: its manifest gets its name after all parts are complete. No torch.

Readers see a checkpoint only once it has a manifest.
"""

from __future__ import annotations

import contextlib
import secrets

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError
from elastrain.snapshot.durable.manifest import MANIFEST, VERIFIED, Manifest, encode, place_in_time
from elastrain.snapshot.durable.places.port import CheckpointPlace, ReadablePlace, Sink


class Staged:
    """A manifest that is on the medium under a temporary name. Call `publish` or `give_up` at the end."""

    def __init__(self, place: CheckpointPlace, manifest: Manifest) -> None:
        self._place, self._name = place, manifest.name
        self._sink = _written(place, f"{manifest.name}/{MANIFEST}", encode(manifest))

    def publish(self) -> None:
        """Give the manifest its name, so that readers see the checkpoint.

        Raises TakenError if this checkpoint or a newer one is visible by now, and CheckpointError.
        """
        _check_newest(self._place, self._name)
        _commit(self._sink)

    def give_up(self) -> None:
        """Remove the manifest. Does nothing after `publish`."""
        self._sink.discard()


def stage(place: CheckpointPlace, manifest: Manifest) -> Staged:
    """Write the manifest under a temporary name. All parts that it names must be finished, here or in another place.

    Checkpoints become visible in rising order only. An older folder without a manifest is therefore certainly
    abandoned. Raises TakenError if this checkpoint or a newer one is visible, and CheckpointError.
    """
    _check_newest(place, manifest.name)
    lacking = [shard.index for shard in manifest.shards if not shard.parts]
    if lacking:
        raise CheckpointError(f"{manifest.name} lacks shards {lacking}: given up")
    return Staged(place, manifest)


def publish(place: CheckpointPlace, manifest: Manifest) -> None:
    """Write the manifest under its name at once: `stage`, then `Staged.publish`."""
    stage(place, manifest).publish()


def put(place: CheckpointPlace, name: str, data: bytes) -> None:
    """Write a small file atomically. Raises TakenError if the name is in use, and CheckpointError."""
    _commit(_written(place, name, data))


def try_out(place: CheckpointPlace) -> None:
    """Make the place, write a small file into it, and remove that file. Raises CheckpointError if that fails."""
    name = f"trial-{secrets.token_hex(8)}"
    put(place, name, b"a trial: it may be removed\n")
    place.remove(name)


def get(place: ReadablePlace, name: str, *, at_most_bytes: int) -> bytes:
    """Return the content of a small file. Raises DamagedError if it is too large, CheckpointError if it is missing."""
    source = place.open(name)
    try:
        if source.size_bytes > at_most_bytes:
            raise DamagedError(f"{place.location}/{name} has {source.size_bytes:,} bytes: it is not what its name says")
        data = bytearray(source.size_bytes)
        source.read_into(memoryview(data), 0)
        return bytes(data)
    finally:
        source.close()


def visible(place: ReadablePlace) -> list[str]:
    """Return the names of the checkpoints that have a manifest, the newest last."""
    folders = [name for name in place.names() if place_in_time(name)]
    return sorted((name for name in folders if MANIFEST in place.names(name)), key=_when)


def mark_verified(place: CheckpointPlace, checkpoint: str) -> None:
    """Mark a checkpoint as read back completely. Raises CheckpointError."""
    with contextlib.suppress(TakenError):
        put(place, f"{checkpoint}/{VERIFIED}", b"read back whole\n")


def _check_newest(place: CheckpointPlace, name: str) -> None:
    there = visible(place)
    if name in there:
        raise TakenError(f"{name} is in {place.location} already, and nothing is overwritten")
    if there and _when(there[-1]) > _when(name):
        raise TakenError(f"{name} is older than {there[-1]}, which is in {place.location} already: given up")


def _when(name: str) -> tuple[int, int]:
    return place_in_time(name) or (-1, -1)


def _written(place: CheckpointPlace, name: str, data: bytes) -> Sink:
    sink = place.create(name)
    try:
        sink.write(memoryview(data))
        sink.sync()
    except CheckpointError:
        sink.discard()
        raise
    return sink


def _commit(sink: Sink) -> None:
    try:
        sink.commit()
    except CheckpointError:
        sink.discard()
        raise
