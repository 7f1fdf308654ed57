"""Host memory as an engine: the tier above drives, for what lies in a device's memory. Bounded."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from elastrain.offload.drives.port import round_up


class HostEngine:
    """So many bytes of host memory. Pages come when they are first written, and stay.

    `memory` is used instead, where somebody has made it; `give_back` is called when nobody uses it any more.
    """

    def __init__(
        self, capacity_bytes: int, *, memory: memoryview | None = None, give_back: Callable[[], None] = lambda: None
    ) -> None:
        self.name = "host memory"
        self._memory = shared_pages(capacity_bytes) if memory is None else memory
        self._give_back = give_back

    def reserve(self, size_bytes: int) -> None:
        if size_bytes > self._memory.nbytes:
            raise OSError(errno.ENOSPC, f"{size_bytes} bytes are wanted of {self._memory.nbytes}", self.name)

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        for view in views:
            _copy(self.view(offset_bytes, view.nbytes), view)
            offset_bytes += view.nbytes

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        for view in views:
            _copy(view, self.view(offset_bytes, view.nbytes))
            offset_bytes += view.nbytes

    def capacity_bytes(self) -> int:
        return 0  # memory does not wear

    def close(self) -> None:
        give_back, self._give_back = self._give_back, lambda: None
        self._memory = memoryview(b"")
        give_back()

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        if offset_bytes + size_bytes > self._memory.nbytes:
            raise OSError(errno.EINVAL, f"offset {offset_bytes} with {size_bytes} bytes is outside", self.name)
        return self._memory[offset_bytes : offset_bytes + size_bytes]


def shared_pages(size_bytes: int) -> memoryview:
    """Memory that counts apart from the process's own, which a limit is about; forked children share it."""
    return memoryview(mmap.mmap(-1, round_up(size_bytes), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))


def _copy(target: memoryview, source: memoryview) -> None:
    """Without the interpreter's lock, which copying a memoryview would hold."""
    np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
