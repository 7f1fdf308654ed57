"""An engine without a device, which keeps bytes in memory: the reference of the port's contract, and fast."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence


class MemoryEngine:
    """Keeps everything in one growing buffer of at most `capacity_bytes`.

    The kernel gives it its pages when they are written to: a slab of a quarter of a gibibyte holds a few of them.
    """

    def __init__(self, *, capacity_bytes: int = 1 << 40) -> None:
        self.name = "memory"
        self._capacity_bytes = capacity_bytes
        self._reserved_bytes = 0
        self._data = _pages()

    def reserve(self, size_bytes: int) -> None:
        if size_bytes > self._capacity_bytes:
            raise OSError(
                errno.ENOSPC, f"{size_bytes} bytes are wanted and there are {self._capacity_bytes}", self.name
            )
        if size_bytes > self._reserved_bytes:
            self._data.resize(size_bytes)
            self._reserved_bytes = size_bytes

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        for view in views:
            self._data[self._range(offset_bytes, view)] = view.cast("B")
            offset_bytes += view.nbytes

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        for view in views:
            view.cast("B")[:] = self._data[self._range(offset_bytes, view)]
            offset_bytes += view.nbytes

    def capacity_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._reserved_bytes = 0
        self._data = _pages()

    def _range(self, offset_bytes: int, view: memoryview) -> slice:
        end_bytes = offset_bytes + view.nbytes
        if end_bytes > self._reserved_bytes:
            raise OSError(errno.EINVAL, f"beyond the {self._reserved_bytes} bytes that were reserved", self.name)
        return slice(offset_bytes, end_bytes)


def _pages() -> mmap.mmap:
    return mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
