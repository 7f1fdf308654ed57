"""Writing the parts of a checkpoint, by many writers.

What lets a checkpoint be seen: its manifest, put in its place whole, after all parts. No torch.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from elastrain.snapshot.durable import tensor_sections
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError
from elastrain.snapshot.durable.manifest import MANIFEST, VERIFIED, Manifest, Part, PlainValue, encode, place_in_time
from elastrain.snapshot.durable.places.port import CheckpointPlace, ReadablePlace, Sink
from elastrain.snapshot.shard_state import ShardState

OnSize = Callable[[int], None]


class Written(PlainValue, frozen=True):
    """One shard's state in a file: plain values, which travel as JSON. It counts after `PartWriter.finish`."""

    shard: int
    version: int
    digest: int
    part: Part


class _Told:
    """A sink that tells its size."""

    def __init__(self, sink: Sink, on_size: OnSize) -> None:
        self._sink, self._on_size = sink, on_size
        self.sync, self.commit, self.discard = sink.sync, sink.commit, sink.discard

    @property
    def size_bytes(self) -> int:
        return self._sink.size_bytes

    def write(self, data: memoryview) -> None:
        self._sink.write(data)
        self._on_size(self.size_bytes)


class PartWriter:
    """Writes sections into one file of a checkpoint's folder. Safe for several threads, which take turns.

    `checkpoint` is its name (`manifest.name_of`). The file's name is this writer's alone, so two holders that write the
    same shard, also by mistake, never meet. Ends with `finish` or `give_up`; after an error only `give_up` is left.
    `on_size` is told the file's size whenever it has grown.
    """

    def __init__(self, place: CheckpointPlace, checkpoint: str, *, writer: str, on_size: OnSize | None = None) -> None:
        self._place, self._checkpoint, self._on_size = place, checkpoint, on_size
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
                sink = self._place.create(f"{self._checkpoint}/{self._file}")
                self._sink = sink if self._on_size is None else _Told(sink, self._on_size)
            return tensor_sections.write(self._sink, self._file, meta, tensors)


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
