"""The part of a checkpoint that one member writes: captured states wait here for the thread that writes them."""

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
from elastrain.snapshot.state import ShardState

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
