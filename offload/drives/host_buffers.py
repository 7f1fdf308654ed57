"""Page-aligned memory that the kernel can read into directly, used as tensor storages; memory of tensors as bytes.

On disk lies the page image of a storage: its bytes at the same distance from a page boundary as in memory. Direct I/O
therefore moves all but the first and last page without a copy. A storage comes back at the same address modulo the page
size. So kernels that treat unaligned edges differently compute the same bits.
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
"""Most rows in `tensor_checksum`. With 1000 rows, torch's sum on a device needs a buffer of twice its input's size."""
_ZEROS = bytes(PAGE_BYTES)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Memory for one storage: `image` is the pages that a device fills, `storage` the tensor's bytes inside.

    The memory lives as long as either is referenced. Nothing has to be given back.
    """

    image: memoryview
    storage: torch.UntypedStorage


def lease(*, size_bytes: int, shift_bytes: int) -> Lease:
    """Return fresh memory for a storage of `size_bytes` that starts `shift_bytes` after a page boundary."""
    return lease_in(pages(round_up(shift_bytes + size_bytes)), size_bytes=size_bytes, shift_bytes=shift_bytes)[0]


def lease_in(image: memoryview, *, size_bytes: int, shift_bytes: int) -> tuple[Lease, memoryview]:
    """Return a lease in the existing pages `image`, and the view that lives exactly as long as the storage's bytes."""
    inside = image[shift_bytes : shift_bytes + size_bytes]
    return Lease(image=image, storage=torch.frombuffer(inside, dtype=torch.uint8).untyped_storage()), inside


def pages(length_bytes: int) -> memoryview:
    """Return fresh page-aligned memory.

    Huge pages are used as far as they are filled: 512 times fewer to map and pin.
    """
    huge_bytes = length_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if not huge_bytes:
        return memoryview(_anonymous(length_bytes))
    # Map more addresses than needed, which costs nothing, so that the memory can start at a huge page's boundary.
    memory = _anonymous(length_bytes + HUGE_PAGE_BYTES)
    start_bytes = -address_of(memory) % HUGE_PAGE_BYTES
    memory.madvise(mmap.MADV_HUGEPAGE, start_bytes, huge_bytes)
    return memoryview(memory)[start_bytes : start_bytes + length_bytes]


def drop_pages(memory: memoryview, start_bytes: int, size_bytes: int) -> None:
    """Give whole pages of memory from `pages` back to the kernel. They are zero when they are touched again."""
    mapped = memory.obj
    assert isinstance(mapped, mmap.mmap)
    before_bytes = address_of(memory) - address_of(mapped)
    mapped.madvise(mmap.MADV_DONTNEED, before_bytes + start_bytes, size_bytes)


def keep_from_children(memory: memoryview) -> None:
    """Keep memory from `pages` out of forked processes, which would hold its pages after they are dropped here."""
    mapped = memory.obj
    assert isinstance(mapped, mmap.mmap)
    mapped.madvise(mmap.MADV_DONTFORK, address_of(memory) - address_of(mapped), memory.nbytes)


def fault_in(image: memoryview) -> None:
    """Touch each page of memory that will be overwritten completely.

    A direct read into fresh pages makes the kernel allocate them with the address space locked. Every thread that maps
    or unmaps memory waits for that, as a training thread does for every tensor. Touched pages need no lock.
    """
    torch.frombuffer(image, dtype=torch.uint8)[::PAGE_BYTES].zero_()


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _anonymous(length_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def shift_of(storage: torch.UntypedStorage) -> int:
    """Return the distance of the storage's start from the page boundary before it, in bytes."""
    return storage.data_ptr() % PAGE_BYTES


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return a view of a CPU storage's memory. The caller keeps the storage alive while it uses the view."""
    return _view(storage.data_ptr(), storage.nbytes())


def image_of(storage: torch.UntypedStorage, shift_bytes: int) -> memoryview:
    """Return a view of the pages around a storage. Only for storages whose memory is whole pages, as a lease's is."""
    length_bytes = round_up(shift_bytes + storage.nbytes())
    return _view(storage.data_ptr() - shift_bytes, length_bytes)


# ctypes arrays would create a class for each length, and garbage, with every transfer.
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def _view(address: int, size_bytes: int) -> memoryview:
    found: memoryview = _from_memory(address, size_bytes, _WRITABLE)
    return found


def page_image(payload: memoryview, shift_bytes: int) -> list[memoryview]:
    """Return `payload` as page-aligned views: copies of its first and last page, and the pages between without a copy.

    The copied pages are valid until the next call in the same thread.
    """
    # The edge pages are copied so that only the payload's own bytes leave the process: other data may share them.
    head_bytes = min((PAGE_BYTES - shift_bytes) % PAGE_BYTES, payload.nbytes)
    tail_bytes = (payload.nbytes - head_bytes) % PAGE_BYTES
    inner = payload[head_bytes : payload.nbytes - tail_bytes]
    views = [_filled(_SCRATCH.head, payload[:head_bytes], shift_bytes)] if head_bytes else []
    views += [inner] if inner.nbytes else []
    return views + ([_filled(_SCRATCH.tail, payload[payload.nbytes - tail_bytes :], 0)] if tail_bytes else [])


class _Scratch(threading.local):
    """Two pages for each thread, because devices write from several threads at once."""

    def __init__(self) -> None:
        pages = memoryview(_anonymous(2 * PAGE_BYTES))
        self.head, self.tail = pages[:PAGE_BYTES], pages[PAGE_BYTES:]


_SCRATCH = _Scratch()


def _filled(page: memoryview, part: memoryview, at_bytes: int) -> memoryview:
    page[:] = _ZEROS
    page[at_bytes : at_bytes + part.nbytes] = part
    return page


def cut(views: list[memoryview], size_bytes: int) -> list[list[memoryview]]:
    """Cut the bytes into pieces of `size_bytes`; the last one may be smaller."""
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
    """Return a position-dependent checksum of a tensor of bytes, computed on the tensor's own device.

    The bytes are viewed as a table of words whose rows and columns are summed. That reads them twice, but takes hardly
    any memory.
    """
    words = memory[: memory.numel() // 8 * 8].view(torch.int64)
    rows = min(ROWS, math.isqrt(words.numel()))
    columns = words.numel() // max(1, rows)
    table = words[: rows * columns].view(rows, columns)
    rest = memory[words.numel() * 8 :].to(torch.int64)
    sums = torch.cat((table.sum(0), words[rows * columns :], rest, table.sum(1)))
    return int((sums * _FACTORS.of(sums.numel(), rows, memory.device)).sum().item())


class _Factors(threading.local):
    """Factors that a thread keeps for itself: another thread's stream could still read what this one frees."""

    def __init__(self) -> None:
        self.of = functools.lru_cache(maxsize=64)(_factors)


def _factors(count: int, rows: int, device: torch.device) -> torch.Tensor:
    """Return one factor per sum: odd numbers, then even ones for the sums of rows.

    Each word is in one sum of rows and in one of columns, so that each of its bits affects the checksum.
    """
    found = torch.arange(count) * 2 + 1
    found[count - rows :] *= 0x1E3779B97F4A7C16
    return found.to(device)


_FACTORS = _Factors()
