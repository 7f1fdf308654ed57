"""What the launcher says to its user."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any


def say(text: str) -> None:
    """One line on standard error, in one write: what workers print at the same time does not come between."""
    sys.stderr.write(f"elastrain: {text}\n")
    sys.stderr.flush()


class Output(io.FileIO):
    """Standard output. Where it cannot be written, the command ends with a sentence; in silence, if its reader left."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for what buffers still have
            if error.errno != errno.EPIPE:
                say(f"standard output cannot be written: {error.strerror}")
            raise SystemExit(1) from None

    @classmethod
    def install(cls) -> None:
        """From now on `print` writes to it, line by line; where standard output is closed, to nobody."""
        before = sys.stdout
        if isinstance(before, io.TextIOWrapper):
            buffer = io.BufferedWriter(cls(before.fileno(), "w", closefd=False))
            sys.stdout = io.TextIOWrapper(buffer, before.encoding, before.errors, line_buffering=True)
        elif before is None:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
