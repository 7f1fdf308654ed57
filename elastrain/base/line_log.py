"""A log of JSON lines: appended as things happen, never rewritten."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path


class LineLog:
    """Each line is one write, so that nothing written is lost when the process is killed. For any thread.

    A full disk must not end a job: lines that cannot be written are dropped, and the next one tells their number as
    `lines_lost`. Nothing is forced to the disk.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be opened, or is a symbolic link."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._lock = threading.Lock()
        self._lines_lost = 0

    def write(self, fields: Mapping[str, object]) -> None:
        """Append one line; what JSON does not know is written as text. Nothing happens after `close`."""
        with self._lock:
            if self._fd < 0:
                return
            lost = {"lines_lost": self._lines_lost} if self._lines_lost else {}
            line = json.dumps({**fields, **lost}, separators=(",", ":"), default=str).encode() + b"\n"
            try:
                os.write(self._fd, line)
                self._lines_lost = 0
            except OSError:
                self._lines_lost += 1

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
