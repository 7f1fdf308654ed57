"""What one member did and when, as JSON lines in the run's folder: `members/<member>.jsonl`.

Times are time.monotonic() in seconds, which all processes of one host share. Each line is one write, so that nothing
is lost when the process is killed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path


class Journal:
    """Appends lines; without a run folder it keeps quiet."""

    def __init__(self, run_dir: Path | None, member: str) -> None:
        self._lock = threading.Lock()
        self._member = member
        self._fd = -1
        if run_dir is not None:
            folder = run_dir / "members"
            folder.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(folder / f"{member}.jsonl", flags, 0o600)

    def write(self, event: str, *, at_s: float | None = None, **fields: object) -> None:
        """`fields` are plain values; `at_s` defaults to now."""
        if self._fd < 0:
            return
        at = time.monotonic() if at_s is None else at_s
        line = json.dumps({"t": at, "member": self._member, "event": event, **fields}, separators=(",", ":"))
        with self._lock:
            os.write(self._fd, line.encode() + b"\n")

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
