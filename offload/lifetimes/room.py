"""The one limit, and all that counts against it. Values only; custody's lock guards it."""

from __future__ import annotations

from typing import Protocol


class OtherMemory(Protocol):
    """What counts besides pieces and comes and goes by itself: saved tensors."""

    def live_bytes(self) -> int:
        """In memory now."""

    def idle_bytes(self) -> int:
        """Besides, what is kept for the next of them, and is no reason to refuse anything."""

    def moving_bytes(self) -> int:
        """Of these, what is on its way out."""

    def give_up(self) -> bool:
        """Let everything leave that can. Returns True if a drive is moving something then."""


class RoomAccount:
    """The one limit, and all that counts against it.

    Pieces; `others`; `reserved_bytes` for what computes now; `coming_bytes` of what it makes and was not made yet;
    `outside_bytes` that are held and that nobody here knows.
    """

    def __init__(self, limit_bytes: int, others: OtherMemory) -> None:
        self.limit_bytes = limit_bytes
        self.others = others
        self.piece_bytes = self.most_bytes = 0
        self.reserved_bytes = self.coming_bytes = self.outside_bytes = 0

    def add(self, more_bytes: int) -> None:
        """Count pieces' memory."""
        self.piece_bytes += more_bytes
        self.most_bytes = max(self.most_bytes, self.held())  # memory: estimates are none

    def came(self, size_bytes: int) -> None:
        """So much of what was to come is there."""
        self.coming_bytes = max(0, self.coming_bytes - size_bytes)

    def total(self) -> int:
        """All that counts."""
        return self.held() + self.others.idle_bytes() + self.reserved_bytes + self.coming_bytes + self.outside_bytes

    def held(self) -> int:
        """What is in memory for sure: no estimate."""
        return self.piece_bytes + self.others.live_bytes()

    def missing_bytes(self, size_bytes: int) -> int:
        """How much has to go before so much more fits."""
        return max(0, self.total() + size_bytes - self.limit_bytes)
