"""The event log of a run: one JSON object per line, appended as things happen, never rewritten.

Fields of every line: `t` (monotonic seconds of this host), `wall` (seconds since 1970), `source`, `event`; the rest
belongs to the event.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Lines go to the file at once, each in one write; they are not forced to the disk.

    A full disk must not end a job: lines that can not be written are dropped, and the next one tells their number as
    `lines_lost`.
    """

    def __init__(self, path: Path, source: str) -> None:
        self._source = source
        self._lines_lost = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        head = {"t": round(time.monotonic(), 6), "wall": round(time.time(), 6), "source": self._source, "event": event}
        lost = {"lines_lost": self._lines_lost} if self._lines_lost else {}
        # The head wins: a worker's own fields must not forge it.
        line = json.dumps({**fields, **lost, **head}, default=str).encode() + b"\n"
        try:
            os.write(self._fd, line)
            self._lines_lost = 0
        except OSError:
            self._lines_lost += 1

    def close(self) -> None:
        os.close(self._fd)
