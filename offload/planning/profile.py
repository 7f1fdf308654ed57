"""Statistics of an offload as plain values, and the profile file that a run leaves for `elastrain offload show`.

Values are lifetimes of saved tensors, passes, devices and totals; nothing here measures. The file is JSON and is
replaced as a whole. A worker of `elastrain run` writes it to the run's folder, `offload/<member>.json`; outside of one,
the program gives the path. No torch here.
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
    """The way in which backward got a saved storage."""

    KEPT = "kept"  # it never left memory
    FORWARDED = "forwarded"  # returned from memory while it was being written
    READ_AHEAD = "read ahead"  # read from the drive before it was needed
    WAITED = "waited"  # backward waited until it was read
    UNUSED = "unused"  # backward never asked for it


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """One saved storage; times are seconds since its pass began. `module` is the innermost module that was running.

    `stalled_s` is the time for which the forward waited for free memory until then. `saved_s` does not include it.
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
    """One device: totals since it was opened, and rates from the last pass that moved enough bytes to measure."""

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
    """For each class of tensors, the measured gain of compressing it, and whether it is compressed."""

    def drive_writes_per_day(self, elapsed_s: float) -> float:
        """Return how often per day the whole file system would be written at this pace.

        A drive's rating is 0.3 to 3.
        """
        return drive_writes_per_day(self.written_bytes, self.capacity_bytes, elapsed_s)


def drive_writes_per_day(written_bytes: int, capacity_bytes: int, elapsed_s: float) -> float:
    """Return how often per day a drive of this capacity would be written as a whole, or 0 if an argument is 0."""
    if not elapsed_s or not capacity_bytes:
        return 0.0
    return written_bytes / capacity_bytes * 86_400 / elapsed_s


@dataclass(frozen=True, kw_only=True)
class StorageBytes:
    """Sizes of saved storages.

    `live_bytes` and `peak_bytes` count those in memory; the others are totals over all passes.
    """

    live_bytes: int
    peak_bytes: int
    saved_bytes: int
    shared_bytes: int
    spilled_bytes: int
    forwarded_bytes: int
    evicted_bytes: int


@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Statistics since the first pass. The sizes in `storages` are also properties of this class."""

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
        """Bytes in memory now, including storages that are being read back."""
        return self.storages.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were in memory at once."""
        return self.storages.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saved, each storage counted once."""
        return self.storages.saved_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes that autograd saved again, as parts of storages that it had already saved."""
        return self.storages.shared_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes that were sent to drives."""
        return self.storages.spilled_bytes

    @property
    def forwarded_bytes(self) -> int:
        """Bytes that were returned from memory while they were being written."""
        return self.storages.forwarded_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes that were dropped from memory after being read back, because another storage was needed first."""
        return self.storages.evicted_bytes


def size(size_bytes: float) -> str:
    """Format a number of bytes with three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


FORMAT = 2
WRITE_EVERY_S = 5.0
"""Seconds between two writes of a profile file. One write of a thousand storages takes a few milliseconds."""
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Bytes of one kind of state in memory and on disk."""

    what: str
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profile of one process: statistics of its activations, the location of its other state, and the reasons."""

    stats: OffloadStats
    places: tuple[Occupancy, ...] = ()
    reason: str = ""
    host: str = ""
    """Name of the machine whose drives were used."""


def default_file(run_dir: FilePath | None, member: str) -> FilePath | None:
    """Return the path of a worker's profile in its run folder, or None outside of `elastrain run`.

    A second offload in the same process gets a second file.
    """
    if run_dir is None:
        return None
    number = next(_numbers)
    return run_dir / "offload" / (f"{member}.json" if number == 1 else f"{member}-{number}.json")


class ProfileFile:
    """A file that profiles are written to, at most every `WRITE_EVERY_S` seconds.

    With the path None nothing is written. The object holds no reference to what the profile describes.
    """

    def __init__(self, path: FilePath | None, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._due_s = clock() + WRITE_EVERY_S

    def offer(self, take: Callable[[], Profile]) -> None:
        """Write the profile if the next write is due."""
        if self._clock() >= self._due_s:
            self.write(take)

    def write(self, take: Callable[[], Profile]) -> None:
        """Write the profile now, atomically. Raises OSError."""
        if self._path is None:
            return
        self._due_s = self._clock() + WRITE_EVERY_S
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        line_files.replace(self._path, encode(take()).encode())


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a profile file."""

    format: int
    stats: OffloadStats
    places: tuple[Occupancy, ...]
    reason: str
    host: str = ""


def encode(profile: Profile) -> str:
    """Return the profile as one JSON object."""
    file = _File(format=FORMAT, stats=profile.stats, places=profile.places, reason=profile.reason, host=profile.host)
    return msgspec.json.encode(file).decode()


def as_data(profile: Profile) -> dict[str, Any]:
    """Return the profile as plain data for programs: the file's content, with sizes among the other statistics."""
    data: dict[str, Any] = msgspec.json.decode(encode(profile))
    # Programs find the sizes under the names that they have in Python. Only `read` depends on the layout of the file.
    data["stats"] |= data["stats"].pop("storages")
    return data


def read(file: FilePath) -> Profile:
    """Read a profile. Raises OffloadConfigError if the file holds no readable profile."""
    try:
        told = msgspec.json.decode(file.read_bytes(), type=_File)
        if told.format != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
    except (OSError, ValueError, RecursionError) as error:
        raise OffloadConfigError(f"{file} holds no profile of an offload that can be read ({error!r})") from None
    return Profile(stats=told.stats, places=told.places, reason=told.reason, host=told.host)
