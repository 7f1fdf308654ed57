"""Matching of sent and awaited tagged messages, in order per group, source and tag. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Message = TypeVar("Message")
Receive = TypeVar("Receive")


@dataclass(frozen=True, kw_only=True)
class Address:
    """`source` None awaits a message from anybody."""

    group: int
    source: str | None
    tag: int

    def awaits(self, sent: Address) -> bool:
        return (self.group, self.tag) == (sent.group, sent.tag) and self.source in (None, sent.source)


@dataclass(kw_only=True)
class Mailbox(Generic[Message, Receive]):
    """Messages without a receive and receives without a message; never two that fit."""

    messages: list[tuple[Address, Message]] = field(default_factory=list)
    receives: list[tuple[Address, Receive]] = field(default_factory=list)

    def put(self, sent: Address, message: Message) -> Receive | None:
        """The receive that the message is for, or None: it is kept."""
        for index, (awaited, _) in enumerate(self.receives):
            if awaited.awaits(sent):
                return self.receives.pop(index)[1]
        self.messages.append((sent, message))
        return None

    def take(self, awaited: Address, receive: Receive) -> tuple[Address, Message] | None:
        """The message that has come first, or None: the receive waits."""
        for index, (sent, _) in enumerate(self.messages):
            if awaited.awaits(sent):
                return self.messages.pop(index)
        self.receives.append((awaited, receive))
        return None

    def clear(self) -> list[Receive]:
        """Drop everything; returns the receives that go away empty-handed."""
        receives = [receive for _, receive in self.receives]
        self.messages.clear()
        self.receives.clear()
        return receives
