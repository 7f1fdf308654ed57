"""The C library's heap, which must return freed memory to the kernel for a limit to hold (glibc); and memory counts.

`KernelMeter` reads the memory that this process holds, and its peak since the last look. Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path

LARGE_BYTES = 256 << 10
"""Allocations of at least this size are mapped on their own, and unmapped when they are freed."""
KEPT_BYTES = 1 << 20
"""Allocations below this size may stay in the heap after a free. Mapping memory again page by page takes long."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_libc = ctypes.CDLL(None)
_kept_below = [LARGE_BYTES]


def give_back_what_is_freed() -> None:
    """Make the C library return freed memory. By default it keeps up to 64 MiB, and as much again in gaps."""
    _keep_below(LARGE_BYTES)


def _keep_below(size_bytes: int) -> None:
    _kept_below[0] = size_bytes
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_MMAP_THRESHOLD, size_bytes)
        _libc.mallopt(_TRIM_THRESHOLD, size_bytes)


def trim() -> None:
    """Return all free heap memory to the kernel now."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def trim_what_stays() -> None:
    """Call `trim` if freed memory stays in the heap.

    Otherwise there is nothing to return, and the search takes time.
    """
    if _kept_below[0] > LARGE_BYTES:
        trim()


class FreedMemory:
    """The choice for freed memory: it goes to the kernel, or with `stays` it remains in the heap for later allocations.

    Keeping it saves page faults and costs unused memory. `can_stay` is True if a meter counts that memory.
    """

    def __init__(self, *, can_stay: bool) -> None:
        self.can_stay = can_stay
        self.stays = False

    def keep(self) -> None:
        """Keep freed memory in the heap."""
        self.stays = True
        _keep_below(KEPT_BYTES)

    def give_back(self) -> None:
        """Return freed memory to the kernel now and for good, since there was no room for it."""
        self.stays = self.can_stay = False
        give_back_what_is_freed()
        trim()


_STATUS = Path("/proc/self/status")
_WAITS = "/proc/thread-self/schedstat"
_CLEAR = Path("/proc/self/clear_refs")
_FORGET_THE_PEAK = b"5"


def undisturbed_s() -> float:
    """Return this thread's clock in seconds, without the time in which it was ready to run but had no core.

    So a busy machine does not change plans. Time that the thread itself waits is included.
    """
    now_s = time.perf_counter()
    with contextlib.suppress(OSError), open(_WAITS, "rb", buffering=0) as file:
        now_s -= int(file.read(64).split()[1]) * 1e-9
    return now_s


class KernelMeter:
    """A `MemoryMeter` that reads the kernel's counts."""

    runs_ahead = False

    def own_bytes(self) -> tuple[int, int]:
        """Return the bytes of anonymous memory now, and the most since `forget_peak`."""
        # This runs twice per point. Buffering, decoding and parsing of each line take longer than the kernel's own
        # work.
        with _STATUS.open("rb", buffering=0) as file:
            status = file.read(1 << 16)
        most, now, own = (_bytes_of(status, name) for name in (b"\nVmHWM:", b"\nVmRSS:", b"\nRssAnon:"))
        return own, most - (now - own)

    def forget_peak(self) -> None:
        """Restart the peak from the present memory. Without the permission, it stays the highest ever."""
        with contextlib.suppress(OSError), _CLEAR.open("wb", buffering=0) as file:
            file.write(_FORGET_THE_PEAK)

    def clock(self) -> float:
        """Return the thread's clock. Work on the CPU has ended when its call returns."""
        return undisturbed_s()

    def keep_pace(self) -> None:
        """Do nothing, since no work is queued."""


def _bytes_of(status: bytes, name: bytes) -> int:
    """Return the value of a line in bytes; the line has it in kB."""
    begin = status.index(name) + len(name)
    return int(status[begin : status.index(b"kB", begin)]) << 10
