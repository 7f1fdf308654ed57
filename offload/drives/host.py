"""A bounded amount of host memory as an engine: the tier above drives, for data of a device's memory."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from elastrain.offload.drives.port import round_up


class HostEngine:
    """An engine over `capacity_bytes` of host memory. Pages are taken when they are first written, and then kept.

    `memory` replaces newly allocated memory if the caller has allocated it; `give_back` is then called on `close`.
    """

    def __init__(
        self, capacity_bytes: int, *, memory: memoryview | None = None, give_back: Callable[[], None] = lambda: None
    ) -> None:
        self.name = "host memory"
        self._memory = shared_pages(capacity_bytes) if memory is None else memory
        self._give_back = give_back

    def reserve(self, size_bytes: int) -> None:
        """Raise OSError(ENOSPC) if the memory is smaller than `size_bytes`."""
        if size_bytes > self._memory.nbytes:
            raise OSError(errno.ENOSPC, f"{size_bytes} bytes are wanted of {self._memory.nbytes}", self.name)

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Copy `views` into the memory, one after the other."""
        for view in views:
            _copy(self.view(offset_bytes, view.nbytes), view)
            offset_bytes += view.nbytes

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Fill `views` from the memory, one after the other."""
        for view in views:
            _copy(view, self.view(offset_bytes, view.nbytes))
            offset_bytes += view.nbytes

    def capacity_bytes(self) -> int:
        """Return 0, because memory does not wear out."""
        return 0

    def close(self) -> None:
        """Drop the memory and call `give_back`, once."""
        give_back, self._give_back = self._give_back, lambda: None
        self._memory = memoryview(b"")
        give_back()

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a view of the memory at an offset. Raises OSError if it is out of range."""
        if offset_bytes + size_bytes > self._memory.nbytes:
            raise OSError(errno.EINVAL, f"offset {offset_bytes} with {size_bytes} bytes is outside", self.name)
        return self._memory[offset_bytes : offset_bytes + size_bytes]


def shared_pages(size_bytes: int) -> memoryview:
    """Return shared memory, which is not counted as the process's own memory. Forked children share it."""
    return memoryview(mmap.mmap(-1, round_up(size_bytes), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes without holding the GIL, which a copy by memoryview would hold."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
