"""Shares one SSD among the processes of a node, piece by piece: reads before writes, and no rank starves.

A ticket lock is made of a file's byte ranges: each turn locks a byte of its own and waits for the byte of the turn
`width` before it. The kernel lets go of the locks of a process that dies, so nobody waits for the dead. Nothing of
tensors here.

A backward waits for each read, and nothing waits for a write. Writes therefore queue in a line of their own, from which
at most `WIDTH` at a time stand in the drive's line: a read is never behind more writes than that, however many ranks
write. A rank stands in each line with at most `WIDTH` requests, so that shares are per rank, not per thread.
"""

from __future__ import annotations

import fcntl
import os
import platform
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from elastrain.offload.drives.port import IoEngine

WIDTH = 2
"""Two requests at a time are what a drive needs to be busy; more only make the others wait longer."""
_COUNTER = struct.Struct("<q")
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid: as fcntl(2) has it on 64-bit Linux
_MUTEX_AT = 0
_TURNS_FROM = 8


class TicketLock:
    """`file` is made if it is not there; all who name it take turns. Safe from any thread."""

    def __init__(self, file: str | os.PathLike[str], *, width: int = WIDTH) -> None:
        self._file = os.fspath(file)
        self._width = width
        self._mine = threading.local()
        self._descriptors: list[int] = []
        _OPEN.add(self)

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Wait for a turn and hold it; its number. Raises OSError."""
        fd = self._descriptor()
        number = self._draw(fd)
        try:
            if number >= self._width:
                before = _TURNS_FROM + number - self._width
                _lock(fd, fcntl.F_RDLCK, before)  # until that turn is over
                _lock(fd, fcntl.F_UNLCK, before)
            yield number
        finally:
            _lock(fd, fcntl.F_UNLCK, _TURNS_FROM + number)

    def close(self) -> None:
        """Close all descriptors; whoever waits for a turn of this process goes on."""
        descriptors, self._descriptors = self._descriptors, []
        self._mine = threading.local()
        for fd in descriptors:
            os.close(fd)

    def _descriptor(self) -> int:
        """One per thread: locks belong to an open file, not to who holds it."""
        if not hasattr(self._mine, "fd"):
            self._mine.fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._descriptors.append(self._mine.fd)
        fd: int = self._mine.fd
        return fd

    def _draw(self, fd: int) -> int:
        """The next number, with its byte locked before anybody can see that it was drawn."""
        _lock(fd, fcntl.F_WRLCK, _MUTEX_AT)
        try:
            told = os.pread(fd, _COUNTER.size, 0)
            number: int = _COUNTER.unpack(told)[0] if len(told) == _COUNTER.size else 0
            _lock(fd, fcntl.F_WRLCK, _TURNS_FROM + number)
            os.pwrite(fd, _COUNTER.pack(number + 1), 0)
            return number
        finally:
            _lock(fd, fcntl.F_UNLCK, _MUTEX_AT)


# A forked child inherits open files, and with them locks: it must not keep the turn of a parent that died.
_OPEN: weakref.WeakSet[TicketLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for turns in list(_OPEN):
        turns.close()


os.register_at_fork(after_in_child=_close_in_child)


def _lock(fd: int, kind: int, at: int) -> None:
    """Lock or unlock one byte; waits where somebody else holds it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))


class Places:
    """At most `count` threads of this process at a time, in the order of asking. (A `Semaphore` lets some wait on.)"""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Wait for a place and hold it."""
        with self._lock:
            mine = None if self._free else threading.Lock()
            if mine is None:
                self._free -= 1
            else:
                mine.acquire()
                self._waiting.append(mine)
        if mine is not None:
            mine.acquire()  # let go of by whoever hands over its place
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._free += 1


class SharedDrive:
    """The turns of one process at a drive that others use too: all who name the same file. Safe from any thread."""

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._drive = TicketLock(file)
        self._writes = TicketLock(f"{os.fspath(file)}-writes")
        self._own_writes = Places(WIDTH)
        self._own_reads = Places(WIDTH)

    @contextmanager
    def write(self) -> Iterator[None]:
        """Hold the drive for one write. Raises OSError."""
        with self._own_writes.place(), self._writes.turn(), self._drive.turn():
            yield

    @contextmanager
    def read(self) -> Iterator[None]:
        """Hold the drive for one read, which goes before all writes that are not in the drive's line yet."""
        with self._own_reads.place(), self._drive.turn():
            yield

    def close(self) -> None:
        """Close all descriptors; whoever waits for a turn of this process goes on."""
        self._drive.close()
        self._writes.close()


class SharedEngine:
    """`inner`, one turn per request."""

    def __init__(self, inner: IoEngine, turns: SharedDrive) -> None:
        self.name = inner.name
        self._inner = inner
        self._turns = turns

    def reserve(self, size_bytes: int) -> None:
        self._inner.reserve(size_bytes)

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        with self._turns.write():
            self._inner.write(offset_bytes, views)

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        with self._turns.read():
            self._inner.read(offset_bytes, views)

    def capacity_bytes(self) -> int:
        return self._inner.capacity_bytes()

    def close(self) -> None:
        self._inner.close()
        self._turns.close()


def shared(engine: IoEngine, directory: str | os.PathLike[str], run_dir: Path | None) -> IoEngine:
    """`engine`, taking turns with the node's other workers on the same drive, which meet in the run's folder.

    None for the folder: this process has the drive for itself.
    """
    if run_dir is None:
        return engine
    folder = run_dir / "offload"
    folder.mkdir(mode=0o700, exist_ok=True)
    drive = os.stat(directory).st_dev
    name = f"{platform.node()}-{os.major(drive)}-{os.minor(drive)}.turns"
    return SharedEngine(engine, SharedDrive(folder / name))
