"""The memory that this process holds, as the kernel or a device counts it, and `MemoryLimit`: what it may hold.

Linux only. Nothing is decided here.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Protocol

from elastrain.device.port import DevicePort
from elastrain.errors import ConfigError
from elastrain.memory import memory_budget as budget
from elastrain.memory.pipeline_memory import TaskBytes
from elastrain.offload.drives.posix import Calls
from elastrain.runtime.durable.checkpoint_parts import Room

MEASURED_STEPS = 8
"""Number of last steps whose maximum counts as the memory that is taken besides the accounted bytes."""
SETTLED_STEPS = 2
"""Number of steps after which the measurements under a plan are final."""
_M_MMAP_THRESHOLD = -3
MMAP_FROM_BYTES = 256 << 10
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

Directories = str | PathLike[str] | Sequence[str | PathLike[str]]
"""One directory, or several."""


def give_freed_memory_back() -> None:
    """Make the C library return freed tensors to the kernel at once. Else spilling would make no room."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Bounds of the peak of a process's own memory.

    The kernel's high-water mark includes peers' memory that was read. It does not show if that was before the peak.
    """

    least_bytes: int
    """Peak if all memory of peers was read before it."""
    most_bytes: int
    """Peak if all memory of peers was read after it."""
    besides_bytes: int | None = None
    """Most bytes at once besides the accounted ones, or None if the meter does not know what was accounted for."""


class StepMeter(Protocol):
    """A meter of the memory that this process holds. Any thread may look."""

    def look(self) -> None:
        """Look at the memory after a micro-batch, if that makes the peak's bounds tighter."""

    def take(self) -> Peak:
        """Return the peak since the last call, and start the next one."""
        ...

    @property
    def now_bytes(self) -> int:
        """Bytes that are held now, or were at the last look."""
        ...


class PeakMeter:
    """A meter of the peak of this process's own memory: anonymous memory and its own shared memory.

    File pages can be dropped, and peers' memory that is read here belongs to them, so neither counts. The kernel's
    high-water mark includes both. A `look` between computing and the first read of peers' memory makes the bounds of
    the peak tighter. Any thread may look.
    """

    def __init__(self, shared_bytes: Callable[[], int]) -> None:
        self._shared_bytes = shared_bytes
        self._lock = threading.Lock()
        self._own_bytes = self._others_bytes = 0
        self._least_bytes = self._most_bytes = 0
        self.take()

    def look(self) -> None:
        """Add the peak since the last look to the bounds, and reset the kernel's high-water mark."""
        with self._lock:
            status, before_bytes = _status(), self._others_bytes
            _CLEAR_REFS.write_text(_RESET_PEAK)
            self._own_bytes = status["RssAnon"] + self._shared_bytes()
            self._others_bytes = status["VmRSS"] - self._own_bytes
            peak_bytes = status["VmHWM"] - max(before_bytes, self._others_bytes)
            self._least_bytes = max(self._least_bytes, peak_bytes, self._own_bytes)
            self._most_bytes = max(self._most_bytes, self._least_bytes, status["VmHWM"] - before_bytes)

    def take(self) -> Peak:
        """Return the peak since the last call, and start the next one."""
        self.look()
        with self._lock:
            peak = Peak(least_bytes=self._least_bytes, most_bytes=self._most_bytes)
            self._least_bytes = self._most_bytes = self._own_bytes
        return peak

    @property
    def now_bytes(self) -> int:
        """Bytes that were held at the last look."""
        return self._own_bytes


@dataclass(frozen=True, kw_only=True)
class CapturedBytes:
    """Bytes of states that wait for a checkpoint's disk: the maximum in a step, and the rest at its end."""

    most_bytes: int
    now_bytes: int


NOTHING_CAPTURED = CapturedBytes(most_bytes=0, now_bytes=0)


def captured_bytes(room: Room | None) -> CapturedBytes:
    """Return the bytes of states captured in the step that is over. `room`: their memory, if it is the limited one."""
    if room is None:
        return NOTHING_CAPTURED
    return CapturedBytes(most_bytes=room.take_most_bytes(), now_bytes=room.used_bytes)


def limit_captures(room: Room | None, free_bytes: int) -> None:
    """Give captured states the free memory but for what writing them takes."""
    if room is not None:
        room.limit_bytes = max(0, free_bytes - budget.WRITING_BYTES)


