"""The C library's heap: what is freed goes back to the kernel, or no limit on a process would hold (glibc).

The kernel's view of this process's own memory: what is held now, and the most since the last look. Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path

LARGE_BYTES = 256 << 10
"""Allocations from this size on are mapped on their own, and unmapped when they are freed."""
KEPT_BYTES = 1 << 20
"""Below it, what is freed may stay in the heap: the kernel hands such memory out page by page, which takes long."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_libc = ctypes.CDLL(None)
_kept_below = [LARGE_BYTES]


def give_back_what_is_freed() -> None:
    """From now on. Without it, the C library keeps up to 64 MiB, and as much again in holes."""
    _keep_below(LARGE_BYTES)


def _keep_below(size_bytes: int) -> None:
    _kept_below[0] = size_bytes
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_MMAP_THRESHOLD, size_bytes)
        _libc.mallopt(_TRIM_THRESHOLD, size_bytes)


def trim() -> None:
    """Give back what is free now."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def trim_what_stays() -> None:
    """`trim`, where freed memory stays: elsewhere there is nothing to give back, and to look for it takes time."""
    if _kept_below[0] > LARGE_BYTES:
        trim()


class FreedMemory:
    """Where memory goes that is freed: to the kernel, or it `stays` in the heap for what is allocated next.

    That spares page faults and takes memory: holes that nothing lies in. `can_stay` says whether anybody counts them.
    """

    def __init__(self, *, can_stay: bool) -> None:
        self.can_stay = can_stay
        self.stays = False

    def keep(self) -> None:
        """From now on it stays."""
        self.stays = True
        _keep_below(KEPT_BYTES)

    def give_back(self) -> None:
        """It stays no more, and what is free goes; for good, since there was no room for it."""
        self.stays = self.can_stay = False
        give_back_what_is_freed()
        trim()


_STATUS = Path("/proc/self/status")
_WAITS = "/proc/thread-self/schedstat"
_CLEAR = Path("/proc/self/clear_refs")
_FORGET_THE_PEAK = b"5"


def undisturbed_s() -> float:
    """The clock of this thread, which stands still while it could run and others have the core.

    A busy moment makes no other plan then. What the thread itself waits for counts.
    """
    now_s = time.perf_counter()
    with contextlib.suppress(OSError), open(_WAITS, "rb", buffering=0) as file:
        now_s -= int(file.read(64).split()[1]) * 1e-9
    return now_s


class KernelMeter:
    """`MemoryMeter` by the kernel's counts."""

    runs_ahead = False

    def own_bytes(self) -> tuple[int, int]:
        """Memory that is no file's: now, and at most since `forget_peak`."""
        # Asked twice per point: buffers, text and a look at each line take longer than the kernel's own work.
        with _STATUS.open("rb", buffering=0) as file:
            status = file.read(1 << 16)
        most, now, own = (_bytes_of(status, name) for name in (b"\nVmHWM:", b"\nVmRSS:", b"\nRssAnon:"))
        return own, most - (now - own)

    def forget_peak(self) -> None:
        """Let the peak begin anew from what is held now; without the right to, it stays the highest ever."""
        with contextlib.suppress(OSError), _CLEAR.open("wb", buffering=0) as file:
            file.write(_FORGET_THE_PEAK)

    def clock(self) -> float:
        """What computes on the CPU is done when it returns."""
        return undisturbed_s()

    def keep_pace(self) -> None:
        """Nothing is ahead."""


def _bytes_of(status: bytes, name: bytes) -> int:
    """What a line says in kB."""
    begin = status.index(name) + len(name)
    return int(status[begin : status.index(b"kB", begin)]) << 10
