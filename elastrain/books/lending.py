"""Lends buffers and takes them back. What a buffer is made of is not known here: tensors, or symbols in simulation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Buffer = TypeVar("Buffer")


class Buffers(Generic[Buffer]):
    """Keeps buffers for the next use: every step needs the same few kinds.

    `make(like)` gives a new buffer; those with the same `kind(buffer)` may replace one another.
    """

    def __init__(self, make: Callable[[Buffer], Buffer], kind: Callable[[Buffer], Hashable]) -> None:
        self._make = make
        self._kind = kind
        self._free: dict[Hashable, list[Buffer]] = {}
        # By identity: buffers that are equal in value are still two. Holding them here keeps an id from being reused.
        self._lent: dict[int, Buffer] = {}

    def take(self, like: Buffer) -> Buffer:
        """Lend a buffer of the same kind, with any content."""
        # The last that came back first: its pages are in the caches, if any are.
        free = self._free.get(self._kind(like))
        buffer = free.pop() if free else self._make(like)
        self._lent[id(buffer)] = buffer
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back; one that was not taken here is left alone."""
        # Callers hand over whatever they have finished with, borrowed or not: only this room knows which it was.
        if self._lent.pop(id(buffer), None) is not None:
            self._free.setdefault(self._kind(buffer), []).append(buffer)

    def take_free(self) -> list[Buffer]:
        """Let go of those that are not lent: they are the caller's."""
        free, self._free = [each for those in self._free.values() for each in those], {}
        return free

    def owns(self, buffer: Buffer) -> bool:
        """Tell whether the buffer is lent now."""
        return id(buffer) in self._lent
