"""What happened, as plain values: lifetimes of saved tensors, passes, devices, totals. Nothing here measures.

Lifetimes are what a planner over all tensors (such as TERAIO's) starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Path(Enum):
    """How a storage came back to backward."""

    KEPT = "kept"  # it never left
    FORWARDED = "forwarded"  # handed back from memory while it was being written
    READ_AHEAD = "read ahead"  # it had been read before it was needed
    WAITED = "waited"  # backward waited for it
    UNUSED = "unused"  # nobody asked for it


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """One saved storage, in seconds since its pass began. `module` is the innermost module that was running.

    `saved_s` leaves out what forward stood still for room until then, `stalled_s`.
    """

    index: int
    size_bytes: int
    dtype: str
    module: str
    saved_s: float
    needed_s: float | None
    released_s: float
    path: Path
    waited_s: float
    stalled_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PassProfile:
    """One forward with its backward. `timeline` holds (seconds, live bytes) at each change."""

    number: int
    forward_s: float
    total_s: float
    saved_bytes: int
    spilled_bytes: int
    peak_bytes: int
    save_stall_s: float
    need_stall_s: float
    lifetimes: tuple[Lifetime, ...]
    timeline: tuple[tuple[float, int], ...]


@dataclass(frozen=True, kw_only=True)
class DeviceStats:
    """One device: totals since it was opened, and the rates of the last pass that moved enough to tell."""

    name: str
    slab_bytes: int
    used_bytes: int
    quota_bytes: int | None
    written_bytes: int
    read_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    capacity_bytes: int
    packing: tuple[str, ...] = ()
    """Per class of tensors, what was measured of packing it and whether it is packed."""

    def drive_writes_per_day(self, elapsed_s: float) -> float:
        """How often the whole file system would be written in a day at this pace (a drive's rating is 0.3 to 3)."""
        return drive_writes_per_day(self.written_bytes, self.capacity_bytes, elapsed_s)


def drive_writes_per_day(written_bytes: int, capacity_bytes: int, elapsed_s: float) -> float:
    """How often a drive of this capacity would be written as a whole in a day; 0 where nothing is known."""
    if not elapsed_s or not capacity_bytes:
        return 0.0
    return written_bytes / capacity_bytes * 86_400 / elapsed_s


@dataclass(frozen=True, kw_only=True)
class StorageBytes:
    """Sizes of saved storages, in bytes: `live` and `peak` of those in memory, others over all passes."""

    live_bytes: int
    peak_bytes: int
    saved_bytes: int
    shared_bytes: int
    spilled_bytes: int
    forwarded_bytes: int
    evicted_bytes: int


@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Everything since the first pass. The sizes in `storages` can be read here, too."""

    limit_bytes: int | None
    passes: int
    elapsed_s: float
    storages: StorageBytes
    save_stall_s: float
    need_stall_s: float
    amount: str
    faults: tuple[str, ...] = ()
    devices: tuple[DeviceStats, ...] = ()
    last: PassProfile | None = field(default=None, repr=False)

    @property
    def live_bytes(self) -> int:
        """In memory now, what is being read back included."""
        return self.storages.live_bytes

    @property
    def peak_bytes(self) -> int:
        """In memory at most."""
        return self.storages.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Saved by autograd, each storage once."""
        return self.storages.saved_bytes

    @property
    def shared_bytes(self) -> int:
        """Saved again, as parts of storages that were saved already."""
        return self.storages.shared_bytes

    @property
    def spilled_bytes(self) -> int:
        """Sent to drives."""
        return self.storages.spilled_bytes

    @property
    def forwarded_bytes(self) -> int:
        """Handed back from memory while they were being written."""
        return self.storages.forwarded_bytes

    @property
    def evicted_bytes(self) -> int:
        """Dropped from memory after they had been read back, because another was needed first."""
        return self.storages.evicted_bytes


def size(size_bytes: float) -> str:
    """Bytes for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"
