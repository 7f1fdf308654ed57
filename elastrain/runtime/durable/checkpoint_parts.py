"""Captured states on their way to the thread that writes them, and the parts of checkpoints that they belong to.

The part of a checkpoint that one member writes: captured states wait here for the thread that writes them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import msgspec

from elastrain import protocol as p
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.writing import PartWriter
from elastrain.snapshot.shard_state import ShardState

NICE = 10
"""Added to the writer's niceness: two threads that compute have the processors, it has what they leave."""
Task = Callable[[], None]
Tell = Callable[[p.PartWritten], None]
Apart = Callable[[Task], None]
"""Does a task for which no checkpoint waits: where it fails, that is said."""


class WriterThread:
    """Does one task after the other. Daemon: a disk that hangs must not keep the process.

    `failed` is told what nobody has thought of, in the thread: the next task follows.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="elastrain-checkpoints", daemon=True)
        self._lock = threading.Lock()
        self._waiting = 0
        """How many wait for it: a step for room, the loop for its end."""

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def do(self, task: Task) -> None:
        self._tasks.put(task)

    def close(self, wait_s: float) -> None:
        """What was asked for before is done, if that does not take longer."""
        if self._thread.is_alive():
            self.hurry()  # first: with nothing to do, it ends at once
        self._tasks.put(None)
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def hurry(self) -> None:
        """The job ends: nobody computes any more, so the thread has its share of the processors.

        Where the system lets it: an ordinary user may lower a priority, and not put it back.
        """
        self._count(1)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Likewise while a step waits, or a loop that has ended; the two may overlap."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        """This thread's niceness alone, and that of those that it starts, follows from whether anybody waits."""
        with self._lock:
            self._waiting += more
            if self._thread.is_alive() and self._thread.native_id is not None:
                usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
                with suppress(PermissionError, ProcessLookupError):
                    nice = usual if self._waiting else min(19, usual + NICE)
                    os.setpriority(os.PRIO_PROCESS, self._thread.native_id, nice)

    def _run(self) -> None:
        self._count(0)
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # noqa: BLE001  # it is told, and the next checkpoint may work
                self._failed(error)


class Room:
    """Counts the bytes of captured states that are not written yet. Safe for two threads."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.used_bytes = 0
        self.limit_bytes = limit_bytes
        """None: as much as the states have, since the next checkpoint waits for this one."""
        self._most_bytes = 0
        self._freed = threading.Condition()

    def take_most_bytes(self) -> int:
        """The most that was used since this was last asked."""
        with self._freed:
            most_bytes, self._most_bytes = self._most_bytes, self.used_bytes
            return most_bytes

    def fits(self, size_bytes: int) -> bool:
        return self.limit_bytes is None or self.used_bytes + size_bytes <= self.limit_bytes

    def ever_fits(self, size_bytes: int) -> bool:
        """Whether it does when all is written."""
        return self.limit_bytes is None or size_bytes <= self.limit_bytes

    def wait(self, size_bytes: int, at_most_s: float) -> bool:
        """True when it fits."""
        with self._freed:
            return self._freed.wait_for(lambda: self.fits(size_bytes), at_most_s)

    def take(self, size_bytes: int) -> None:
        with self._freed:
            self.used_bytes += size_bytes
            self._most_bytes = max(self._most_bytes, self.used_bytes)

    def free(self, size_bytes: int) -> None:
        with self._freed:
            self.used_bytes -= size_bytes
            self._freed.notify_all()


class Blocked:
    """A stopwatch: for how long a step has waited for a checkpoint. For the engine's thread."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since_s: float | None = None

    def begin(self) -> None:
        self._since_s = time.monotonic()

    def end(self) -> None:
        """Nothing happens where nobody waits."""
        if self._since_s is not None:
            self._total_s += time.monotonic() - self._since_s
            self._since_s = None

    def take(self) -> float:
        """Seconds since this was last asked."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class PartInWriting:
    """Some shards of a checkpoint, from `BeginPart` to `PartWritten`. Its methods run in the writer's thread."""

    def __init__(
        self, command: p.BeginPart, place: CheckpointPlace, name: str, me: str, tell: Tell, apart: Apart
    ) -> None:
        self.step = command.step
        self.shards = frozenset(command.shards)
        self.is_over = False
        """Nothing more is wanted of it. Set by any thread."""
        self._left = set(command.shards)
        self._told: dict[int, str] = {}
        self._writer = PartWriter(place, name, writer=me)
        self._tell, self._apart = tell, apart

    def check(self, check: Task) -> None:
        """Before anything of it is written. `check` raises CheckpointError where the place is another job's now."""
        try:
            check()
        except CheckpointError as error:
            self.fail(str(error))

    def write(self, state: ShardState, digest: int | None, then: Callable[[], None]) -> None:
        """One of its states; the last one ends it. `digest`: what it was verified with. `then` follows in any case."""
        try:
            self._write(state, digest)
        except CheckpointError as error:
            self.fail(str(error))
        finally:
            then()

    def _write(self, state: ShardState, digest: int | None) -> None:
        if not self.is_over:
            written = self._writer.write(state)
            # Afterwards, so that whatever changed before it was written shows.
            if not self.is_over and digest not in (None, state.checksum()):
                raise CheckpointError(f"the state of shard {state.shard} has changed in memory since it was verified")
            self._told[state.shard] = msgspec.json.encode(written).decode()
            self._left.discard(state.shard)
        if self.is_over:  # perhaps meanwhile: a state that was lent may have changed then
            self.give_up()
        elif not self._left:
            self._writer.finish()
            self._end()

    def give_up(self) -> None:
        self.is_over = True
        self._apart(self._writer.give_up)

    def fail(self, problem: str) -> None:
        self.give_up()
        self._tell(p.PartWritten(step=self.step, shards=(), told=(), problem=problem))

    def _end(self) -> None:
        shards = tuple(sorted(self._told))
        told = tuple(self._told[shard] for shard in shards)
        self._tell(p.PartWritten(step=self.step, shards=shards, told=told, problem=""))


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
