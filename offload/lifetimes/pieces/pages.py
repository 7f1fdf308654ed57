"""Memory of pieces on the CPU: fixed addresses, under which pages come and go. Linux.

Fresh pages cost up to seconds per GiB, moving them costs microseconds. So pages of a piece that leaves are parked in
the pool's own range of addresses, and `mremap` moves them to an arriving piece. While a piece is out or incomplete, its
pages lie at a second, hidden range and its addresses are protected; otherwise they would silently read as zeros. A
piece with a copy on a drive is read-only, so that no change is lost. A forked child gets no pages, since it would keep
them. In the child, the addresses stay protected and reserved.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from elastrain.offload.drives.device import Copy, Device
from elastrain.offload.drives.host_buffers import HUGE_PAGE_BYTES, address_of, drop_pages, keep_from_children, pages
from elastrain.offload.drives.port import PAGE_BYTES, round_up
from elastrain.offload.drives.request_queue import Mark
from elastrain.offload.lifetimes.pieces.piece_memory import Access, PieceMemory, Span

_MREMAP = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10 | 0x4000  # MAP_FIXED | MAP_NORESERVE
_PROTECTION = {Access.NONE: 0, Access.READ: 1, Access.WRITE: 3}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class PagedRange:
    """The addresses of one piece. `tensor` always lies there.

    The range starts with pages and is writable. `PagePool` takes pages away and brings them back at the hidden range.
    """

    def __init__(self, size_bytes: int) -> None:
        self._shown, self._behind = pages(round_up(size_bytes)), pages(round_up(size_bytes))
        self.address, self._address_behind = address_of(self._shown), address_of(self._behind)
        self.size_bytes = self._shown.nbytes
        self.access = Access.WRITE
        self.mark: Mark | None = None  # always None: work on the CPU has ended when its call returns
        for each in (self._shown, self._behind):
            keep_from_children(each)
        self.tensor = torch.frombuffer(self._shown, dtype=torch.uint8)
        _touch_before_it_is_moved(self.tensor.untyped_storage())
        _RANGES.add(self)

    def part(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """See `PieceMemory.part`."""
        if not size_bytes:
            return self.tensor[:0]
        part = torch.frombuffer(self._shown, dtype=torch.uint8, offset=offset_bytes, count=size_bytes)
        _touch_before_it_is_moved(part.untyped_storage())
        return part

    def write(self, device: Device, span: Span, cancelled: Callable[[], bool]) -> Copy:
        """See `PieceMemory.write`. The bytes are those at the time of this call."""
        return device.write(self._part(span), 0, cancelled)

    def read(self, device: Device, span: Span, copy: Copy, cancelled: Callable[[], bool]) -> None:
        """See `PieceMemory.read`."""
        device.read(copy, self._part(span), cancelled)

    def allow(self, access: Access) -> None:
        """See `PieceMemory.allow`. At no moment can another thread access more than that, or read zeros."""
        if access is self.access:
            return
        if self.access is Access.NONE:
            _protect(self._address_behind, self.size_bytes, access)
            _move(self._address_behind, self.address, self.size_bytes)
            _protect(self._address_behind, self.size_bytes, Access.WRITE)
        else:
            _protect(self.address, self.size_bytes, access)
            if access is Access.NONE:
                _move(self.address, self._address_behind, self.size_bytes)
                _protect(self._address_behind, self.size_bytes, Access.WRITE)
        self.access = access

    def behind(self) -> tuple[int, memoryview]:
        """Return the address and the memory of the hidden range. Access must be NONE."""
        assert self.access is Access.NONE
        return self._address_behind, self._behind

    def reserve(self) -> None:
        """Reserve both ranges in a forked child, so that nothing else is mapped there."""
        for each in (self.address, self._address_behind):
            _reserve(each, self.size_bytes)

    def _part(self, span: Span) -> memoryview:
        at = self._behind if self.access is Access.NONE else self._shown
        return at[span.begin_bytes : span.begin_bytes + span.size_bytes]


class ParkedPages:
    """Free pages that are parked in a range of addresses of their own, in multiples of `unit_bytes`."""

    def __init__(self, capacity_bytes: int, unit_bytes: int) -> None:
        self.parked_bytes = 0
        self._memory = pages(-(-capacity_bytes // unit_bytes) * unit_bytes)
        self._address = address_of(self._memory)
        self._free = [(0, self._memory.nbytes)]  # addresses without pages, as (offset, size); the last is used first
        self._parked: list[tuple[int, int]] = []
        keep_from_children(self._memory)
        _PARKED.add(self)

    def reserve(self) -> None:
        """Reserve the range in a forked child, as `PagedRange.reserve` does."""
        _reserve(self._address, self._memory.nbytes)

    def park(self, address: int, size_bytes: int) -> int:
        """Park pages from an address, and return the number of bytes parked.

        It is less than all if the range is full.
        """
        taken_bytes = 0
        while taken_bytes < size_bytes and self._free:
            offset_bytes, part_bytes = _cut(self._free, size_bytes - taken_bytes)
            _move(address + taken_bytes, self._address + offset_bytes, part_bytes)
            self._parked.append((offset_bytes, part_bytes))
            taken_bytes += part_bytes
        self.parked_bytes += taken_bytes
        return taken_bytes

    def give(self, address: int, size_bytes: int) -> None:
        """Move parked pages to an address, as far as there are any."""
        given_bytes = 0
        while given_bytes < size_bytes and self._parked:
            offset_bytes, part_bytes = _cut(self._parked, size_bytes - given_bytes)
            _move(self._address + offset_bytes, address + given_bytes, part_bytes)
            self._free.append((offset_bytes, part_bytes))
            given_bytes += part_bytes
        self.parked_bytes -= given_bytes
        self._join()

    def trim(self, keep_bytes: int) -> None:
        """Give pages back to the kernel until at most `keep_bytes` are parked."""
        while self.parked_bytes > max(0, keep_bytes):
            offset_bytes, size_bytes = self._parked.pop()
            drop_pages(self._memory, offset_bytes, size_bytes)
            self._free.append((offset_bytes, size_bytes))
            self.parked_bytes -= size_bytes
        self._join()

    def _join(self) -> None:
        """Merge all free ranges once every page is gone, since each cut costs one more system call."""
        if not self._parked:
            self._free = [(0, self._memory.nbytes)]


def _cut(ranges: list[tuple[int, int]], most_bytes: int) -> tuple[int, int]:
    """Remove the last range, or at most `most_bytes` of it, and return its offset and size."""
    offset_bytes, had_bytes = ranges.pop()
    part_bytes = min(had_bytes, most_bytes)
    if part_bytes < had_bytes:
        ranges.append((offset_bytes + part_bytes, had_bytes - part_bytes))
    return offset_bytes, part_bytes


class PagePool:
    """A pool that parks the pages of leaving pieces for arriving ones. Not for several threads at once.

    Huge pages stay huge, and lie apart from the small pages at the ends of pieces. The kernel splits a huge page for
    good if it moves to an unaligned address. That makes 512 small pages, with 512 times the cost for the kernel and the
    TLB.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._huge = ParkedPages(capacity_bytes, HUGE_PAGE_BYTES)
        self._small = ParkedPages(capacity_bytes, PAGE_BYTES)

    @property
    def parked_bytes(self) -> int:
        """Bytes of parked pages, which belong to no piece."""
        return self._huge.parked_bytes + self._small.parked_bytes

    def make(self, size_bytes: int) -> PagedRange:
        """Return memory for a new piece, with fresh pages."""
        return PagedRange(size_bytes)

    def mark(self, memory: PieceMemory) -> None:
        """Do nothing, since work on the CPU has ended when its call returns."""

    def take_from(self, memory: PieceMemory) -> None:
        """Protect a piece that is out, and park its pages.

        Pages that do not fit into the pool go back to the kernel.
        """
        left = _paged(memory)
        left.allow(Access.NONE)
        address, image = left.behind()
        for parked, begin_bytes, end_bytes in self._parts(left):
            at_bytes = begin_bytes + parked.park(address + begin_bytes, end_bytes - begin_bytes)
            if at_bytes < end_bytes:
                drop_pages(image, at_bytes, end_bytes - at_bytes)

    def give_to(self, memory: PieceMemory) -> None:
        """Give parked pages to a piece's hidden range; the kernel adds missing ones. Their content is undefined."""
        arriving = _paged(memory)
        address, _ = arriving.behind()
        for parked, begin_bytes, end_bytes in self._parts(arriving):
            parked.give(address + begin_bytes, end_bytes - begin_bytes)

    def trim(self, keep_bytes: int) -> None:
        """Give parked pages back to the kernel until `keep_bytes` are left.

        Huge pages go last, since they take longest.
        """
        self._small.trim(keep_bytes - self._huge.parked_bytes)
        self._huge.trim(keep_bytes - self._small.parked_bytes)

    def _parts(self, piece: PagedRange) -> Iterator[tuple[ParkedPages, int, int]]:
        """Yield (pool, begin, end) for the huge pages and the small pages of a piece."""
        huge_bytes = piece.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        yield self._huge, 0, huge_bytes
        yield self._small, huge_bytes, piece.size_bytes


