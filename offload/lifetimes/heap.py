"""The C library's heap: what is freed goes back to the kernel, or no limit on a process would hold (glibc)."""

from __future__ import annotations

import ctypes

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
