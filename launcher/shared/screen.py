"""Output of a job's processes: they write into pipes, and threads of the launcher carry it to the screen and to logs.

So no process of the job fails or waits because the screen is gone, full, or read by nobody.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastrain.launcher.shared.rundir import EventLog

_CHUNK_BYTES = 1 << 14
_PATIENCE_MS = 1000
"""A screen that takes nothing for so long is read by nobody."""
_END_S = 10.0
"""Seconds that a slow screen may take to show the last of a job."""
_logs: list[EventLog] = []
"""The log that keeps what cannot be shown; empty before the run has a folder."""


class ScreenPipe:
    """A pipe to the file or terminal `target`, or a terminal if that is one. The owner closes `into`, its begin."""

    def __init__(self, target: int) -> None:
        self._target, self._patience_ms, self._unshown_bytes = target, _PATIENCE_MS, 0
        self._room = select.poll()
        self._room.register(target, select.POLLOUT)
        self._out, self.into = _pipe(target)
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._carry, name="elastrain-screen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Carry what is on the way. A process that outlives the job may write on, and nothing shows that."""
        os.eventfd_write(self._end, 1)
        self._thread.join(_END_S)

    def _carry(self) -> None:
        # A terminal may be set to stop background jobs that write to it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        waiting = select.poll()
        for fd in (self._out, self._end):
            waiting.register(fd, select.POLLIN)
        with suppress(OSError):  # no process has the terminal open any more
            while self._out in dict(waiting.poll()) and (chunk := os.read(self._out, _CHUNK_BYTES)):
                _follow_size(self._target, self._out)
                note = (
                    f"elastrain: {self._unshown_bytes:,} bytes could not be shown: see events.jsonl in the run folder\n"
                )
                if self._unshown_bytes and not self._write(os.fsencode(note)):
                    self._unshown_bytes = 0
                rest = chunk if self._unshown_bytes else self._write(chunk)
                if rest and _logs:
                    _logs[-1].write("not_shown", text=rest.decode(errors="replace"))
                    self._unshown_bytes += len(rest)

    def _write(self, chunk: bytes) -> bytes:
        """Return what the screen does not take."""
        with suppress(OSError):
            while chunk and self._room.poll(self._patience_ms):
                chunk = chunk[os.write(self._target, chunk) :]
                self._patience_ms = _PATIENCE_MS
        self._patience_ms = 0 if chunk else _PATIENCE_MS
        return chunk


def _pipe(target: int) -> tuple[int, int]:
    if os.isatty(target):
        with suppress(OSError):  # this machine may have no terminal to give
            out, into = os.openpty()
            tty.setraw(into)  # the target itself translates the ends of lines
            _follow_size(target, out)
            return out, into
    return os.pipe()


def _follow_size(target: int, terminal: int) -> None:
    with suppress(OSError):  # they may be no terminals
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8)))


def _never_waiting(fd: int) -> int:
    """Return another descriptor for the file of `fd`, whose writes do not wait; `fd`'s own users see no change."""
    if not os.path.isfile(f"/proc/self/fd/{fd}"):  # a file has its position, and does not wait
        with suppress(OSError):  # a socket, or another user's
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return os.dup(fd)


@contextmanager
def shared() -> Iterator[None]:
    """Carry to the screen what this process, and those that it starts meanwhile, write to their standard streams."""
    streams: dict[object, ScreenPipe] = {}
    former = {1: os.dup(1), 2: os.dup(2)}
    for fd, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        found = os.fstat(fd)
        # What goes to the same file stays in its order. What was closed from the start cannot be shown anywhere.
        key = fd if stream is None else (found.st_dev, found.st_ino)
        if key not in streams:
            streams[key] = ScreenPipe(_never_waiting(fd) if stream is not None else os.open("/dev/full", os.O_WRONLY))
        os.dup2(streams[key].into, fd)
    for carried in streams.values():
        os.close(carried.into)
    try:
        yield
    finally:
        for own in (sys.stdout, sys.stderr):
            own.flush()
        for fd, screen in former.items():
            os.dup2(screen, fd)
        for carried in streams.values():
            carried.close()


def keep_in(path: Path) -> None:
    """Write to this log from now on what cannot be shown."""
    _logs[:] = _logs or [EventLog(path, "screen")]
