"""What lets a checkpoint be seen: its manifest, put in its place whole, after all parts. No torch."""

from __future__ import annotations

import contextlib
import secrets

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError
from elastrain.snapshot.durable.manifest import MANIFEST, VERIFIED, Manifest, encode, place_in_time
from elastrain.snapshot.durable.places.port import CheckpointPlace, ReadablePlace, Sink


class Staged:
    """A manifest that is on the medium and cannot be seen yet. Ends with `publish` or `give_up`."""

    def __init__(self, place: CheckpointPlace, manifest: Manifest) -> None:
        self._place, self._name = place, manifest.name
        self._sink = _written(place, f"{manifest.name}/{MANIFEST}", encode(manifest))

    def publish(self) -> None:
        """Let it be seen. Raises TakenError if a newer one, or it, is there by now; CheckpointError."""
        _check_newest(self._place, self._name)
        _commit(self._sink)

    def give_up(self) -> None:
        """Leave nothing of it. Nothing happens after `publish`."""
        self._sink.discard()


def stage(place: CheckpointPlace, manifest: Manifest) -> Staged:
    """Write the manifest under a temporary name. Every part in it must be finished, here or in another place.

    Checkpoints become visible in rising order only, so that an older folder without a manifest is certainly nobody's.
    Raises TakenError for one that is there already or older than one that is; CheckpointError.
    """
    _check_newest(place, manifest.name)
    lacking = [shard.index for shard in manifest.shards if not shard.parts]
    if lacking:
        raise CheckpointError(f"{manifest.name} lacks shards {lacking}: given up")
    return Staged(place, manifest)


def publish(place: CheckpointPlace, manifest: Manifest) -> None:
    """`stage`, and let it be seen at once."""
    stage(place, manifest).publish()


def put(place: CheckpointPlace, name: str, data: bytes) -> None:
    """A whole small file, or none. Raises TakenError if the name is taken; CheckpointError."""
    _commit(_written(place, name, data))


def try_out(place: CheckpointPlace) -> None:
    """Make the place, write a small file into it and remove it again. Raises CheckpointError where that fails."""
    name = f"trial-{secrets.token_hex(8)}"
    put(place, name, b"a trial: it may be removed\n")
    place.remove(name)


def get(place: ReadablePlace, name: str, *, at_most_bytes: int) -> bytes:
    """A whole small file. Raises DamagedError if it is larger, CheckpointError if it is missing."""
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
    """Names of the checkpoints that have a manifest, the newest last."""
    folders = [name for name in place.names() if place_in_time(name)]
    return sorted((name for name in folders if MANIFEST in place.names(name)), key=_when)


def mark_verified(place: CheckpointPlace, checkpoint: str) -> None:
    """Note that it was read back whole. Raises CheckpointError."""
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
