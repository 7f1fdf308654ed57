"""The kernel's view of this process's own memory: what is held now, and the most since the last look. Linux."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

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
