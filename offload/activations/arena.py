"""Lends memory for reads, the same pages again and again: fresh ones cost more processor time than moving the bytes.

It hands out one range of addresses, first fit, so that what backward reads lies in the same few pages all the time.
Holes between storages of several sizes add up: the pages of those that the next storage does not need go back to the
kernel. The manager's lock guards it. No I/O here, and no decision about how much is read.
"""

from __future__ import annotations

from elastrain.offload.activations.deferred import DeferredLock, Watched
from elastrain.offload.drives.host_buffers import HUGE_PAGE_BYTES, Lease, drop_pages, lease, lease_in, pages
from elastrain.offload.drives.port import round_up
from elastrain.offload.drives.request_queue import Slot, SlotAllocator


class ReadArena:
    """Lends memory until the storage in it is gone; its pages go back to the kernel when nothing is lent."""

    def __init__(self, lock: DeferredLock) -> None:
        self._lock = lock
        self._memory = memoryview(b"")
        self._slots = SlotAllocator(0)
        self._lent: dict[int, Watched] = {}
        self._touched: set[int] = set()  # huge pages, by their number
        self._largest_bytes = self._most_lent_bytes = 0

    @property
    def held_bytes(self) -> int:
        """How much of it may be backed by pages."""
        return min(len(self._touched) * HUGE_PAGE_BYTES, len(self._memory))

    def lease(self, *, size_bytes: int, shift_bytes: int, capacity_bytes: int) -> Lease:
        """As `buffers.lease`. It takes no more than `capacity_bytes` of addresses: what does not fit lies outside."""
        if not self._lent and self._slots.quota_bytes < capacity_bytes:
            capacity_bytes = round_up(capacity_bytes)
            self._memory, self._slots = pages(capacity_bytes), SlotAllocator(capacity_bytes)
        slot = self._slots.allocate(shift_bytes + size_bytes)
        if slot is None:
            return lease(size_bytes=size_bytes, shift_bytes=shift_bytes)
        end_bytes = slot.offset_bytes + slot.size_bytes
        self._touched.update(range(slot.offset_bytes // HUGE_PAGE_BYTES, -(-end_bytes // HUGE_PAGE_BYTES)))
        self._largest_bytes = max(self._largest_bytes, slot.size_bytes)
        self._most_lent_bytes = max(self._most_lent_bytes, self._slots.used_bytes)
        image = self._memory[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
        found, inside = lease_in(image, size_bytes=size_bytes, shift_bytes=shift_bytes)
        # The storage holds `inside` until its bytes cannot be reached any more.
        self._lent[slot.offset_bytes] = self._lock.watch(inside, self._take_back, slot)
        return found

    @property
    def idle_bytes(self) -> int:
        """Memory that nothing lies in now, the rest of huge pages included."""
        return max(0, self.held_bytes - self._slots.used_bytes)

    def trim(self, *, generously: bool = True) -> None:
        """Keep pages for the most that was lent at a time and for one storage more: others go, if in holes.

        What is lent grows and shrinks all the time: to give pages back whenever it shrinks would be to fill them again.
        Where memory is needed for other things (not `generously`), pages are kept for what is lent now.
        """
        for hole in reversed(self._slots.holes):
            keep_bytes = self._most_lent_bytes if generously else self._slots.used_bytes
            if self.held_bytes <= keep_bytes + self._largest_bytes:
                return
            self._drop(hole)

    def _drop(self, hole: Slot) -> None:
        """Only what lies in the hole as a whole: the pages at its ends are shared with what is lent."""
        end_bytes = hole.offset_bytes + hole.size_bytes
        pages_inside = range(-(-hole.offset_bytes // HUGE_PAGE_BYTES), end_bytes // HUGE_PAGE_BYTES)
        if self._touched.isdisjoint(pages_inside):
            return
        drop_pages(self._memory, pages_inside.start * HUGE_PAGE_BYTES, len(pages_inside) * HUGE_PAGE_BYTES)
        self._touched.difference_update(pages_inside)

    def _take_back(self, gone: Watched) -> None:
        slot: Slot = gone.about
        del self._lent[slot.offset_bytes]
        self._slots.free(slot)
        if not self._lent:
            drop_pages(self._memory, 0, len(self._memory))
            self._slots = SlotAllocator(self._slots.quota_bytes)
            self._touched.clear()
            self._largest_bytes = self._most_lent_bytes = 0
