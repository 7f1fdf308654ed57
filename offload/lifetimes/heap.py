"""The C library's heap: what is freed goes back to the kernel, or no limit on a process would hold (glibc)."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 256 << 10
"""Allocations from this size on are mapped on their own, and unmapped when they are freed."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_libc = ctypes.CDLL(None)


def give_back_what_is_freed() -> None:
    """From now on. Without it, the C library keeps up to 64 MiB, and as much again in holes."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        _libc.mallopt(_TRIM_THRESHOLD, LARGE_BYTES)


def trim() -> None:
    """Give back what is free now."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
