"""Which part of a slab belongs to whom: page-aligned slots below a quota. Pure arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.base.free_ranges import FreeRanges
from elastrain.offload.engines.port import round_up


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A page-aligned range of a slab."""

    offset_bytes: int
    size_bytes: int


class SlotAllocator:
    """Hands out slots below `quota_bytes`. `end_bytes` is how far the slab is in use, ever."""

    def __init__(self, quota_bytes: int) -> None:
        self.quota_bytes = quota_bytes
        self.end_bytes = 0
        self.used_bytes = 0
        self._free = FreeRanges(quota_bytes)

    @property
    def holes(self) -> tuple[Slot, ...]:
        """What is free below `end_bytes`, sorted by offset, never touching each other."""
        below = [(start, min(stop, self.end_bytes)) for start, stop in self._free if start < self.end_bytes]
        return tuple(Slot(offset_bytes=start, size_bytes=stop - start) for start, stop in below)

    def allocate(self, size_bytes: int) -> Slot | None:
        """A slot of at least `size_bytes`, or None where the quota does not allow it."""
        size_bytes = round_up(size_bytes)
        offset_bytes = self._free.take(size_bytes)
        if offset_bytes is None:
            return None
        self.used_bytes += size_bytes
        self.end_bytes = max(self.end_bytes, offset_bytes + size_bytes)
        return Slot(offset_bytes=offset_bytes, size_bytes=size_bytes)

    def free(self, slot: Slot) -> None:
        """Take a slot back. Raises `ValueError` if it was not handed out."""
        self._free.give(slot.offset_bytes, slot.offset_bytes + slot.size_bytes)
        self.used_bytes -= slot.size_bytes
