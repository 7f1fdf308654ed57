"""Bytes of a stream, cut into lines.

A log of JSON lines: appended as things happen, never rewritten.

Files that only their user may read, written whole or not at all.

Unpacks zstd into as many bytes as are due: what is packed may state or hold any number.
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
    """Keeps the beginning of a line until its end comes. `limit_bytes`: lines are shorter than this."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole now, without their ends. Raises ValueError if one is too long."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) >= self._limit_bytes for line in (*lines, self._rest)):
            raise ValueError(f"a line longer than {self._limit_bytes} bytes")
        return lines


class LineLog:
    """Each line is one write, so that nothing written is lost when the process is killed. For any thread.

    A full disk must not end a job: lines that cannot be written are dropped, and the next one tells their number as
    `lines_lost`. Nothing is forced to the disk.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file cannot be opened, or is a symbolic link."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._lock = threading.Lock()
        self._lines_lost = 0

    def write(self, fields: Mapping[str, object]) -> None:
        """Append one line; what JSON does not know is written as text. Nothing happens after `close`."""
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
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def create(path: Path) -> int:
    """A descriptor of a new file of mode 0600. Raises OSError, FileExistsError for a name that is taken (by a link)."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def replace(path: Path, data: bytes) -> None:
    """Whoever reads `path` finds what was there before, or all of `data`. Raises OSError."""
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
    """Exactly so many bytes. Raises ZstdError for what is of another size, and takes no memory for that."""
    # A frame may state its size, and then zstandard takes that much memory, whatever `max_output_size` is.
    stated_bytes = zstandard.frame_content_size(packed)
    if stated_bytes not in (_UNSTATED, plain_bytes):
        raise zstandard.ZstdError(f"it states {stated_bytes:,} bytes, and {plain_bytes:,} are due")
    plain = zstandard.ZstdDecompressor().decompress(packed, max_output_size=plain_bytes)
    if len(plain) != plain_bytes:
        raise zstandard.ZstdError(f"it holds {len(plain):,} bytes, and {plain_bytes:,} are due")
    return plain
