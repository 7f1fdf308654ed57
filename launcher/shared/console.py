"""Output of the launcher to its user: standard output, progress bars, tables, and the options that name a run.

Progress goes to standard error: a bar on a terminal, else a line every few seconds. Tables go to standard output: drawn
on a terminal, else aligned words.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from elastrain.base.processes import say as say

if TYPE_CHECKING:
    from rich.progress import Progress
from collections.abc import Sequence
from typing import Annotated

import typer

from elastrain.errors import ConfigError


class Output(io.FileIO):
    """Standard output that ends the command if writing fails: with a sentence, or silently if the reader closed it."""

    def write(self, data: Any) -> int:
        """Write the data. Raises SystemExit(1) if that fails."""
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # takes what is left in buffers
            if error.errno != errno.EPIPE:
                say(f"standard output cannot be written: {error.strerror}")
            raise SystemExit(1) from None

    @classmethod
    def install(cls) -> None:
        """Replace `sys.stdout` by a line-buffered stream on top of this class."""
        before = sys.stdout
        if isinstance(before, io.TextIOWrapper):
            buffer = io.BufferedWriter(cls(before.fileno(), "w", closefd=False))
            sys.stdout = io.TextIOWrapper(buffer, before.encoding, before.errors, line_buffering=True)


EVERY_S = 5.0
"""Seconds between two lines of progress if standard error is no terminal."""


class ProgressBar:
    """A progress display in bytes. `advance` may be called from several threads."""

    def __init__(self, what: str, size_bytes: int = 0) -> None:
        """Start the bar. If standard error is no terminal, print one line at once if the size is known."""
        self._what, self._done_bytes, self._size_bytes = what, 0, size_bytes
        self._lock = threading.Lock()
        self._said_s = time.monotonic()
        self._bar = _bar(what) if sys.stderr.isatty() else None
        if self._bar is None and size_bytes:
            say(f"{what}: {size_bytes:,} bytes")

    def advance(self, size_bytes: int) -> None:
        """Count `size_bytes` more bytes as done."""
        with self._lock:
            self.show(self._done_bytes + size_bytes, self._size_bytes)

    def show(self, done_bytes: int, size_bytes: int) -> None:
        """Set the bytes done and the total. Not safe for several threads."""
        self._done_bytes, self._size_bytes = min(done_bytes, size_bytes), size_bytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done_bytes, total=size_bytes)
        elif time.monotonic() >= self._said_s + EVERY_S:
            self._said_s = time.monotonic()
            say(f"{self._what}: {self._done_bytes:,} of {size_bytes:,} bytes")

    def close(self) -> None:
        """Remove the bar from the screen."""
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


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; every row has one cell per column."""
    if not sys.stdout.isatty():
        widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
        for row in (columns, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


RunArgument = Annotated[str | None, typer.Argument(help="The run's folder or job id; default: the newest.")]
RunOption = Annotated[str | None, typer.Option("--run", help="The run's folder or job id; default: the newest.")]


def one_of(argument: str | None, option: str | None) -> str | None:
    """Return the run named by the argument or by the option, or None. Raises ConfigError if the two differ."""
    if argument is not None and option is not None and argument != option:
        raise ConfigError(f"two runs are named, {argument!r} and --run {option!r}: name one")
    return option if argument is None else argument
