"""What the launcher says to its user."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

from elastrain.base.streams import say as say


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
        """Have `print` write to it, line by line."""
        before = sys.stdout
        if isinstance(before, io.TextIOWrapper):
            buffer = io.BufferedWriter(cls(before.fileno(), "w", closefd=False))
            sys.stdout = io.TextIOWrapper(buffer, before.encoding, before.errors, line_buffering=True)
