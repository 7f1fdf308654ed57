"""The end of a member's journal, read while the member writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BACK_BYTES = 64 << 10
"""Bytes before the end that are shown at first."""


class JournalTail:
    """A reader of the newest whole lines of a journal. `problem` says once why nothing can be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset: int | None = None
        self._half = b""
        self.problem = ""

    def take(self) -> list[dict[str, Any]]:
        """Return the lines that are whole now and were not returned before. Unreadable lines are left out."""
        try:
            with self._path.open("rb") as file:
                size_bytes = file.seek(0, 2)
                begin = max(0, size_bytes - _BACK_BYTES) if self._offset is None else self._offset
                file.seek(begin)
                data = file.read()
        except OSError as error:
            if self._offset is None:
                self.problem, self._offset = f"no journal can be read on this machine: {error.strerror}", 0
            return []
        is_cut = self._offset is None and begin > 0
        self._offset = begin + len(data)
        *whole, self._half = (self._half + data).split(b"\n")
        return [line for line in map(_parsed, whole[is_cut:]) if line is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def line_words(line: Mapping[str, Any]) -> str:
    """Return a journal line as text: seconds, event, and its other fields."""
    at = line.get("t")
    seconds = f"{at:12.3f}" if isinstance(at, int | float) else f"{'-':>12}"
    rest = " ".join(f"{name}={json.dumps(value)}" for name, value in line.items() if name not in _HEAD)
    return f"{seconds}  {line.get('event', '-')!s:<14} {rest}".rstrip()


_HEAD = frozenset({"t", "member", "event"})
