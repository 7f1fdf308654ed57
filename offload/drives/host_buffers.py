"""Memory that the kernel can read into directly, as tensor storages, and the memory of tensors as bytes.

What is on disk is the page image of a storage: its bytes at the same distance from a page boundary as in memory. So
direct I/O moves all but the first and last page without a copy, and a tensor comes back at an address that is the
same modulo the page size: kernels that treat unaligned edges differently compute the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import threading
from dataclasses import dataclass

import torch

from elastrain.offload.drives.port import PAGE_BYTES, round_up

HUGE_PAGE_BYTES = 2 << 20
ROWS = 256
"""Of `tensor_checksum`: with a thousand, torch's sum over rows takes twice what it sums up as a buffer on a device."""
_ZEROS = bytes(PAGE_BYTES)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Fresh memory: `image` is what the device fills, `storage` the tensor bytes inside it.

    The memory lives as long as either is referenced; nothing has to be given back.
    """

    image: memoryview
    storage: torch.UntypedStorage


def lease(*, size_bytes: int, shift_bytes: int) -> Lease:
    """Memory for a storage of `size_bytes` that starts `shift_bytes` after a page boundary."""
    return lease_in(pages(round_up(shift_bytes + size_bytes)), size_bytes=size_bytes, shift_bytes=shift_bytes)[0]


def lease_in(image: memoryview, *, size_bytes: int, shift_bytes: int) -> tuple[Lease, memoryview]:
    """A lease in whole pages that are there already, and the view that lives exactly as long as its storage's bytes."""
    inside = image[shift_bytes : shift_bytes + size_bytes]
    return Lease(image=image, storage=torch.frombuffer(inside, dtype=torch.uint8).untyped_storage()), inside


def pages(length_bytes: int) -> memoryview:
    """Fresh pages, huge ones as far as they are filled: the kernel has 512 times fewer of them to hand out and pin."""
    huge_bytes = length_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not huge_bytes:
        return memoryview(_anonymous(length_bytes))
    # Address space costs nothing: enough of it to start at the boundary of a huge page.
    memory = _anonymous(length_bytes + HUGE_PAGE_BYTES)
    start_bytes = -address_of(memory) % HUGE_PAGE_BYTES
    memory.madvise(mmap.MADV_HUGEPAGE, start_bytes, huge_bytes)
    return memoryview(memory)[start_bytes : start_bytes + length_bytes]


def drop_pages(memory: memoryview, start_bytes: int, size_bytes: int) -> None:
    """Give whole pages of what `pages` returned to the kernel: they come back as zeros when they are touched."""
    mapped = memory.obj
    assert isinstance(mapped, mmap.mmap)
    before_bytes = address_of(memory) - address_of(mapped)
    mapped.madvise(mmap.MADV_DONTNEED, before_bytes + start_bytes, size_bytes)


def keep_from_children(memory: memoryview) -> None:
    """Forked processes do not get what `pages` returned: they would keep it when it is given up here."""
    mapped = memory.obj
    assert isinstance(mapped, mmap.mmap)
    mapped.madvise(mmap.MADV_DONTFORK, address_of(memory) - address_of(mapped), memory.nbytes)


def fault_in(image: memoryview) -> None:
    """Touch each page of memory that is to be filled as a whole.

    A direct read into fresh pages has the kernel find them with the address space locked, and whoever maps or unmaps
    memory meanwhile waits: a training thread does that for every tensor. Pages that are touched are found without.
    """
    torch.frombuffer(image, dtype=torch.uint8)[::PAGE_BYTES].zero_()


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Where writable memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _anonymous(length_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def shift_of(storage: torch.UntypedStorage) -> int:
    """The distance of the storage's start from the page boundary before it, in bytes."""
    return storage.data_ptr() % PAGE_BYTES


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """The storage's memory. The caller keeps the storage alive while it uses the view. CPU storages only."""
    return _view(storage.data_ptr(), storage.nbytes())


def image_of(storage: torch.UntypedStorage, shift_bytes: int) -> memoryview:
    """The pages that a lease's storage lies in. Only for memory that comes in whole pages."""
    length_bytes = round_up(shift_bytes + storage.nbytes())
    return _view(storage.data_ptr() - shift_bytes, length_bytes)


# An array type of ctypes for each length would be a class to make, and garbage to collect, for each transfer.
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def _view(address: int, size_bytes: int) -> memoryview:
    found: memoryview = _from_memory(address, size_bytes, _WRITABLE)
    return found


def page_image(payload: memoryview, shift_bytes: int) -> list[memoryview]:
    """`payload` as page-aligned views: a copied first page, the pages between without a copy, a copied last page.

    The copied pages hold until the next call in the same thread.
    """
    # Copied, so that only the payload's own bytes leave the process: its first and last page have neighbours.
    head_bytes = min((PAGE_BYTES - shift_bytes) % PAGE_BYTES, payload.nbytes)
    tail_bytes = (payload.nbytes - head_bytes) % PAGE_BYTES
    inner = payload[head_bytes : payload.nbytes - tail_bytes]
    views = [_filled(_SCRATCH.head, payload[:head_bytes], shift_bytes)] if head_bytes else []
    views += [inner] if inner.nbytes else []
    return views + ([_filled(_SCRATCH.tail, payload[payload.nbytes - tail_bytes :], 0)] if tail_bytes else [])


class _Scratch(threading.local):
    """Two pages for each thread, because devices write from several threads at a time."""

    def __init__(self) -> None:
        pages = memoryview(_anonymous(2 * PAGE_BYTES))
        self.head, self.tail = pages[:PAGE_BYTES], pages[PAGE_BYTES:]


_SCRATCH = _Scratch()


def _filled(page: memoryview, part: memoryview, at_bytes: int) -> memoryview:
    page[:] = _ZEROS
    page[at_bytes : at_bytes + part.nbytes] = part
    return page


def cut(views: list[memoryview], size_bytes: int) -> list[list[memoryview]]:
    """The same bytes in pieces of `size_bytes` (the last one may be smaller)."""
    pieces: list[list[memoryview]] = [[]]
    room_bytes = size_bytes
    for view in views:
        while view.nbytes:
            if not room_bytes:
                pieces.append([])
                room_bytes = size_bytes
            part = view[: min(room_bytes, view.nbytes)]
            pieces[-1].append(part)
            room_bytes -= part.nbytes
            view = view[part.nbytes :]
    return [piece for piece in pieces if piece]


def tensor_checksum(memory: torch.Tensor) -> int:
    """A sum over the bytes that depends on their places, computed where they are: no copy to the host, any device.

    Words in rows and columns, which are summed: they are read twice, and hardly any memory is taken.
    """
    words = memory[: memory.numel() // 8 * 8].view(torch.int64)
    rows = min(ROWS, math.isqrt(words.numel()))
    columns = words.numel() // max(1, rows)
    table = words[: rows * columns].view(rows, columns)
    rest = memory[words.numel() * 8 :].to(torch.int64)
    sums = torch.cat((table.sum(0), words[rows * columns :], rest, table.sum(1)))
    return int((sums * _factors(sums.numel(), rows, memory.device)).sum().item())


@functools.lru_cache(maxsize=64)
def _factors(count: int, rows: int, device: torch.device) -> torch.Tensor:
    """Odd ones, but even ones for sums of rows, at the end: each bit of a word tells, which is in one sum of each."""
    found = torch.arange(count) * 2 + 1
    found[count - rows :] *= 0x1E3779B97F4A7C16
    return found.to(device)  # once it is there: other threads use it on streams of their own
