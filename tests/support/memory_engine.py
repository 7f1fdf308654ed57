"""An engine without a device, which keeps bytes in memory: the reference of the port's contract, and fast."""

from __future__ import annotations

import errno
from collections.abc import Sequence


class MemoryEngine:
    """Keeps everything in one growing buffer of at most `capacity_bytes`."""

    def __init__(self, *, capacity_bytes: int = 1 << 40) -> None:
        self.name = "memory"
        self._capacity_bytes = capacity_bytes
        self._data = bytearray()

    def reserve(self, size_bytes: int) -> None:
        if size_bytes > self._capacity_bytes:
            raise OSError(
                errno.ENOSPC, f"{size_bytes} bytes are wanted and there are {self._capacity_bytes}", self.name
            )
        if size_bytes > len(self._data):
            self._data.extend(bytes(size_bytes - len(self._data)))

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
        self._data = bytearray()

    def _range(self, offset_bytes: int, view: memoryview) -> slice:
        end_bytes = offset_bytes + view.nbytes
        if end_bytes > len(self._data):
            raise OSError(errno.EINVAL, f"beyond the {len(self._data)} bytes that were reserved", self.name)
        return slice(offset_bytes, end_bytes)
