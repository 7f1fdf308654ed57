"""The part of a checkpoint that one member writes. Captured states wait for a thread that writes them.

`WriterThread` runs the tasks, `Room` limits the memory of waiting states, `PartInWriting` is one part, and `Captured`
connects them for the engine.
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
"""Added to the niceness of the writer thread, so that it uses only idle processor time."""
Task = Callable[[], None]
"""Work for the writer thread."""
Tell = Callable[[p.PartWritten], None]
"""Reports the outcome of a part to the engine."""
Apart = Callable[[Task], None]
"""Runs a task that no checkpoint waits for. An error of the task is only logged."""


class WriterThread:
    """A daemon thread that runs tasks one after the other. A disk that hangs does not keep the process alive.

    `failed` is called in the thread if a task raises. The thread then goes on with the next task.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="elastrain-checkpoints", daemon=True)
        self._lock = threading.Lock()
        self._waiting = 0
        """Number of waits for the thread: a step that needs room, or a loop that has ended."""

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if not self._thread.is_alive():
            self._thread.start()

    def do(self, task: Task) -> None:
        """Queue a task."""
        self._tasks.put(task)

    def close(self, wait_s: float) -> None:
        """Finish the queued tasks, and end the thread. Gives up after `wait_s` seconds."""
        if self._thread.is_alive():
            self.hurry()  # before the end mark: an idle thread ends at once
        self._tasks.put(None)
        if self._thread.is_alive():
            self._thread.join(wait_s)

    def hurry(self) -> None:
        """Give the thread normal priority until its end, because the job ends and does not compute.

        Without the privilege to raise a priority, it stays low.
        """
        self._count(1)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Give the thread normal priority while a step or an ended loop waits for it. Calls may overlap."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        """Change the number of waits by `more`, and set the thread's niceness. Threads that it starts inherit it."""
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
            except Exception as error:  # noqa: BLE001  # it is reported, and the next checkpoint may succeed
                self._failed(error)


class Room:
    """A counter of the bytes of captured states that are not written yet. Two threads may use it."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.used_bytes = 0
        self.limit_bytes = limit_bytes
        """Limit of `used_bytes`. None means no limit: only one checkpoint is written at a time."""
        self._most_bytes = 0
        self._freed = threading.Condition()

    def take_most_bytes(self) -> int:
        """Return the largest number of bytes in use since the last call."""
        with self._freed:
            most_bytes, self._most_bytes = self._most_bytes, self.used_bytes
            return most_bytes

    def fits(self, size_bytes: int) -> bool:
        """Return True if the bytes fit now."""
        return self.limit_bytes is None or self.used_bytes + size_bytes <= self.limit_bytes

    def ever_fits(self, size_bytes: int) -> bool:
        """Return True if the bytes fit once everything else is written."""
        return self.limit_bytes is None or size_bytes <= self.limit_bytes

    def wait(self, size_bytes: int, at_most_s: float) -> bool:
        """Wait until the bytes fit, at most `at_most_s` seconds. Returns False if they still do not."""
        with self._freed:
            return self._freed.wait_for(lambda: self.fits(size_bytes), at_most_s)

    def take(self, size_bytes: int) -> None:
        """Count bytes as used."""
        with self._freed:
            self.used_bytes += size_bytes
            self._most_bytes = max(self._most_bytes, self.used_bytes)

    def free(self, size_bytes: int) -> None:
        """Count bytes as free, and wake a waiting thread."""
        with self._freed:
            self.used_bytes -= size_bytes
            self._freed.notify_all()


class Blocked:
    """A stopwatch of the time that steps wait for a checkpoint. The engine thread uses it."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since_s: float | None = None

    def begin(self) -> None:
        """Start the stopwatch."""
        self._since_s = time.monotonic()

    def end(self) -> None:
        """Stop the stopwatch. Does nothing if it does not run."""
        if self._since_s is not None:
            self._total_s += time.monotonic() - self._since_s
            self._since_s = None

    def take(self) -> float:
        """Return the seconds measured since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class PartInWriting:
    """One member's shards in a checkpoint, from `BeginPart` to `PartWritten`. The methods run in the writer thread."""

    def __init__(
        self, command: p.BeginPart, place: CheckpointPlace, name: str, me: str, tell: Tell, apart: Apart
    ) -> None:
        self.step = command.step
        self.shards = frozenset(command.shards)
        self.is_over = False
        """True if the part is finished or cancelled. Any thread may set it."""
        self._left = set(command.shards)
        self._told: dict[int, str] = {}
        self._writer = PartWriter(place, name, writer=me)
        self._tell, self._apart = tell, apart

    def check(self, check: Task) -> None:
        """Give the part up if `check` raises CheckpointError: another job has taken the place over."""
        try:
            check()
        except CheckpointError as error:
            self.fail(str(error))

    def write(self, state: ShardState, digest: int | None, then: Callable[[], None]) -> None:
        """Write one state. The last one completes the part.

        `digest` is the state's checksum at its verification, its digest in a job on a device, or None. `then` is called
        in any case.
        """
        try:
            self._write(state, digest)
        except CheckpointError as error:
            self.fail(str(error))
        finally:
            then()

    def _write(self, state: ShardState, digest: int | None) -> None:
        if not self.is_over:
            written = self._writer.write(state)
            # Compared after writing, so that every change before or during the write is found.
            if not self.is_over and digest not in (None, state.checksum()) and digest != state.digest():
                raise CheckpointError(f"the state of shard {state.shard} has changed in memory since it was verified")
            self._told[state.shard] = msgspec.json.encode(written).decode()
            self._left.discard(state.shard)
        if self.is_over:  # perhaps cancelled during the write: a lent state may have changed by then
            self.give_up()
        elif not self._left:
            self._writer.finish()
            self._end()

    def give_up(self) -> None:
        """Cancel the part, and remove its file."""
        self.is_over = True
        self._apart(self._writer.give_up)

    def fail(self, problem: str) -> None:
        """Cancel the part, and report the problem to the engine."""
        self.give_up()
        self._tell(p.PartWritten(step=self.step, shards=(), told=(), problem=problem))

    def _end(self) -> None:
        shards = tuple(sorted(self._told))
        told = tuple(self._told[shard] for shard in shards)
        self._tell(p.PartWritten(step=self.step, shards=shards, told=told, problem=""))


