"""What one member did and when, as JSON lines in the run's folder: `members/<member>.jsonl`.

Times are time.monotonic() in seconds, which all processes of one host share.
"""

from __future__ import annotations

import time
from pathlib import Path

from elastrain.base.line_log import LineLog


class Journal:
    """Appends lines; without a run folder it keeps quiet."""

    def __init__(self, run_dir: Path | None, member: str) -> None:
        self._member = member
        self._log: LineLog | None = None
        if run_dir is not None:
            folder = run_dir / "members"
            folder.mkdir(mode=0o700, exist_ok=True)
            self._log = LineLog(folder / f"{member}.jsonl")

    def write(self, event: str, *, at_s: float | None = None, **fields: object) -> None:
        """`fields` are plain values; `at_s` defaults to now."""
        if self._log is not None:
            at = time.monotonic() if at_s is None else at_s
            self._log.write({"t": at, "member": self._member, "event": event, **fields})

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
