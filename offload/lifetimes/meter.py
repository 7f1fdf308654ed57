"""The kernel's view of this process's own memory: what is held now, and the most since the last look. Linux."""

from __future__ import annotations

import time
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_FORGET_THE_PEAK = "5"


class KernelMeter:
    """`MemoryMeter` by the kernel's counts."""

    runs_ahead = False

    def own_bytes(self) -> tuple[int, int]:
        """Memory that is no file's: now, and at most since `forget_peak`."""
        found = {}
        for line in _STATUS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmHWM", "VmRSS", "RssAnon"):
                found[name] = int(value.split()[0]) << 10
        of_files = found["VmRSS"] - found["RssAnon"]
        return found["RssAnon"], found["VmHWM"] - of_files

    def forget_peak(self) -> None:
        """Let the peak begin anew from what is held now; without the right to, it stays the highest ever."""
        try:
            _CLEAR.write_text(_FORGET_THE_PEAK)
        except OSError:
            return

    def clock(self) -> float:
        """What computes on the CPU is done when it returns."""
        return time.perf_counter()

    def keep_pace(self) -> None:
        """Nothing is ahead."""
