"""The kernel's view of this process's own memory: what is held now, and the most since the last look. Linux."""

from __future__ import annotations

import contextlib
import os
import time

_STATUS = "/proc/self/status"
_CLEAR = "/proc/self/clear_refs"
_FORGET_THE_PEAK = b"5"
_MORE_THAN_IT_HAS = 1 << 16


class KernelMeter:
    """`MemoryMeter` by the kernel's counts."""

    runs_ahead = False

    def own_bytes(self) -> tuple[int, int]:
        """Memory that is no file's: now, and at most since `forget_peak`."""
        # Asked twice per point: files of Python and a look at each line take as long as the kernel's own work.
        file = os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.read(file, _MORE_THAN_IT_HAS)
        finally:
            os.close(file)
        most, now, own = (_bytes_of(status, name) for name in (b"\nVmHWM:", b"\nVmRSS:", b"\nRssAnon:"))
        return own, most - (now - own)

    def forget_peak(self) -> None:
        """Let the peak begin anew from what is held now; without the right to, it stays the highest ever."""
        try:
            file = os.open(_CLEAR, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            return
        with contextlib.suppress(OSError):
            os.write(file, _FORGET_THE_PEAK)
        os.close(file)

    def clock(self) -> float:
        """What computes on the CPU is done when it returns."""
        return time.perf_counter()

    def keep_pace(self) -> None:
        """Nothing is ahead."""


def _bytes_of(status: bytes, name: bytes) -> int:
    """What a line says in kB."""
    begin = status.index(name) + len(name)
    return int(status[begin : status.index(b"kB", begin)]) << 10
