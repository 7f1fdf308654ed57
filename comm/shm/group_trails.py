"""What each group of a process did last, in a small file: written as it goes, read from outside at any time.

A process that hangs in a collective cannot tell which; its agent reads here. Torch may never come in: the launcher uses
this too.
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
    """How the last call stands."""

    CALLED = 0
    UNDER_WAY = 1
    DONE = 2
    FAILED = 3


_SAID = {_How.CALLED: "called", _How.UNDER_WAY: "under way", _How.DONE: "done", _How.FAILED: "failed"}


class GroupTrail:
    """One group's own lane. By one thread at a time; a call of another that comes between only mixes two words."""

    def __init__(self, name: str, page: mmap.mmap | None = None, offset_bytes: int = 0) -> None:
        """Without a page, nobody reads along."""
        self._name, self._page, self._offset_bytes = name.encode(), page, offset_bytes
        self._count, self._what = 0, b""

    def called(self, what: str) -> None:
        """Something that others carry out: a message."""
        self._tell(_How.CALLED, what)

    def begin(self, what: str) -> None:
        """An operation, which this member takes part in from now on."""
        self._tell(_How.UNDER_WAY, what)

    def wait(self, what: str) -> None:
        """For what comes before the operation that begins next."""
        if self._page is not None:
            self._what = what.encode()
            self._write(_How.UNDER_WAY)

    def end(self, *, well: bool) -> None:
        """Of the operation that was begun last."""
        if self._page is not None:
            self._write(_How.DONE if well else _How.FAILED)

    def _tell(self, how: _How, what: str) -> None:
        if self._page is not None:
            self._count += 1
            self._what = what.encode()
            self._write(how)

    def _write(self, how: _How) -> None:
        # Read in the middle of a write it is mixed; whoever hangs writes no more.
        assert self._page is not None
        _WORDS.pack_into(self._page, self._offset_bytes, self._count, how, self._name, self._what)


class GroupTrails:
    """The file, made anew (mode 0600). Raises OSError where that cannot be."""

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
        """A lane for a new group; beyond 64 groups one that nobody reads."""
        lane, self._lanes = self._lanes, self._lanes + 1
        return GroupTrail(name, self._page, lane * _EACH_BYTES) if lane < _LANES else GroupTrail(name)

    def remove(self) -> None:
        """In good order: there is nothing more to tell. Trails go on writing into memory that nobody finds."""
        self._file.unlink(missing_ok=True)


def read(file: Path) -> list[str]:
    """The last operation of each group in words, in the order in which they were made; empty where there are none."""
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