class StepsTaken:
    """The memory of steps besides the accounted bytes: interpreter, libraries, data, and computing itself."""

    def __init__(self, meter: StepMeter) -> None:
        self.steps = 0
        """Number of steps measured so far."""
        self._meter = meter
        self._in_view = self._in_last_view = 0
        self._besides: deque[tuple[int, int]] = deque(maxlen=MEASURED_STEPS)
        """Lower and upper bound of each step. They differ by captured states, which may have come before the peak."""

    @property
    def has_settled(self) -> bool:
        """True once two steps were measured. The second takes more than the first, because optimizer state exists."""
        return self.steps >= SETTLED_STEPS

    @property
    def has_settled_in_view(self) -> bool:
        """True once two steps were measured under the current plan, so that its needs are known."""
        return self._in_view >= SETTLED_STEPS

    @property
    def had_settled_before(self) -> bool:
        """True if the needs of the plan before the current one were known."""
        return self._in_last_view >= SETTLED_STEPS

    def begin_view(self) -> None:
        """Start to count the steps of a new plan."""
        if not self.steps:
            self._meter.take()  # the peak of the start belongs to no step
        self._in_last_view, self._in_view = self._in_view, 0

    def computed(self) -> None:
        """Look at the memory after a micro-batch, because the next work may read peers' memory."""
        self._meter.look()

    def pass_over(self) -> None:
        """Drop the peak of a committed step that is not to be measured."""
        self._meter.take()

    def add_step(self, held_bytes: int, captured: CapturedBytes = NOTHING_CAPTURED, *, passing_bytes: int = 0) -> int:
        """Measure a step, and return the lower bound of its peak in bytes.

        Args:
            held_bytes: Accounted bytes that are held at the step's end.
            captured: Bytes of states that wait for a checkpoint's disk.
            passing_bytes: Accounted bytes that are held within a step only.
        """
        peak = self._meter.take()
        self._in_view += 1
        self.steps += 1
        if self.steps == SETTLED_STEPS:  # the first step is not typical: it warms up and spills everything to learn
            self._besides.clear()
        # Later steps are planned with the upper bound, because a peak before peers' memory was read comes again.
        besides_bytes = peak.most_bytes - held_bytes if peak.besides_bytes is None else peak.besides_bytes
        besides_bytes -= passing_bytes
        self._besides.append((max(0, besides_bytes - captured.most_bytes), max(0, besides_bytes - captured.now_bytes)))
        return peak.least_bytes

    def base_bytes(self, accounted_bytes: int) -> int:
        """Return the maximum of the memory besides the accounted bytes; before the first step, its present value."""
        return max((at_least for at_least, _ in self._besides), default=max(0, self._meter.now_bytes - accounted_bytes))

    @property
    def doubtful_bytes(self) -> int:
        """Bytes that may have been needed besides, or may have been captured states that were written meanwhile."""
        return max((most for _, most in self._besides), default=0) - max((low for low, _ in self._besides), default=0)


def held_bytes(shared_bytes: int) -> int:
    """Return the memory that this process holds now: anonymous memory, and its own shared memory."""
    return _status()["RssAnon"] + shared_bytes


class HeldInStep:
    """The peak of the last measured step, and its parts. Together they bound what a new plan takes."""

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        """Peak of the last step that was measured, or None before the first."""
        self._parameters_bytes = self._shards_bytes = 0
        self._gradients_bytes = self._open_bytes = 0
        """Most bytes of gradients in the last step, and in the open one."""

    def note(self, *, gradients_bytes: int) -> None:
        """Note the gradients at a moment of the open step."""
        self._open_bytes = max(self._open_bytes, gradients_bytes)

    def end(self, peak_bytes: int, parameters_bytes: int, shards_bytes: int) -> None:
        """End the step with its peak, and with what is held at its commit."""
        self.peak_bytes, self._parameters_bytes, self._shards_bytes = peak_bytes, parameters_bytes, shards_bytes
        self._gradients_bytes, self._open_bytes = self._open_bytes, 0

    def most_bytes(self, needs: budget.Needs, tasks: TaskBytes) -> int | None:
        """Return the most that a plan takes: the last peak, and what its parts take more. None before any step.

        `tasks`: what the tasks of the last step took.
        """
        if self.peak_bytes is None:
            return None
        more = (
            needs.parameters_bytes - self._parameters_bytes,
            needs.gradients_bytes - self._gradients_bytes,
            needs.shards_bytes - self._shards_bytes,
            needs.activations_bytes - tasks.activations_bytes,
            needs.boundaries_bytes - tasks.boundaries_bytes,
        )
        return self.peak_bytes + sum(max(0, each) for each in more)


