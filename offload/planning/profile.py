"""Statistics of an offload as plain values, and the profile files that `elastrain offload` reads.

Values are lifetimes of saved tensors, passes, devices and totals; nothing here measures. A profile is of passes that
move activations (`Profile`), or of a step under a plan (`StepProfile`). The file is JSON and is replaced as a whole. A
worker of `elastrain run` writes the former to the run's folder, `offload/<member>.json`; otherwise the program gives
the path. No torch here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from pathlib import Path as FilePath
from typing import Any, Literal

import msgspec

from elastrain.base import line_files
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.planning.orders import SeenStep, UpdateOrder
from elastrain.offload.planning.plan_values import Plan, Tier
from elastrain.offload.planning.step_recording import Recording

YEAR_S = 365.25 * 86_400


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
    moved_by: str = ""
    """The way of an accelerator's bytes to the device and back; "" if it got none."""
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


def lasts_years(step_bytes: float, step_s: float, rating_bytes: float) -> float:
    """Return the years until `rating_bytes` have been written at `step_bytes` per step."""
    return rating_bytes / step_bytes * step_s / YEAR_S if step_bytes else float("inf")


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


class _SizeInStorages:
    """An attribute of `OffloadStats` that is the size of the same name in its `storages`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._size: Callable[[StorageBytes], int] = attrgetter(name)

    def __get__(self, stats: OffloadStats, kind: type) -> int:
        return self._size(stats.storages)


@dataclass(frozen=True, kw_only=True)
class OffloadStats:
    """Statistics since the first pass. The sizes in `storages` are also attributes of this class."""

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

    live_bytes = _SizeInStorages()
    """Bytes in memory now, including storages that are being read back."""
    peak_bytes = _SizeInStorages()
    """The most bytes that were in memory at once."""
    saved_bytes = _SizeInStorages()
    """Bytes that autograd saved, each storage counted once."""
    shared_bytes = _SizeInStorages()
    """Bytes that autograd saved again, as parts of storages that it had already saved."""
    spilled_bytes = _SizeInStorages()
    """Bytes that were sent to drives."""
    forwarded_bytes = _SizeInStorages()
    """Bytes that were returned from memory while they were being written."""
    evicted_bytes = _SizeInStorages()
    """Bytes that were dropped from memory after being read back, because another storage was needed first."""


def size(size_bytes: float) -> str:
    """Format a number of bytes with three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"


WRITE_EVERY_S = 5.0
"""Seconds between two writes of a profile file. One write of a thousand storages takes a few milliseconds."""
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """Bytes of one kind of state in memory and on disk."""

    what: str
    memory_bytes: int
    disk_bytes: int


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The profile of one process: statistics of its activations, the location of its other state, and the reasons."""

    format: Literal[2] = 2
    stats: OffloadStats
    places: tuple[Occupancy, ...] = ()
    reason: str = ""
    host: str = ""
    """Name of the machine whose drives were used."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The profile of training within a memory limit: its tiers, a measured step, and the plan that was made from it.

    `recording` is an operator-by-operator recording of a step, or None.
    """

    limit_bytes: int
    tiers: tuple[Tier, ...]
    seen: SeenStep
    order: UpdateOrder
    plan: Plan
    recording: Recording | None = None

    def __post_init__(self) -> None:
        pieces, tiers = len(self.plan.program.pieces), len(self.tiers)
        if any(not 0 <= move.gap.piece < pieces for move in self.plan.moves):
            raise ValueError("a move is of a piece that the plan does not have")
        if any(not 0 <= share.tier < tiers for move in self.plan.moves for share in move.shares):
            raise ValueError("a piece lies on a tier that is not named")
        if len(self.plan.played.stalls_s) not in (0, len(self.plan.program.points)):
            raise ValueError("the plan's stalls are not one for each of its points")


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
        write(self._path, take())


# Files.


class _StepFile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="lifetimes"
):
    """The content of a file with the profile of a step."""

    format: Literal[1] = 1
    profile: StepProfile


class _FileKind(msgspec.Struct, frozen=True):
    """The field that tells the two kinds of profile files apart. Those of activations do not have it."""

    kind: str = ""


def encode(profile: Profile | StepProfile) -> bytes:
    """Return the profile as one JSON object."""
    return msgspec.json.encode(_StepFile(profile=profile) if isinstance(profile, StepProfile) else profile)


def write(file: FilePath, profile: Profile | StepProfile) -> None:
    """Write the file atomically. Raises OSError."""
    line_files.replace(file, encode(profile))


def as_data(profile: Profile) -> dict[str, Any]:
    """Return the profile as plain data for programs: the file's content, with sizes among the other statistics."""
    data: dict[str, Any] = msgspec.json.decode(encode(profile))
    # Programs find the sizes under the names that they have in Python. Only `read` depends on the layout of the file.
    data["stats"] |= data["stats"].pop("storages")
    return data


def read(file: FilePath) -> Profile | StepProfile:
    """Read a profile of either kind. Raises OffloadConfigError if the file holds no readable profile."""
    try:
        data = file.read_bytes()
        if msgspec.json.decode(data, type=_FileKind).kind:
            return msgspec.json.decode(data, type=_StepFile).profile
        return msgspec.json.decode(data, type=Profile)
    except (OSError, ValueError, RecursionError) as error:
        raise OffloadConfigError(
            f"{file} holds no profile that can be read ({error}): "
            f"`save_on_disk(profile=file)` and `training.save_profile(file)` write one"
        ) from None
