"""Reusable memory for reads of CPU storages. Fresh pages would cost more processor time than moving the bytes.

Leases are cut first-fit from one address range, so that backward keeps reading into the same few pages. Pages of holes
that the next storage does not need go back to the kernel. The manager's lock guards it. No I/O.
"""

from __future__ import annotations

from elastrain.offload.activations.deferred import DeferredLock, Watched
from elastrain.offload.drives.host_buffers import HUGE_PAGE_BYTES, Lease, drop_pages, lease, lease_in, pages
from elastrain.offload.drives.port import round_up
from elastrain.offload.drives.request_queue import Slot, SlotAllocator


class ReadArena:
    """An address range that lends memory for storages. A lease ends when its storage is freed.

    When nothing is lent, all pages go back to the kernel.
    """

    def __init__(self, lock: DeferredLock) -> None:
        self._lock = lock
        self._memory = memoryview(b"")
        self._slots = SlotAllocator(0)
        self._lent: dict[int, Watched] = {}
        self._touched: set[int] = set()  # numbers of huge pages that may be backed
        self._largest_bytes = self._most_lent_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Upper bound of the arena's memory that is backed by pages."""
        return min(len(self._touched) * HUGE_PAGE_BYTES, len(self._memory))

    def lease(self, *, size_bytes: int, shift_bytes: int, capacity_bytes: int) -> Lease:
        """Return memory for a storage that starts `shift_bytes` after a page boundary.

        The range grows to `capacity_bytes` if nothing is lent. A storage that does not fit gets memory outside of the
        arena.
        """
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
        # The storage keeps `inside` alive until its bytes are unreachable.
        self._lent[slot.offset_bytes] = self._lock.watch(inside, self._take_back, slot)
        return found

    @property
    def idle_bytes(self) -> int:
        """Bytes backed by pages in which no storage lies now. Includes the unused rest of huge pages."""
        return max(0, self.held_bytes - self._slots.used_bytes)

    def trim(self, *, generously: bool = True) -> None:
        """Give pages of holes back to the kernel, starting with the last hole.

        Keeps pages for the largest number of bytes lent at one time, plus one storage. The lent bytes go up and down,
        and pages given back at each decrease would have to be faulted in again. With `generously=False`, which is for a
        shortage of memory, pages are kept only for the bytes lent now, plus one storage.
        """
        for hole in reversed(self._slots.holes):
            keep_bytes = self._most_lent_bytes if generously else self._slots.used_bytes
            if self.held_bytes <= keep_bytes + self._largest_bytes:
                return
            self._drop(hole)

    def _drop(self, hole: Slot) -> None:
        """Drop only the huge pages that lie completely in the hole.

        Its first and last page may be shared with lent memory.
        """
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