def _status() -> dict[str, int]:
    """Return the sizes in /proc/self/status, in bytes."""
    found = {}
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value[:-3]) * 1024
    return found


def host_memory_of(
    limit_bytes: int | None, tier_bytes: int | None, told: tuple[int | None, int]
) -> tuple[int | None, int]:
    """Return the limit of host memory and the bytes of its tier: the script's, and the launcher's where it has none.

    Raises ConfigError for values that are no numbers of bytes.
    """
    _check_bytes("host_memory_limit", limit_bytes)
    _check_bytes("host_tier", tier_bytes)
    return told[0] if limit_bytes is None else limit_bytes, told[1] if tier_bytes is None else tier_bytes


def _check_bytes(name: str, given: object) -> None:
    if given is not None and (isinstance(given, bool) or not (isinstance(given, int | float) and given > 0)):
        raise ConfigError(
            f"{name} must be a positive number of bytes; got {given!r}: leave it out to have the one of "
            f"elastrain run --{name.replace('_', '-')}, or none"
        )


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The memory limits of this process, and the places for what does not fit."""

    limit_bytes: int | None
    """Bytes of the memory that computes: the device's in a job on a device. None: only the host's is limited."""
    directories: tuple[str, ...] = ()
    """Directories on SSDs; empty for none."""
    calls: Calls | None = None
    """System calls for files in the directories, if faults on request replace them."""
    host_limit_bytes: int | None = None
    """Bytes of host memory in a job on a device, or None."""
    host_tier_bytes: int = 0
    """Bytes of host memory above the directories, for what leaves a device."""

    @staticmethod
    def of(limit_bytes: int | None, told: Directories, host: tuple[int | None, int] = (None, 0)) -> MemoryLimit | None:
        """Return the limit, or None without one. Raises ConfigError for places without a limit.

        Args:
            limit_bytes: Bytes that this process may use, or None.
            told: One directory on an SSD, or several.
            host: Limit of host memory, or None, and the bytes of the tier in host memory.
        """
        directories = tuple(fspath(each) for each in ([told] if isinstance(told, str | PathLike) else told))
        host_limit_bytes, tier_bytes = host
        if limit_bytes is None and host_limit_bytes is None and directories:
            raise ConfigError(
                f"{directories[0]} is for what a memory limit leaves no room for: give one too (--memory-limit), or "
                "leave the directory out (--offload-dir)"
            )
        if limit_bytes is None and tier_bytes:
            raise ConfigError(
                "--host-tier is host memory for what a limit of device memory leaves no room for: give --memory-limit "
                "too, or leave it out"
            )
        if limit_bytes is None and host_limit_bytes is None:
            return None
        return MemoryLimit(
            limit_bytes=limit_bytes,
            directories=directories,
            host_limit_bytes=host_limit_bytes,
            host_tier_bytes=tier_bytes,
        )

    def __post_init__(self) -> None:
        _check_bytes("memory_limit", self.limit_bytes)

    def on(self, port: DevicePort) -> MemoryLimit:
        """Return the limit for a model on this device. Its `limit_bytes` is a number.

        Raises ConfigError for a limit larger than the device, and for a tier where there is no device.
        """
        if port.is_host:
            if self.host_tier_bytes:
                raise ConfigError(
                    "--host-tier is host memory for what leaves a device, and the model is on the CPU, whose memory "
                    "is the host's: leave it out, and name a directory on an SSD (--offload-dir)"
                )
            limits = [each for each in (self.limit_bytes, self.host_limit_bytes) if each is not None]
            return replace(self, limit_bytes=min(limits), host_limit_bytes=None)
        _, capacity_bytes = port.mem_get_info()
        if self.limit_bytes is not None and self.limit_bytes > capacity_bytes:
            raise ConfigError(
                f"--memory-limit allows {self.limit_bytes:,} bytes of device memory, and {port.device} has "
                f"{capacity_bytes:,}: lower the limit, or leave it out; --host-memory-limit bounds the host's memory"
            )
        return self if self.limit_bytes is not None else replace(self, limit_bytes=capacity_bytes)
