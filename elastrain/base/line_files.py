"""Lines and small files: a splitter of byte streams, a log of JSON lines, private files, and bounded decompression.

The log is appended to and never rewritten. Private files have mode 0600 and are written whole or not at all. Packed
data may state or hold any size, so decompression accepts exactly the expected number of bytes.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path

import zstandard


class LineBuffer:
    """A splitter of a byte stream into lines, each shorter than `limit_bytes`.

    It keeps an unfinished line until its end comes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the lines that are complete now, without their ends.

        Raises ValueError if a line is too long.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) >= self._limit_bytes for line in (*lines, self._rest)):
            raise ValueError(f"a line longer than {self._limit_bytes} bytes")
        return lines


class LineLog:
    """A log of JSON lines, safe from any thread.

    Each line is one write, so that a killed process loses no line that it wrote. Nothing is forced to the disk. A full
    disk must not end a job: lines that cannot be written are dropped, and the next line has their number as
    `lines_lost`.
    """

    def __init__(self, path: Path) -> None:
        """Open the file for appending. Raises OSError if it cannot be opened or is a symbolic link."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._lock = threading.Lock()
        self._lines_lost = 0

    def write(self, fields: Mapping[str, object]) -> None:
        """Append one line. Values that JSON does not know are written as text. Does nothing after `close`."""
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
        """Close the file. Later lines are dropped."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def create(path: Path) -> int:
    """Create a file of mode 0600 and return its descriptor.

    Raises FileExistsError if the name is taken, also by a symbolic link, and OSError for other failures.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def replace(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: readers find the old content or all of the new one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(create(fresh), "wb") as file:
            file.write(data)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


_UNSTATED = -1


def unpacked(packed: memoryview, plain_bytes: int) -> bytes:
    """Decompress exactly `plain_bytes` bytes. Raises ZstdError, without taking memory, if the data has another size."""
    # A frame may state its size. zstandard then allocates that much, whatever `max_output_size` is.
    stated_bytes = zstandard.frame_content_size(packed)
    if stated_bytes not in (_UNSTATED, plain_bytes):
        raise zstandard.ZstdError(f"it states {stated_bytes:,} bytes, and {plain_bytes:,} are due")
    plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=plain_bytes)
    if len(plain) != plain_bytes:
        raise zstandard.ZstdError(f"it holds {len(plain):,} bytes, and {plain_bytes:,} are due")
    return plain
