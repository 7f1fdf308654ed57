"""Fair sharing of one SSD among the processes of a node, request by request. Reads go before writes. No tensors. Linux.

A `TicketLock` is made of byte-range locks on a file. Each turn locks a byte of its own, and waits for the byte of the
turn `width` before it. The kernel releases the locks of a process that dies, so that no process waits for a dead one.

A backward waits for each read, but no computation waits for a write. Writes therefore first queue in a line of their
own, from which at most `WIDTH` at a time stand in the drive's line. So a read never waits for more writes than that,
however many ranks write. Each rank has at most `WIDTH` requests in each line, so that shares are per rank, not per
thread, and no rank starves.
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
"""Requests at a time. Two keep a drive busy; more only make other processes wait longer."""
_COUNTER = struct.Struct("<q")
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid: as fcntl(2) has it on 64-bit Linux
_MUTEX_AT = 0
_TURNS_FROM = 8


class TicketLock:
    """A fair lock with `width` turns at a time, for all processes that name the same `file`. Safe from any thread.

    The file is created if it does not exist.
    """

    def __init__(self, file: str | os.PathLike[str], *, width: int = WIDTH) -> None:
        self._file = os.fspath(file)
        self._width = width
        self._mine = threading.local()
        self._descriptors: list[int] = []
        _OPEN.add(self)

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Wait for a turn and hold it for a `with` block. Yields the number of the turn. Raises OSError."""
        fd = self._descriptor()
        number = self._draw(fd)
        try:
            if number >= self._width:
                before = _TURNS_FROM + number - self._width
                _lock(fd, fcntl.F_RDLCK, before)  # waits until that turn is over
                _lock(fd, fcntl.F_UNLCK, before)
            yield number
        finally:
            _lock(fd, fcntl.F_UNLCK, _TURNS_FROM + number)

    def close(self) -> None:
        """Close all descriptors, which ends this process's turns."""
        descriptors, self._descriptors = self._descriptors, []
        self._mine = threading.local()
        for fd in descriptors:
            os.close(fd)

    def _descriptor(self) -> int:
        """Return this thread's own descriptor, because the kernel assigns locks to open files, not to threads."""
        if not hasattr(self._mine, "fd"):
            self._mine.fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._descriptors.append(self._mine.fd)
        fd: int = self._mine.fd
        return fd

    def _draw(self, fd: int) -> int:
        """Return the next number. Its byte is locked before another process can see that the number is taken."""
        _lock(fd, fcntl.F_WRLCK, _MUTEX_AT)
        try:
            told = os.pread(fd, _COUNTER.size, 0)
            number: int = _COUNTER.unpack(told)[0] if len(told) == _COUNTER.size else 0
            _lock(fd, fcntl.F_WRLCK, _TURNS_FROM + number)
            os.pwrite(fd, _COUNTER.pack(number + 1), 0)
            return number
        finally:
            _lock(fd, fcntl.F_UNLCK, _MUTEX_AT)


# A forked child inherits open files and their locks. It must not keep the turn of a parent that died.
_OPEN: weakref.WeakSet[TicketLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for turns in list(_OPEN):
        turns.close()


os.register_at_fork(after_in_child=_close_in_child)


def _lock(fd: int, kind: int, at: int) -> None:
    """Lock or unlock one byte. Waits while another process or thread holds it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0))


class Places:
    """A limit of `count` threads of this process at a time, first come, first served (unlike `threading.Semaphore`)."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Wait for a place and hold it for a `with` block."""
        with self._lock:
            mine = None if self._free else threading.Lock()
            if mine is None:
                self._free -= 1
            else:
                mine.acquire()
                self._waiting.append(mine)
        if mine is not None:
            mine.acquire()  # released by the thread that passes its place on
        try:
            yield
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._free += 1


class SharedDrive:
    """The turns of one process at a drive, which it shares with all processes that name the same file.

    Safe from any thread.
    """

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
        """Hold the drive for one read, which goes before all writes that are not in the drive's line yet.

        Raises OSError.
        """
        with self._own_reads.place(), self._drive.turn():
            yield

    def close(self) -> None:
        """Close all descriptors, which ends this process's turns."""
        self._drive.close()
        self._writes.close()


class SharedEngine:
    """The engine `inner`, which waits for a turn with each request."""

    def __init__(self, inner: IoEngine, turns: SharedDrive) -> None:
        self.name = inner.name
        self._inner = inner
        self._turns = turns

    def reserve(self, size_bytes: int) -> None:
        """Make the first `size_bytes` usable, without a turn."""
        self._inner.reserve(size_bytes)

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Write in a turn of its own."""
        with self._turns.write():
            self._inner.write(offset_bytes, views)

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Read in a turn of its own."""
        with self._turns.read():
            self._inner.read(offset_bytes, views)

    def capacity_bytes(self) -> int:
        """Return the size of the device."""
        return self._inner.capacity_bytes()

    def close(self) -> None:
        """Close the engine, then the lock files."""
        self._inner.close()
        self._turns.close()


def shared(engine: IoEngine, directory: str | os.PathLike[str], run_dir: Path | None) -> IoEngine:
    """Return an engine that takes turns with the node's other workers on the same drive.

    The lock files are in `run_dir`. If it is None, `engine` itself is returned, and this process does not share the
    drive.
    """
    if run_dir is None:
        return engine
    folder = run_dir / "offload"
    folder.mkdir(mode=0o700, exist_ok=True)
    drive = os.stat(directory).st_dev
    name = f"{platform.node()}-{os.major(drive)}-{os.minor(drive)}.turns"
    return SharedEngine(engine, SharedDrive(folder / name))