CLOSE_S = 10.0
"""Seconds that a member waits for the disk: at its end, and for room for the states of one checkpoint."""


class Captured:
    """The parts that are being written, and the room for copies of states. The engine thread uses it."""

    def __init__(self, thread: WriterThread, tell: Callable[[p.Event], None], wake: Task, apart: Apart) -> None:
        """Create it. The writer thread calls `wake` when there is room again, because the engine may be idle then."""
        self.room = Room(None)
        self.blocked = Blocked()
        self._thread = thread
        self._tell, self._wake, self._apart = tell, wake, apart
        self._parts: list[PartInWriting] = []
        self._patience_s = CLOSE_S
        """Seconds left to wait for the disk, until the next part begins.

        All states change together, and during a wait this member sends nothing to its peers.
        """

    def begin(self, command: p.BeginPart, place: CheckpointPlace, name: str, me: str) -> PartInWriting:
        """Begin a part of a checkpoint."""
        self._patience_s = CLOSE_S
        self._parts.append(PartInWriting(command, place, name, me, self._tell, self._apart))
        return self._parts[-1]

    def end(self, step: int) -> None:
        """End the parts of a checkpoint that is complete or given up."""
        for part in [part for part in self._parts if part.step == step]:
            self._parts.remove(part)
            self._cancel(part)

    def is_ready_for(self, size_bytes: int) -> bool:
        """Return True if a copy fits now, or if no copy would ever fit and the state must be lent."""
        return self.room.fits(size_bytes) or not self.room.ever_fits(size_bytes)

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        """Wait for room for a copy. Returns False if there will never be enough, so that the state must be lent.

        If the disk is too slow, open parts are given up, because a member may not be silent for long. A wait counts as
        blocked time only if a step awaits it.
        """
        if not self.room.ever_fits(size_bytes):
            return False
        if is_awaited:  # a copy in the background blocks no step
            self.blocked.begin()
        self._wait(lambda at_most_s: self.room.wait(size_bytes, at_most_s))
        return True

    def take(self, step: int, digest: int | None, state: ShardState) -> None:
        """Queue a copy of a state for writing."""
        self.blocked.end()
        part = self._part(step, state.shard)
        if part is None:
            return
        size_bytes = state.nbytes
        self.room.take(size_bytes)
        self._thread.do(lambda: part.write(state, digest, lambda: self._free(size_bytes)))

    def lend(self, step: int, digest: int | None, state: ShardState) -> None:
        """Write the state itself, and wait until that is done."""
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
        # Set at once, because a lent state may change next. The writer thread removes the file later.
        part.is_over = True
        self._thread.do(part.give_up)
