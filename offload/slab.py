"""Which part of a slab belongs to whom: a first-fit allocator over `[0, capacity)`. Pure arithmetic, no I/O.

A training step asks for the same sizes in the same order every time, so first fit finds the same slots again and the
slab stops growing after the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        self._holes: list[Slot] = []  # sorted by offset, never touching each other

    @property
    def holes(self) -> tuple[Slot, ...]:
        """What is free below `end_bytes`, sorted by offset, never touching each other."""
        return tuple(self._holes)

    def allocate(self, size_bytes: int) -> Slot | None:
        """A slot of at least `size_bytes`, or None where the quota does not allow it."""
        size_bytes = round_up(size_bytes)
        for index, hole in enumerate(self._holes):
            if hole.size_bytes >= size_bytes:
                self._shrink(index, size_bytes)
                self.used_bytes += size_bytes
                return Slot(offset_bytes=hole.offset_bytes, size_bytes=size_bytes)
        return self._extend(size_bytes)

    def free(self, slot: Slot) -> None:
        """Take a slot back. Raises `ValueError` if it was not handed out."""
        self.used_bytes -= slot.size_bytes
        index = sum(1 for hole in self._holes if hole.offset_bytes < slot.offset_bytes)
        before = self._holes[index - 1] if index else None
        after = self._holes[index] if index < len(self._holes) else None
        start, end = slot.offset_bytes, slot.offset_bytes + slot.size_bytes
        if (before and before.offset_bytes + before.size_bytes > start) or (after and after.offset_bytes < end):
            raise ValueError(f"{slot} is free already")
        if before and before.offset_bytes + before.size_bytes == start:
            index, start = index - 1, before.offset_bytes
            self._holes.pop(index)
        if after and after.offset_bytes == end:
            end += after.size_bytes
            self._holes.pop(index)
        self._holes.insert(index, Slot(offset_bytes=start, size_bytes=end - start))

    def _shrink(self, index: int, size_bytes: int) -> None:
        hole = self._holes.pop(index)
        if hole.size_bytes > size_bytes:
            rest = Slot(offset_bytes=hole.offset_bytes + size_bytes, size_bytes=hole.size_bytes - size_bytes)
            self._holes.insert(index, rest)

    def _extend(self, size_bytes: int) -> Slot | None:
        last = self._holes[-1] if self._holes else None
        grows_hole = last is not None and last.offset_bytes + last.size_bytes == self.end_bytes
        offset_bytes = last.offset_bytes if last is not None and grows_hole else self.end_bytes
        if offset_bytes + size_bytes > self.quota_bytes:
            return None
        if grows_hole:
            self._holes.pop()
        self.end_bytes = offset_bytes + size_bytes
        self.used_bytes += size_bytes
        return Slot(offset_bytes=offset_bytes, size_bytes=size_bytes)
