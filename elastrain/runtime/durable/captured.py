"""Captured states on their way to the thread that writes them, and the parts of checkpoints that they belong to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastrain import protocol as p
from elastrain.runtime.durable.parts import Apart, Blocked, PartInWriting, Room, Task, WriterThread
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.state import ShardState

CLOSE_S = 10.0
"""How long a member waits for the disk: at its end for what is being written, and for room for one checkpoint."""


class Captured:
    """Owns the parts that are being written, and the room for copies of states. For the engine's thread."""

    def __init__(self, thread: WriterThread, tell: Callable[[p.Event], None], wake: Task, apart: Apart) -> None:
        """`wake`: called by the writer's thread when there is room again, since nothing else may happen by then."""
        self.room = Room(None)
        self.blocked = Blocked()
        self._thread = thread
        self._tell, self._wake, self._apart = tell, wake, apart
        self._parts: list[PartInWriting] = []
        self._patience_s = CLOSE_S
        """For the disk, until the next part: states change together, and nobody hears this member meanwhile."""

    def begin(self, command: p.BeginPart, place: CheckpointPlace, name: str, me: str) -> PartInWriting:
        self._patience_s = CLOSE_S
        self._parts.append(PartInWriting(command, place, name, me, self._tell, self._apart))
        return self._parts[-1]

    def end(self, step: int) -> None:
        """The checkpoint is complete, or given up."""
        for part in [part for part in self._parts if part.step == step]:
            self._parts.remove(part)
            self._cancel(part)

    def is_ready_for(self, size_bytes: int) -> bool:
        return self.room.fits(size_bytes) or not self.room.ever_fits(size_bytes)

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        """At most as long as a member may be silent: what does not come to the disk by then is given up."""
        if not self.room.ever_fits(size_bytes):
            return False
        if is_awaited:  # a copy behind the scenes blocks nobody, however long its thread has no processor
            self.blocked.begin()
        self._wait(lambda at_most_s: self.room.wait(size_bytes, at_most_s))
        return True

    def take(self, step: int, digest: int | None, state: ShardState) -> None:
        self.blocked.end()
        part = self._part(step, state.shard)
        if part is None:
            return
        size_bytes = state.nbytes
        self.room.take(size_bytes)
        self._thread.do(lambda: part.write(state, digest, lambda: self._free(size_bytes)))

    def lend(self, step: int, digest: int | None, state: ShardState) -> None:
        """Likewise."""
        self.blocked.begin()
        part, written = self._part(step, state.shard), threading.Event()
        if part is not None:
            self._thread.do(lambda: part.write(state, digest, written.set))
            self._wait(written.wait)
        self.blocked.end()

    def _part(self, step: int, shard: int) -> PartInWriting | None:
        here = (part for part in self._parts if part.step == step and shard in part.shards and not part.is_over)
        return next(here, None)

    def _free(self, size_bytes: int) -> None:
        self.room.free(size_bytes)
        self._wake()

    def _wait(self, until: Callable[[float], bool]) -> None:
        began_s = time.monotonic()
        with self._thread.hurried():
            has_come = until(self._patience_s)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began_s))
        if not has_come:
            self._give_up()

    def _give_up(self) -> None:
        for part in [part for part in self._parts if not part.is_over]:
            self._cancel(part)
            problem = "the disk is too slow for the memory there is"
            self._tell(p.PartWritten(step=part.step, shards=(), told=(), problem=problem))

    def _cancel(self, part: PartInWriting) -> None:
        # At once, since what was lent may change next; the file is the writer's, which removes it in its turn.
        part.is_over = True
        self._thread.do(part.give_up)
