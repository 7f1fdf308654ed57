"""Buffers that come back. What they are made of is not known here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Buffer = TypeVar("Buffer")


class Buffers(Generic[Buffer]):
    """Buffers that are used again: the same few kinds are needed in every step.

    `make(like)` gives a new one; those of one `kind(buffer)` may stand for one another.
    """

    def __init__(self, make: Callable[[Buffer], Buffer], kind: Callable[[Buffer], Hashable]) -> None:
        self._make = make
        self._kind = kind
        self._free: dict[Hashable, list[Buffer]] = {}
        self._lent: dict[int, Buffer] = {}

    def take(self, like: Buffer) -> Buffer:
        free = self._free.get(self._kind(like))
        buffer = free.pop() if free else self._make(like)
        self._lent[id(buffer)] = buffer
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """One that was not taken here is left alone."""
        if self._lent.pop(id(buffer), None) is not None:
            self._free.setdefault(self._kind(buffer), []).append(buffer)

    def owns(self, buffer: Buffer) -> bool:
        return id(buffer) in self._lent

    def free(self) -> Iterator[Buffer]:
        """Those whose content nobody needs."""
        for buffers in self._free.values():
            yield from buffers
