"""A writer of the part files of a checkpoint. Each member of a job has its own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from elastrain.snapshot.durable import tensor_sections
from elastrain.snapshot.durable.manifest import Part, PlainValue
from elastrain.snapshot.durable.places.port import CheckpointPlace, Sink
from elastrain.snapshot.shard_state import ShardState

OnSize = Callable[[int], None]
"""Called with the size of the file in bytes whenever it has grown."""


class Written(PlainValue, frozen=True):
    """One shard's state in a part file, as plain values that travel as JSON. Valid only after `PartWriter.finish`."""

    shard: int
    version: int
    digest: int
    part: Part


class _Told:
    """A sink that reports its size after each write."""

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
    """Writer of sections into one file of a checkpoint's folder. Several threads may use it; they take turns.

    The file has a random name. Two holders that write the same shard, even by mistake, never share a file. Call
    `finish` or `give_up` at the end; after an error, call `give_up`.

    Args:
        place: The place to write to.
        checkpoint: Name of the checkpoint (`manifest.name_of`).
        writer: A part of the file name that tells writers apart.
        on_size: Called with the size of the file in bytes whenever it has grown.
    """

    def __init__(self, place: CheckpointPlace, checkpoint: str, *, writer: str, on_size: OnSize | None = None) -> None:
        self._place, self._checkpoint, self._on_size = place, checkpoint, on_size
        self._file = f"part-{writer}-{secrets.token_hex(4)}"
        self._sink: Sink | None = None
        self._lock = threading.Lock()

    def write(self, state: ShardState) -> Written:
        """Append a state, which must not change during the call. Raises CheckpointError."""
        meta, tensors = state.pack()
        digest = state.digest()
        return Written(shard=state.shard, version=state.version, digest=digest, part=self._append(meta, tensors))

    def attach(self, text: str, tensors: Sequence[Tensor] = ()) -> Part:
        """Append a text with 1-D contiguous tensors, such as the loop's state. Raises CheckpointError."""
        return self._append(text.encode(), tensors)

    def finish(self) -> None:
        """Force all written bytes to the medium, and give the file its name. Raises CheckpointError."""
        with self._lock:
            if self._sink is not None:
                self._sink.commit()
                self._sink = None

    def give_up(self) -> None:
        """Remove the file unless it is finished."""
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
