"""Matching of sent and awaited tagged messages, in order per group, source and tag. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Letter = TypeVar("Letter")
Reader = TypeVar("Reader")


@dataclass(frozen=True, kw_only=True)
class Address:
    """`source` None awaits a message from anybody."""

    group: int
    source: str | None
    tag: int

    def awaits(self, sent: Address) -> bool:
        return (self.group, self.tag) == (sent.group, sent.tag) and self.source in (None, sent.source)


@dataclass(kw_only=True)
class Mailbox(Generic[Letter, Reader]):
    """Letters without a reader and readers without a letter; never two that fit."""

    letters: list[tuple[Address, Letter]] = field(default_factory=list)
    readers: list[tuple[Address, Reader]] = field(default_factory=list)

    def put(self, sent: Address, letter: Letter) -> Reader | None:
        """The reader that the letter is for, or None: it is kept."""
        for index, (awaited, _) in enumerate(self.readers):
            if awaited.awaits(sent):
                return self.readers.pop(index)[1]
        self.letters.append((sent, letter))
        return None

    def take(self, awaited: Address, reader: Reader) -> tuple[Address, Letter] | None:
        """The letter that has come first, or None: the reader waits."""
        for index, (sent, _) in enumerate(self.letters):
            if awaited.awaits(sent):
                return self.letters.pop(index)
        self.readers.append((awaited, reader))
        return None

    def clear(self) -> list[Reader]:
        """Drop everything; returns the readers that go away empty-handed."""
        readers = [reader for _, reader in self.readers]
        self.letters.clear()
        self.readers.clear()
        return readers
