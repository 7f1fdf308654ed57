"""The event log of a run: one JSON object per line, see `base.line_log`.

Fields of every line: `t` (monotonic seconds of this host), `wall` (seconds since 1970), `source`, `event`; the rest
belongs to the event.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from elastrain.base.line_log import LineLog


class EventLog:
    """What one process writes there; `source` says which."""

    def __init__(self, path: Path, source: str) -> None:
        self._log, self._source = LineLog(path), source

    def write(self, event: str, **fields: Any) -> None:
        head = {"t": round(time.monotonic(), 6), "wall": round(time.time(), 6), "source": self._source, "event": event}
        # The head wins: a worker's own fields must not forge it.
        self._log.write({**fields, **head})

    def close(self) -> None:
        self._log.close()
