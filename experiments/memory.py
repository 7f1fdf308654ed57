"""Peak bytes of live tensors in one process, exact on CPU, the same for every framework that is compared.

PyTorch's CPU allocator counts every allocation of every thread once its own reporting flag is up, and the profiler
hands the running total out with each allocation of the calling thread. Memory that does not come from that allocator
(shared mappings) is added by name, or found as the process's own memfd mappings. Nothing of elastrain is imported here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"


@dataclass(kw_only=True)
class Usage:
    """What one measured stretch used, in bytes. Filled when the stretch ends."""

    allocator_peak_bytes: int = 0
    external_peak_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Exact while the external bytes stand still during the stretch; else an upper bound."""
        return self.allocator_peak_bytes + self.external_peak_bytes


class MemoryAccount:
    """Counts the CPU tensors allocated from its creation on: make it before the model.

    The counting costs nothing that can be measured; a `measure()` runs under the profiler, so do not time inside it.
    """

    def __init__(self, *, external: Callable[[], int] = lambda: 0) -> None:
        """`external` tells the bytes that live outside the allocator, e.g. `own_memfd_bytes`."""
        _count_all_threads()
        self._external = external
        self._registered: dict[str, int] = {}

    def register_external(self, name: str, size_bytes: int) -> None:
        """Add memory that the allocator does not know; the same name again replaces it, 0 removes it."""
        self._registered[name] = size_bytes

    def external_bytes(self) -> int:
        return sum(self._registered.values()) + self._external()

    def live_bytes(self) -> int:
        """Everything live now, external bytes included."""
        with self.measure() as usage:
            probe = torch.empty(1)
        return usage.peak_bytes - probe.untyped_storage().nbytes()

    @contextmanager
    def measure(self) -> Iterator[Usage]:
        """Peak over the block, as seen at each allocation that the calling thread makes in it (at least one)."""
        usage = Usage()
        before = self.external_bytes()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield usage
        totals = list(_running_totals(profiler))
        if not totals:
            raise ValueError("nothing was allocated in the measured block: put at least one tensor operation into it")
        usage.allocator_peak_bytes = max(totals)
        usage.external_peak_bytes = max(before, self.external_bytes())


def _count_all_threads() -> None:
    """Raise the allocator's reporting flag, for good: a tensor freed while it is down would stay on the books."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every measurement writes two lines to stderr
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, _FLAG).value = True


def _running_totals(profiler: profile) -> Iterator[int]:
    results: Any = profiler.profiler.kineto_results if profiler.profiler else None
    pending = list(results.experimental_event_tree()) if results else []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag.name == "Allocation":
            yield event.extra_fields.total_allocated


def own_memfd_bytes(smaps: Iterable[str] | None = None) -> int:
    """Resident bytes of the anonymous shared segments (memfd) that this process itself can write, each page once.

    Peers' segments are mapped read-only and are counted by their owners. `smaps` are lines of `/proc/self/smaps`.
    """
    resident: dict[str, int] = {}
    segment: str | None = None
    for line in smaps if smaps is not None else Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if "-" in fields[0] and not fields[0].endswith(":"):
            writable_memfd = len(fields) == 6 and fields[5].startswith("/memfd:") and "w" in fields[1]
            segment = f"inode {fields[4]} from {fields[2]}" if writable_memfd else None
        elif segment is not None and fields[0] == "Rss:":
            resident[segment] = max(resident.get(segment, 0), int(fields[1]) * 1024)
    return sum(resident.values())
