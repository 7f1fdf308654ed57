"""Processes on Linux: ties between parent and child (prctl), what the kernel says of a process, standard streams.

A standard stream may be closed or full, or have no reader.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
# The same as `die_with_parent`. It is not imported, so that the child does not depend on where this package lies.
_TIED_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"{sys.argv[2]} cannot be executed: {error.strerror}")
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return a command line whose program the kernel kills when the starting thread ends, even if it is stopped."""
    return [sys.executable, "-I", "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *command]


def die_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, however it ends.

    `parent` is the pid of the process that started this one. If it ended before the kernel was asked, this process
    exits at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(0)


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state (R, S, D, T for stopped, …), or "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def started() -> int:
    """Return when this process was started, in the kernel's clock ticks since the boot."""
    return int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])


def is_stopped(pid: int) -> bool:
    """Return True if the process was stopped by SIGSTOP."""
    return state_of(pid) == "T"


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """Time that the kernel's scheduler has counted for a thread, in seconds."""

    ran_s: float = 0.0
    waited_s: float = 0.0
    """Time in which the thread was ready to run, but no processor was free."""


def scheduled(pid: int, thread: int | None = None) -> Scheduled:
    """Return the scheduler's times of a thread, by default the process's first one.

    Zeros if the kernel does not tell them.
    """
    try:
        fields = Path(f"/proc/{pid}/task/{pid if thread is None else thread}/schedstat").read_bytes().split()
        return Scheduled(ran_s=int(fields[0]) / 1e9, waited_s=int(fields[1]) / 1e9)
    except (OSError, IndexError, ValueError):
        return Scheduled()


_PATIENCE_MS = 1000


def open_missing() -> None:
    """Open the null device as each standard stream that is closed, so that no socket or log gets its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def say(sentence: str) -> None:
    """Write a line to standard error, in one write. The line is lost if the stream stays full for a second."""
    text, stream = f"elastrain: {sentence}\n", sys.stderr
    with suppress(OSError, ValueError):
        if stream is not sys.__stderr__:  # a script's or a notebook's own
            stream.write(text)
            stream.flush()
            return
        waiting = select.poll()
        waiting.register(2, select.POLLOUT)
        if waiting.poll(_PATIENCE_MS):
            os.write(2, os.fsencode(text))  # in Python's buffer it would make the exit code 120
