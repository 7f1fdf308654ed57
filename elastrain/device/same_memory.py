"""The host as a device. Its memory is the memory that members share, so nothing is copied, waited for or pinned."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from elastrain.device.container_memory import group_memory
from elastrain.device.landing import DeviceEvent
from elastrain.device.port import DeviceDescription


class ReachedEvent:
    """An event with the methods of torch's, which is reached when it is recorded."""

    def __init__(self, recorded_s: float | None = None) -> None:
        self._recorded_s = recorded_s

    def query(self) -> bool:
        """Return True."""
        return True

    def wait(self, stream: None = None) -> None:
        """Do nothing."""

    synchronize = wait

    def elapsed_time(self, end: ReachedEvent) -> float:
        """Return the milliseconds from this event to a later one. Raises ValueError if one has no time."""
        if self._recorded_s is None or end._recorded_s is None:
            raise ValueError("an event was recorded without timing=True: it has no time")
        return (end._recorded_s - self._recorded_s) * 1000


class HostDevice:
    """The port to the CPU and its memory."""

    is_host = True
    device = torch.device("cpu")

    def empty(self, size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `DevicePort.empty`. Raises RuntimeError if there is no memory."""
        return torch.empty(size, dtype=dtype, device="cpu")

    empty_pinned = empty

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None = None) -> DeviceEvent:
        """Copy at once, unless both are the same memory."""
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
        return _REACHED

    copy_in = copy_out

    def record(self, *, timing: bool = False, blocking: bool = True) -> DeviceEvent:
        """Return an event that is reached."""
        if not timing:
            return _REACHED
        return DeviceEvent(ReachedEvent(time.perf_counter()), self.current_stream, None)

    def current_stream(self, *_: Any, **__: Any) -> None:
        """Do nothing: the host has no streams."""

    synchronize = record_stream = reset_peak_memory_stats = current_stream

    def side_stream(self, name: str = "") -> AbstractContextManager[None]:
        """Return a context without effect."""
        return nullcontext()

    def is_capturing(self) -> bool:
        """Return False."""
        return False

    def manual_seed(self, seed: int) -> None:
        """Seed torch's default generator."""
        torch.default_generator.manual_seed(seed)

    def memory_allocated(self) -> tuple[int, int]:
        """Return the kernel's figures of the process."""
        process = _figures("/proc/self/status")
        return process["VmRSS"], process["VmHWM"]

    def mem_get_info(self) -> tuple[int, int]:
        """Return the available memory as the kernel estimates it, and the memory of the machine or container."""
        machine, group = _figures("/proc/meminfo"), group_memory()
        free_bytes, limit_bytes = group or (machine["MemAvailable"], machine["MemTotal"])
        return min(free_bytes, machine["MemAvailable"]), min(limit_bytes, machine["MemTotal"])

    def pin(self, memory: torch.Tensor, *, read_only: bool = False) -> Callable[[], None] | None:
        """Return a function that does nothing: no device copies, so nothing has to be pinned."""
        return lambda: None

    def describe(self) -> DeviceDescription:
        """Return the architecture as the name. What else decides the CPU's bits is in `runtime.settings`."""
        return DeviceDescription(type="cpu", index=None, name=platform.machine())


def _figures(path: str) -> dict[str, int]:
    """Return the lines of a file of the kernel that give kB, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1:] == ["kB"]}


HOST = HostDevice()
_REACHED = DeviceEvent(ReachedEvent(), HOST.current_stream, None)
