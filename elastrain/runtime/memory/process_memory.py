"""What this process holds in memory, as the kernel counts it. Linux only; nothing is decided here.

What a member may hold in memory, as it was told, and where what does not fit may go.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.offload.drives.posix import Calls

MEASURED_STEPS = 8
"""What computing takes besides what is counted: the most of so many steps."""
SETTLED_STEPS = 2
"""From this step of a plan on, what it took is what it takes."""
_M_MMAP_THRESHOLD = -3
MMAP_FROM_BYTES = 256 << 10
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def give_freed_memory_back() -> None:
    """Let the C library return freed tensors to the kernel at once, or what leaves would make no room."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that was held: nobody knows whether the kernel's mark has what was read of others meanwhile."""

    least_bytes: int
    """If all of it was read before."""
    most_bytes: int
    """If all of it was read after."""


class PeakMeter:
    """The most that this process itself held since the last look: its anonymous memory and its own shared memory.

    Pages of files, and peers' memory that is only read here, are others' or can be dropped: they are left out. The
    kernel's high-water mark knows no such difference. So whoever looks between what computes and what reads peers'
    memory for the first time knows more. Any thread may look.
    """

    def __init__(self, shared_bytes: Callable[[], int]) -> None:
        self._shared_bytes = shared_bytes
        self._lock = threading.Lock()
        self._own_bytes = self._others_bytes = 0
        self._least_bytes = self._most_bytes = 0
        self.take()

    def look(self) -> None:
        """Note the most that was held until now: what the high-water mark rises by from here on is another matter."""
        with self._lock:
            status, before_bytes = _status(), self._others_bytes
            _CLEAR_REFS.write_text(_RESET_PEAK)
            self._own_bytes = status["RssAnon"] + self._shared_bytes()
            self._others_bytes = status["VmRSS"] - self._own_bytes
            peak_bytes = status["VmHWM"] - max(before_bytes, self._others_bytes)
            self._least_bytes = max(self._least_bytes, peak_bytes, self._own_bytes)
            self._most_bytes = max(self._most_bytes, self._least_bytes, status["VmHWM"] - before_bytes)

    def take(self) -> Peak:
        """The peak since it was taken last, from which the next one counts."""
        self.look()
        with self._lock:
            peak = Peak(least_bytes=self._least_bytes, most_bytes=self._most_bytes)
            self._least_bytes = self._most_bytes = self._own_bytes
        return peak

    @property
    def now_bytes(self) -> int:
        """What was held at the last look."""
        return self._own_bytes


@dataclass(frozen=True, kw_only=True)
class CapturedBytes:
    """Of states that wait for a checkpoint's disk: the most in a step, and what is left at its end."""

    most_bytes: int
    now_bytes: int


NOTHING_CAPTURED = CapturedBytes(most_bytes=0, now_bytes=0)


class StepsTaken:
    """What steps have taken besides what is accounted for: interpreter, libraries, data, and computing itself."""

    def __init__(self, meter: PeakMeter) -> None:
        self.steps = 0
        """Measured so far."""
        self._meter = meter
        self._in_view = self._in_last_view = 0
        self._besides: deque[tuple[int, int]] = deque(maxlen=MEASURED_STEPS)
        """Of each step, at least and at most: captured states come and go, and nobody knows when the peak was."""

    @property
    def has_settled(self) -> bool:
        """The second step takes more than the first, because optimizer state has come into being; then no more."""
        return self.steps >= SETTLED_STEPS

    @property
    def has_settled_in_view(self) -> bool:
        """What the present plan took is what it takes."""
        return self._in_view >= SETTLED_STEPS

    @property
    def had_settled_before(self) -> bool:
        """Likewise of the plan before this one."""
        return self._in_last_view >= SETTLED_STEPS

    def begin_view(self) -> None:
        if not self.steps:
            self._meter.take()  # what starting took for a moment is no step's
        self._in_last_view, self._in_view = self._in_view, 0

    def computed(self) -> None:
        """A micro-batch was computed; what follows may read peers' memory."""
        self._meter.look()

    def pass_over(self) -> None:
        """A step was committed that is not to be measured."""
        self._meter.take()

    def add_step(self, accounted_bytes: int, captured: CapturedBytes = NOTHING_CAPTURED) -> int:
        """Measure a step; its peak in bytes, for certain."""
        peak = self._meter.take()
        self._in_view += 1
        self.steps += 1
        if self.steps == SETTLED_STEPS:  # the first step warms up, and spills everything to learn
            self._besides.clear()
        # What later steps may take is planned with the most: what was held before others' memory was read comes again.
        besides_bytes = peak.most_bytes - accounted_bytes
        self._besides.append((max(0, besides_bytes - captured.most_bytes), max(0, besides_bytes - captured.now_bytes)))
        return peak.least_bytes

    def base_bytes(self, accounted_bytes: int) -> int:
        """The most that was taken besides; before a step was measured, what is held now besides."""
        return max((at_least for at_least, _ in self._besides), default=max(0, self._meter.now_bytes - accounted_bytes))

    @property
    def doubtful_bytes(self) -> int:
        """What may have been taken besides, and may have been captured states that are written by now."""
        return max((most for _, most in self._besides), default=0) - max((low for low, _ in self._besides), default=0)


def _status() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes."""
    found = {}
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value[:-3]) * 1024
    return found


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """`limit_bytes` is what this process may hold in memory; `directories` are on SSDs, empty for none."""

    limit_bytes: int
    directories: tuple[str, ...] = ()
    calls: Calls | None = None
    """The kernel's calls on files there, where faults on request take their place."""

    @staticmethod
    def of(limit_bytes: int | None, directories: tuple[str, ...]) -> MemoryLimit | None:
        """None without a limit. Raises ConfigError for directories without one: nothing would ever go there."""
        if limit_bytes is None and directories:
            raise ConfigError(
                f"{directories[0]} is for what a memory limit leaves no room for: give one too (--memory-limit), or "
                "leave the directory out (--offload-dir)"
            )
        return None if limit_bytes is None else MemoryLimit(limit_bytes=limit_bytes, directories=directories)

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0:
            raise ConfigError(f"memory_limit must be a positive number of bytes; got {self.limit_bytes}")
