"""This process's memory in huge pages: it is forked, and its children end, in a third of the processor time.

A fork copies an entry for each page that its parent has written, and the end of a child takes them all back: some
60,000 pages of 4 KiB once torch is imported, and of 2 MiB hardly more than a hundred. What a child writes to comes
apart into small pages again, there and for the child alone.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_HUGE_BYTES = 2 << 20
_COLLAPSE = 25
"""MADV_COLLAPSE, of Linux 6.1: at once, whatever the system's setting is, and without a mark for what comes later."""


def collapse() -> None:
    """Put what is there by now into huge pages, as far as the kernel knows how and has any."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in _written():
        for start in range(-(-begin // _HUGE_BYTES) * _HUGE_BYTES, end - _HUGE_BYTES + 1, _HUGE_BYTES):
            advise(start, _HUGE_BYTES, _COLLAPSE)


def _written() -> list[tuple[int, int]]:
    """The ranges of private memory that belong to no file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, _, _, inode, *_ = line.split()
        if rights == "rw-p" and inode == "0":
            begin, end = where.split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found