def _paged(memory: PieceMemory) -> PagedRange:
    assert isinstance(memory, PagedRange)
    return memory


def _move(source: int, target: int, size_bytes: int) -> None:
    if _libc.mremap(source, size_bytes, size_bytes, _MREMAP, target) == target:
        return
    number = ctypes.get_errno()
    if number != errno.EFAULT or size_bytes == PAGE_BYTES:
        raise OSError(number, f"pages cannot be moved: {os.strerror(number or errno.EINVAL)}")
    # Before Linux 6.17, one call moves only pages of a single mapping, and these may have come in several parts.
    unit_bytes = HUGE_PAGE_BYTES if size_bytes > HUGE_PAGE_BYTES else PAGE_BYTES
    first_bytes = -(-(size_bytes // 2) // unit_bytes) * unit_bytes
    _move(source, target, first_bytes)
    _move(source + first_bytes, target + first_bytes, size_bytes - first_bytes)


def _protect(address: int, size_bytes: int, access: Access) -> None:
    if _libc.mprotect(address, size_bytes, _PROTECTION[access]):
        number = ctypes.get_errno()
        raise OSError(number, f"memory cannot be protected: {os.strerror(number)}")


def _touch_before_it_is_moved(storage: torch.UntypedStorage) -> None:
    """Let whole copies of the storage (`copy.deepcopy`) and writes to files first read a byte: see `page_faults.py`."""
    found = weakref.ref(storage)

    def touched(act: Callable[..., Any], *given: Any) -> Any:
        own = found()
        assert own is not None
        own[0]
        return act(own, *given)

    for name in ("clone", "_write_file"):
        setattr(storage, name, partial(touched, getattr(type(storage), name)))


_RANGES: weakref.WeakSet[PagedRange] = weakref.WeakSet()
_PARKED: weakref.WeakSet[ParkedPages] = weakref.WeakSet()


def is_piece(address: int) -> bool:
    """Return True if a piece has this address, in this process or in the parent that it was forked from."""
    return any(each.address <= address < each.address + each.size_bytes for each in list(_RANGES))


def _reserve(address: int, size_bytes: int) -> None:
    _libc.mmap(address, size_bytes, _PROTECTION[Access.NONE], _RESERVED, -1, 0)


def _reserve_in_child() -> None:
    """Reserve all addresses of pieces in a forked child, where nothing is mapped.

    Otherwise the child's own memory could be mapped there. It would be read as a piece, and unmapped once the child
    garbage-collects the parent's objects.
    """
    for piece in list(_RANGES):
        piece.reserve()
    for parked in list(_PARKED):
        parked.reserve()


os.register_at_fork(after_in_child=_reserve_in_child)
