"""Writing the parts of a checkpoint, by many writers."""

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
