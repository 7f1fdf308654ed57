"""How far long work has come, on standard error: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from elastrain.launcher.say import say

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY_S = 5.0


class ProgressBar:
    """Bytes that are done, of all. Safe for several threads."""

    def __init__(self, what: str, size_bytes: int = 0) -> None:
        """Where the size is known, elsewhere than on a terminal one line says it at once."""
        self._what, self._done_bytes, self._size_bytes = what, 0, size_bytes
        self._lock = threading.Lock()
        self._said_s = time.monotonic()
        self._bar = _bar(what) if sys.stderr.isatty() else None
        if self._bar is None and size_bytes:
            say(f"{what}: {size_bytes:,} bytes")

    def advance(self, size_bytes: int) -> None:
        """So many more are done."""
        with self._lock:
            self.show(self._done_bytes + size_bytes, self._size_bytes)

    def show(self, done_bytes: int, size_bytes: int) -> None:
        """For one thread at a time."""
        self._done_bytes, self._size_bytes = min(done_bytes, size_bytes), size_bytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done_bytes, total=size_bytes)
        elif time.monotonic() >= self._said_s + EVERY_S:
            self._said_s = time.monotonic()
            say(f"{self._what}: {self._done_bytes:,} of {size_bytes:,} bytes")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(what: str) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    size = DownloadColumn(table_column=Column(no_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), size)
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task(what, total=None)  # it pulses until the first bytes are done
    bar.start()
    return bar
