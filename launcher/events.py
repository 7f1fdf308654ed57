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
    """Lines go to the file at once, each in one write; they are not forced to the disk."""

    def __init__(self, path: Path, source: str) -> None:
        self._source = source
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, event: str, **fields: Any) -> None:
        head = {"t": round(time.monotonic(), 6), "wall": round(time.time(), 6), "source": self._source, "event": event}
        # The head wins: a worker's own fields must not forge it.
        os.write(self._fd, json.dumps({**fields, **head}, default=str).encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)
