"""What happened, as plain values: lifetimes of saved tensors, passes, devices, totals. Nothing here measures.

Lifetimes are what a planner over all tensors (such as TERAIO's) starts from.

The file that a run leaves for `elastrain offload show`: what happened, as JSON, replaced as a whole. No torch here.

In a worker of `elastrain run` it lies in the run's folder, `offload/<member>.json`; alone, where it was asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path as FilePath
from typing import Any

import msgspec

from elastrain.base import line_files
from elastrain.offload.errors import OffloadConfigError


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


FORMAT = 2
WRITE_EVERY_S = 5.0
"""A profile of a thousand storages takes a few milliseconds to write."""
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """How much of one kind of state is in memory and how much on disk, in bytes."""

    what: str
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One process: its activations, what else it holds and where, and why."""

    stats: OffloadStats
    places: tuple[Occupancy, ...] = ()
    reason: str = ""
    host: str = ""
    """The machine whose drives these are."""


def default_file(run_dir: FilePath | None, member: str) -> FilePath | None:
    """Where a worker of `elastrain run` leaves its profile; None elsewhere. A second offload gets a second file."""
    if run_dir is None:
        return None
    number = next(_numbers)
    return run_dir / "offload" / (f"{member}.json" if number == 1 else f"{member}-{number}.json")


class ProfileFile:
    """Where profiles go, and when one is due; None takes none. Holds nothing of what it describes."""

    def __init__(self, path: FilePath | None, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._due_s = clock() + WRITE_EVERY_S

    def offer(self, take: Callable[[], Profile]) -> None:
        """A moment at which the profile may be written."""
        if self._clock() >= self._due_s:
            self.write(take)

    def write(self, take: Callable[[], Profile]) -> None:
        """Write it now: whole or not at all. Raises OSError."""
        if self._path is None:
            return
        self._due_s = self._clock() + WRITE_EVERY_S
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        line_files.replace(self._path, encode(take()).encode())


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile as it lies in a file."""

    format: int
    stats: OffloadStats
    places: tuple[Occupancy, ...]
    reason: str
    host: str = ""


def encode(profile: Profile) -> str:
    """One JSON object."""
    file = _File(format=FORMAT, stats=profile.stats, places=profile.places, reason=profile.reason, host=profile.host)
    return msgspec.json.encode(file).decode()


def as_data(profile: Profile) -> dict[str, Any]:
    """For programs: what `encode` writes, with the sizes beside the other statistics."""
    data: dict[str, Any] = msgspec.json.decode(encode(profile))
    # As they are named in Python, too: where they lie in the file is nobody's business but `read`'s.
    data["stats"] |= data["stats"].pop("storages")
    return data


def read(file: FilePath) -> Profile:
    """Raises OffloadConfigError, in one sentence, if there is no profile that can be read."""
    try:
        told = msgspec.json.decode(file.read_bytes(), type=_File)
        if told.format != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
    except (OSError, ValueError, RecursionError) as error:
        raise OffloadConfigError(f"{file} holds no profile of an offload that can be read ({error!r})") from None
    return Profile(stats=told.stats, places=told.places, reason=told.reason, host=told.host)
