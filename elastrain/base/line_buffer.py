"""Bytes of a stream, cut into lines."""

from __future__ import annotations


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
