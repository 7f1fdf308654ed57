"""What this process holds in memory, as the kernel counts it. Linux only; nothing is decided here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_M_MMAP_THRESHOLD = -3
MMAP_FROM_BYTES = 256 << 10
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def give_freed_memory_back() -> None:
    """Let the C library return freed tensors to the kernel at once, or what leaves would make no room."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)


class PeakMeter:
    """The most that this process itself held since the last look: its anonymous memory and its own shared memory.

    Pages of files, and peers' memory that is only read here, are others' or can be dropped: they are left out. The
    kernel's high-water mark knows no such difference; what it rose by since the last look is taken as ours.
    """

    def __init__(self, shared_bytes: Callable[[], int]) -> None:
        self._shared_bytes = shared_bytes
        self._own_bytes = self._resident_bytes = 0
        self.look()

    def look(self) -> int:
        """The peak in bytes since the last look, from which the next one counts."""
        status = _status()
        peak_bytes = self._own_bytes + max(0, status["VmHWM"] - self._resident_bytes)
        _CLEAR_REFS.write_text(_RESET_PEAK)
        self._own_bytes = status["RssAnon"] + self._shared_bytes()
        self._resident_bytes = status["VmRSS"]
        return max(peak_bytes, self._own_bytes)

    @property
    def now_bytes(self) -> int:
        """What was held at the last look."""
        return self._own_bytes


def _status() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes."""
    found = {}
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value[:-3]) * 1024
    return found
