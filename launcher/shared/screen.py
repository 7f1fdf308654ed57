"""Pipes and threads that carry the output of a job's processes to the screen and to logs.

The processes write into pipes, and threads of the launcher read them. So no process of the job fails or blocks because
the screen is closed or full, or because no program reads it.
"""

from __future__ import annotations

import fcntl
import os
import re
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

_LINE_END = re.compile(rb"\r\n?|\n")
"""A progress bar ends its lines with a carriage return alone."""
_CHUNK_BYTES = 1 << 14
_PATIENCE_MS = 1000
"""Milliseconds without progress after which the screen counts as blocked."""
_END_S = 10.0
"""Seconds that a slow screen may take to show the last output of a job."""
_logs: list[EventLog] = []
"""At most one log, which keeps output that cannot be shown. Empty before the run has a folder."""


class ScreenPipe:
    """A pipe to the file or terminal `target`. It is a pseudo-terminal if `target` is a terminal.

    The owner closes `into`, the writing end, and `close` closes the target. `shown`: a descriptor to which each line is
    written, too, and the words before the line.
    """

    def __init__(self, target: int, *, shown: tuple[int, str] | None = None) -> None:
        self._target, self._patience_ms, self._unshown_bytes = target, _PATIENCE_MS, 0
        self._lines = _Lines(*shown) if shown is not None else None
        self._room = select.poll()
        self._room.register(target, select.POLLOUT)
        self._out, self.into = _pipe(target)
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._carry, name="elastrain-screen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show what is still in the pipe. Later output of processes that outlive the job is lost."""
        os.eventfd_write(self._end, 1)
        self._thread.join(_END_S)
        if not self._thread.is_alive():  # else it still writes to a slow screen
            for fd in (self._out, self._end, self._target):
                os.close(fd)

    def _carry(self) -> None:
        # A terminal may be set to stop background jobs that write to it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        waiting = select.poll()
        for fd in (self._out, self._end):
            waiting.register(fd, select.POLLIN)
        with suppress(OSError):  # raised once no process has the terminal open
            while self._out in dict(waiting.poll()) and (chunk := os.read(self._out, _CHUNK_BYTES)):
                _follow_size(self._target, self._out)
                if self._lines is not None:
                    self._lines.add(chunk)
                note = (
                    f"elastrain: {self._unshown_bytes:,} bytes could not be shown: see events.jsonl in the run folder\n"
                )
                if self._unshown_bytes and not self._write(os.fsencode(note)):
                    self._unshown_bytes = 0
                rest = chunk if self._unshown_bytes else self._write(chunk)
                if rest and _logs:
                    _logs[-1].write("not_shown", text=rest.decode(errors="replace"))
                    self._unshown_bytes += len(rest)
        if self._lines is not None:
            self._lines.end()

    def _write(self, chunk: bytes) -> bytes:
        """Write to the screen, and return the bytes that it did not accept."""
        with suppress(OSError):
            while chunk and self._room.poll(self._patience_ms):
                chunk = chunk[os.write(self._target, chunk) :]
                self._patience_ms = _PATIENCE_MS
        self._patience_ms = 0 if chunk else _PATIENCE_MS
        return chunk


class _Lines:
    """Lines of an output, which go to a descriptor with a prefix. Each is one write, so that lines stay whole."""

    def __init__(self, into: int, prefix: str) -> None:
        self._into, self._prefix, self._rest = into, os.fsencode(prefix), b""

    def add(self, chunk: bytes) -> None:
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        for line in lines:
            self._write(line + b"\n")

    def end(self) -> None:
        if self._rest:
            self._write(self._rest + b"\n")

    def _write(self, line: bytes) -> None:
        line = self._prefix + line
        with suppress(OSError):  # nobody reads the screen
            while line:
                line = line[os.write(self._into, line) :]


def _pipe(target: int) -> tuple[int, int]:
    if os.isatty(target):
        with suppress(OSError):  # the machine may have no free pseudo-terminal
            out, into = os.openpty()
            tty.setraw(into)  # the target terminal translates line ends itself
            _follow_size(target, out)
            return out, into
    return os.pipe()


def _follow_size(target: int, terminal: int) -> None:
    with suppress(OSError):  # one of them may be no terminal
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, fcntl.ioctl(target, termios.TIOCGWINSZ, bytes(8)))


def _never_waiting(fd: int) -> int:
    """Return a non-blocking descriptor for the file of `fd`. Other users of `fd` see no change."""
    if not os.path.isfile(f"/proc/self/fd/{fd}"):  # a regular file never blocks, and would lose its position
        with suppress(OSError):  # not possible for a socket, or for a file of another user
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return os.dup(fd)


@contextmanager
def shared() -> Iterator[None]:
    """Carry the standard output and error of this process, and of processes started in the block, to the screen."""
    streams: dict[object, ScreenPipe] = {}
    former = {1: os.dup(1), 2: os.dup(2)}
    for fd, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        found = os.fstat(fd)
        # One pipe per file keeps the order of output. Output to a stream that was closed from the start is lost.
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
    """Write all output that cannot be shown to this log from this call on."""
    _logs[:] = _logs or [EventLog(path, "screen")]
