"""The moments of a step, and the parts of a member's memory that are in use at each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

COMPUTING = "while micro-batches are computed"
CHECKING = "while a neighbour's micro-batch is checked"
ADDING = "while gradients are added up and applied"
VERIFYING = "while backups are verified beside the next micro-batches"
ENDED = "at the end"

ABSENT: Mapping[str, frozenset[str]] = {
    COMPUTING: frozenset({"check", "unverified"}),
    CHECKING: frozenset({"unverified"}),
    # The step's last backward is over, and an update works in place.
    ADDING: frozenset({"check", "unverified", "activations"}),
    # A backup computes its next state beside the present one when the engine is idle. By then the loop may have all
    # micro-batches of the next step in flight.
    VERIFYING: frozenset({"check"}),
    ENDED: frozenset({"check", "unverified", "activations", "gradients", "boundaries"}),
}
"""Moment -> parts that are absent then; all other parts are present."""


@dataclass(frozen=True, kw_only=True)
class HeldAt:
    """Memory held at one moment: bytes by part, and the bytes that lie on disk under a memory limit."""

    moment: str
    parts: Mapping[str, int]
    spill: int

    @property
    def total(self) -> int:
        """Bytes in memory: all parts, without those on disk."""
        return sum(self.parts.values()) - self.spill

    @property
    def told(self) -> dict[str, int | str]:
        """The values for a JSON report."""
        return {"moment": self.moment, **self.parts, "spill": self.spill, "total": self.total}


def held_at(moment: str, taken: Mapping[str, int], on_disk: Mapping[str, int], when: str) -> HeldAt:
    """Return what is held at this moment, without absent parts.

    taken: bytes by part. on_disk: bytes of them on disk. when: words before the moment's name, or "".
    """
    parts, spilled = ({k: 0 if k in ABSENT[moment] else v for k, v in each.items()} for each in (taken, on_disk))
    return HeldAt(moment=f"{when}, {moment}" if when else moment, parts=parts, spill=sum(spilled.values()))


def most(takings: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the maximum of each part: members change plans gradually, and keep memory that they use again."""
    found: dict[str, int] = {}
    for taken in takings:
        found |= {part: max(size_bytes, found.get(part, 0)) for part, size_bytes in taken.items()}
    return found
