"""Writing a checkpoint: parts by many writers, then one manifest that lets it be seen."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from elastrain.snapshot.durable import sections
from elastrain.snapshot.durable.errors import CheckpointError, TakenError
from elastrain.snapshot.durable.manifest import MANIFEST, VERIFIED, Manifest, Part, encode, place_in_time
from elastrain.snapshot.durable.places.port import CheckpointPlace, Sink
from elastrain.snapshot.state import ShardState


@dataclass(frozen=True, kw_only=True)
class Written:
    """One shard's state in a file. It counts after `PartWriter.finish`."""

    shard: int
    version: int
    digest: int
    part: Part


class PartWriter:
    """Writes sections into one file of a checkpoint's folder. Safe for several threads, which take turns.

    `checkpoint` is its name (`manifest.name_of`). The file's name is this writer's alone, so two holders that write the
    same shard, also by mistake, never meet. Ends with `finish` or `give_up`; after an error only `give_up` is left.
    """

    def __init__(self, place: CheckpointPlace, checkpoint: str, *, writer: str) -> None:
        self._place, self._checkpoint = place, checkpoint
        self._file = f"part-{writer}-{secrets.token_hex(4)}"
        self._sink: Sink | None = None
        self._lock = threading.Lock()

    def write(self, state: ShardState) -> Written:
        """Append the state as it is now: it must not change meanwhile. Raises CheckpointError."""
        meta, tensors = state.pack()
        digest = state.digest()
        return Written(shard=state.shard, version=state.version, digest=digest, part=self._append(meta, tensors))

    def attach(self, text: str, tensors: Sequence[Tensor] = ()) -> Part:
        """Append a text with tensors (1-D, contiguous), such as the loop's state. Raises CheckpointError."""
        return self._append(text.encode(), tensors)

    def finish(self) -> None:
        """All that was written is on the medium, under its name. Raises CheckpointError."""
        with self._lock:
            if self._sink is not None:
                self._sink.commit()
                self._sink = None

    def give_up(self) -> None:
        """Leave nothing behind of what is not finished."""
        with self._lock:
            if self._sink is not None:
                self._sink.discard()
                self._sink = None

    def _append(self, meta: bytes, tensors: Sequence[Tensor]) -> Part:
        with self._lock:
            if self._sink is None:
                self._sink = self._place.create(f"{self._checkpoint}/{self._file}")
            return sections.write(self._sink, self._file, meta, tensors)


def publish(place: CheckpointPlace, manifest: Manifest) -> None:
    """Let the checkpoint be seen in this place. Every part in it must be finished, here or in another place.

    Checkpoints become visible in rising order only, so that an older folder without a manifest is certainly nobody's.
    Raises TakenError for one that is there already or older than one that is; CheckpointError.
    """
    now = place_in_time(manifest.name)
    newer = [name for name in visible(place) if now is None or (place_in_time(name) or now) > now]
    if newer:
        raise TakenError(f"{manifest.name} is older than {newer[-1]}, which is in {place.location} already: given up")
    lacking = [shard.index for shard in manifest.shards if not shard.parts]
    if lacking:
        raise CheckpointError(f"{manifest.name} lacks shards {lacking}: given up")
    put(place, f"{manifest.name}/{MANIFEST}", encode(manifest))


def put(place: CheckpointPlace, name: str, data: bytes) -> None:
    """A whole small file, or none. Raises TakenError if the name is taken; CheckpointError."""
    sink = place.create(name)
    try:
        sink.write(memoryview(data))
        sink.commit()
    except CheckpointError:
        sink.discard()
        raise


def visible(place: CheckpointPlace) -> list[str]:
    """Names of the checkpoints that have a manifest, the newest last."""
    folders = [name for name in place.names() if place_in_time(name)]
    return sorted(
        (name for name in folders if MANIFEST in place.names(name)), key=lambda name: place_in_time(name) or ()
    )


def mark_verified(place: CheckpointPlace, checkpoint: str) -> None:
    """Note that it was read back whole. Raises CheckpointError."""
    try:
        put(place, f"{checkpoint}/{VERIFIED}", b"read back whole\n")
    except TakenError:
        pass
