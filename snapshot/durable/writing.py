"""Writing the parts of a checkpoint, by many writers."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence

from torch import Tensor

from elastrain.snapshot.durable import sections
from elastrain.snapshot.durable.manifest import Part, PlainValue
from elastrain.snapshot.durable.places.port import CheckpointPlace, Sink
from elastrain.snapshot.state import ShardState


class Written(PlainValue, frozen=True):
    """One shard's state in a file: plain values, which travel as JSON. It counts after `PartWriter.finish`."""

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
