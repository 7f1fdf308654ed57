"""The standard streams of a process, which may be closed, full, or read by nobody."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress

_PATIENCE_MS = 1000


def open_missing() -> None:
    """Open the null device as each standard stream that is closed, so that no socket or log gets its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def say(sentence: str) -> None:
    """Write a line to standard error, in one write. It is lost if nobody takes it within a second."""
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
