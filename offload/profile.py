"""The file that a run leaves for `elastrain offload show`: what happened, as JSON, replaced as a whole. No torch here.

In a worker of `elastrain run` it lies in the run's folder, `offload/<member>.json`; alone, where it was asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import msgspec

from elastrain.base import private_files
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.stats import OffloadStats

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
        private_files.replace(self._path, encode(take()).encode())


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
