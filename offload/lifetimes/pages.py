"""Memory of pieces: addresses that never change, under which pages come and go. Linux, CPU.

Fresh pages cost up to seconds per GiB, moving them costs microseconds. So the pages of a piece that leaves are parked
in the pool's own range of addresses, and an arriving piece gets them from there (`mremap`). What is out is protected:
it would read as zeros, without a word. A forked child gets none of it, since its pages would stay its own.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

import torch

from elastrain.offload.buffers import address_of, drop_pages, pages
from elastrain.offload.device import Copy, Device
from elastrain.offload.engines.port import round_up
from elastrain.offload.lifetimes.memory import PieceMemory, Span

_MREMAP = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PagedRange:
    """A range of addresses for one piece. `image` is its whole pages, `tensor` the same as bytes.

    It begins with pages, and is usable; `PagePool` takes them away and brings them back.
    """

    def __init__(self, size_bytes: int) -> None:
        self.image = pages(round_up(size_bytes))
        self.address = address_of(self.image)
        self.size_bytes = self.image.nbytes
        _keep_from_children(self.image)
        self.tensor = torch.frombuffer(self.image, dtype=torch.uint8)

    def write(self, device: Device, span: Span, cancelled: Callable[[], bool]) -> Copy:
        """As `PieceMemory.write`: memory is what it is when this is called."""
        return device.write(self._part(span), 0, cancelled)

    def read(self, device: Device, span: Span, copy: Copy, cancelled: Callable[[], bool]) -> None:
        """As `PieceMemory.read`."""
        device.read(copy, self._part(span), cancelled)

    def _part(self, span: Span) -> memoryview:
        return self.image[span.begin_bytes : span.begin_bytes + span.size_bytes]

    def protect(self) -> None:
        """From now on, whoever touches it ends the process by SIGSEGV."""
        _protect(self.address, self.size_bytes, _PROT_NONE)

    def open(self) -> None:
        """Let it be touched again."""
        _protect(self.address, self.size_bytes, _PROT_READ_WRITE)


class PagePool:
    """Parks pages of what has left for what arrives: `parked_bytes` are held for nobody. One thread at a time."""

    def __init__(self, capacity_bytes: int) -> None:
        self.parked_bytes = 0
        self._memory = pages(round_up(capacity_bytes))
        self._address = address_of(self._memory)
        self._free = [(0, self._memory.nbytes)]  # addresses without pages, as offset and size, the last taken first
        self._parked: list[tuple[int, int]] = []
        _keep_from_children(self._memory)

    def make(self, size_bytes: int) -> PagedRange:
        """Memory for a new piece, with fresh pages."""
        return PagedRange(size_bytes)

    def mark(self, memory: PieceMemory) -> None:
        """Nothing: what computes on the CPU has ended when it returns."""

    def take_from(self, memory: PieceMemory) -> None:
        """Park the pages of a piece that is out, and protect it. What there are no addresses for goes to the kernel."""
        left, at_bytes = _paged(memory), 0
        while at_bytes < left.size_bytes and self._free:
            offset_bytes, room_bytes = self._free.pop()
            part_bytes = min(room_bytes, left.size_bytes - at_bytes)
            if part_bytes < room_bytes:
                self._free.append((offset_bytes + part_bytes, room_bytes - part_bytes))
            _move(left.address + at_bytes, self._address + offset_bytes, part_bytes)
            self._parked.append((offset_bytes, part_bytes))
            self.parked_bytes += part_bytes
            at_bytes += part_bytes
        if at_bytes < left.size_bytes:
            drop_pages(left.image, at_bytes, left.size_bytes - at_bytes)
        left.protect()

    def give_to(self, memory: PieceMemory) -> None:
        """Put parked pages under a piece's addresses; what is missing comes fresh. What was in them is undefined."""
        arriving, at_bytes = _paged(memory), 0
        arriving.open()
        while at_bytes < arriving.size_bytes and self._parked:
            offset_bytes, had_bytes = self._parked.pop()
            part_bytes = min(had_bytes, arriving.size_bytes - at_bytes)
            if part_bytes < had_bytes:
                self._parked.append((offset_bytes + part_bytes, had_bytes - part_bytes))
            _move(self._address + offset_bytes, arriving.address + at_bytes, part_bytes)
            self._free.append((offset_bytes, part_bytes))
            self.parked_bytes -= part_bytes
            at_bytes += part_bytes
        self._join()

    def trim(self, keep_bytes: int) -> None:
        """Give parked pages back to the kernel, down to so many bytes."""
        while self.parked_bytes > max(0, keep_bytes):
            offset_bytes, size_bytes = self._parked.pop()
            drop_pages(self._memory, offset_bytes, size_bytes)
            self._free.append((offset_bytes, size_bytes))
            self.parked_bytes -= size_bytes
        self._join()

    def _join(self) -> None:
        """Forget how addresses were cut once all of them are free: each cut is a call of the kernel more."""
        if not self._parked:
            self._free = [(0, self._memory.nbytes)]


def _paged(memory: PieceMemory) -> PagedRange:
    assert isinstance(memory, PagedRange)
    return memory


def _keep_from_children(memory: memoryview) -> None:
    mapped = memory.obj
    assert isinstance(mapped, mmap.mmap)
    mapped.madvise(mmap.MADV_DONTFORK, address_of(memory) - address_of(mapped), memory.nbytes)


def _move(source: int, target: int, size_bytes: int) -> None:
    if _libc.mremap(source, size_bytes, size_bytes, _MREMAP, target) != target:
        number = ctypes.get_errno()
        raise OSError(number, f"pages cannot be moved: {os.strerror(number or errno.EINVAL)}")


def _protect(address: int, size_bytes: int, protection: int) -> None:
    if _libc.mprotect(address, size_bytes, protection):
        number = ctypes.get_errno()
        raise OSError(number, f"memory cannot be protected: {os.strerror(number)}")
