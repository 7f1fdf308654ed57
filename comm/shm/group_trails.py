"""A small file with the last operation of each group of a process, updated at each call and readable at any time.

A process that hangs in a collective cannot report which one. Its agent reads this file instead. This module never
imports torch, because the launcher uses it.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path

_LANES, _EACH_BYTES = 64, 256
_WORDS = struct.Struct("<qB64s160s")


class _How(IntEnum):
    """State of the last call."""

    CALLED = 0
    UNDER_WAY = 1
    DONE = 2
    FAILED = 3


_SAID = {_How.CALLED: "called", _How.UNDER_WAY: "under way", _How.DONE: "done", _How.FAILED: "failed"}


class GroupTrail:
    """One group's record in the file. One thread at a time writes it.

    A call of another thread in between can only mix the text of two calls.
    """

    def __init__(self, name: str, page: mmap.mmap | None = None, offset_bytes: int = 0) -> None:
        """Without `page`, calls are not recorded."""
        self._name, self._page, self._offset_bytes = name.encode(), page, offset_bytes
        self._count, self._what = 0, b""

    def called(self, what: str) -> None:
        """Record a call that other threads carry out: a tagged message."""
        self._tell(_How.CALLED, what)

    def begin(self, what: str) -> None:
        """Record that this member has begun an operation."""
        self._tell(_How.UNDER_WAY, what)

    def wait(self, what: str) -> None:
        """Record that this member waits for something that precedes the next operation."""
        if self._page is not None:
            self._what = what.encode()
            self._write(_How.UNDER_WAY)

    def end(self, *, well: bool) -> None:
        """Record that the operation begun last has ended; `well` says if it succeeded."""
        if self._page is not None:
            self._write(_How.DONE if well else _How.FAILED)

    def _tell(self, how: _How, what: str) -> None:
        if self._page is not None:
            self._count += 1
            self._what = what.encode()
            self._write(how)

    def _write(self, how: _How) -> None:
        # A reader may see half of a write. A process that hangs writes nothing, so its record is whole.
        assert self._page is not None
        _WORDS.pack_into(self._page, self._offset_bytes, self._count, how, self._name, self._what)


class GroupTrails:
    """The file with the records of all groups of this process, created anew with mode 0600.

    Raises OSError if the file cannot be created.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._lanes = file, 0
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # On a full disk the first write into the mapping would end the process (SIGBUS).
            os.posix_fallocate(fd, 0, _LANES * _EACH_BYTES)
            self._page = mmap.mmap(fd, _LANES * _EACH_BYTES)
        finally:
            os.close(fd)

    def of(self, name: str) -> GroupTrail:
        """Return the record of a new group. Calls of groups beyond the 64th are not recorded."""
        lane, self._lanes = self._lanes, self._lanes + 1
        return GroupTrail(name, self._page, lane * _EACH_BYTES) if lane < _LANES else GroupTrail(name)

    def remove(self) -> None:
        """Delete the file when the process ends in good order. Existing records stay writable and are lost."""
        self._file.unlink(missing_ok=True)


def read(file: Path) -> list[str]:
    """Return one sentence on the last operation of each group, in order of creation; empty if there is no file."""
    try:
        with file.open("rb") as opened:
            told = opened.read(_LANES * _EACH_BYTES)
    except OSError:
        return []
    offsets = range(0, len(told) - _EACH_BYTES + 1, _EACH_BYTES)
    return [
        _in_words(*words) for words in (_WORDS.unpack_from(told, offset) for offset in offsets) if words[2].strip(b"\0")
    ]


def _in_words(count: int, how: int, name: bytes, what: bytes) -> str:
    said = _SAID[_How(how)] if how in _How._value2member_map_ else "?"
    call, group = (text.rstrip(b"\0").decode(errors="replace") for text in (what, name))
    return f"the last call ({count}) of its group {group!r} was {call}: {said}"
